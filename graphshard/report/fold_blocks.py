"""Folds the repeated blocks of a graph's text, such as the layers of a transformer.

Two lines are alike if they are equal without the numbers in names. A stretch of lines that repeats is written once.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

#: The fewest repetitions, and the fewest lines, that are folded.
_MIN_BLOCKS, _MIN_LINES = 3, 12

#: Distances between equal lines that are tried as the length of a block.
_MAX_PERIODS = 16

#: Numbers that differ between blocks: those of a name, of a module's path and of a version of a value.
_NUMBER = re.compile(r"(?<=[._])\d+\b")


def folded_lines(lines: Sequence[str]) -> Iterator[str]:
    """The lines with the first of each run of equal blocks, and a comment for the others."""
    kinds: dict[str, int] = {}
    words = [kinds.setdefault(_NUMBER.sub("N", line), len(kinds)) for line in lines]
    yield from _folded(lines, words)


def _folded(lines: Sequence[str], words: Sequence[int]) -> Iterator[str]:
    start, period, length = _periodic_stretch(words)
    count = length // period if period else 0
    if count < _MIN_BLOCKS or length < _MIN_LINES:
        yield from lines
        return
    end = start + count * period
    yield from _folded(lines[:start], words[:start])
    yield from lines[start : start + period]
    yield f"# {count - 1} more blocks of {period} lines like the {period} above, but for numbers in names"
    yield from _folded(lines[end:], words[end:])


def _periodic_stretch(words: Sequence[int]) -> tuple[int, int, int]:
    """Start, period and length of the longest stretch that repeats; the shortest period breaks ties."""
    seen: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for index, word in enumerate(words):
        if word in seen:
            distances[index - seen[word]] += 1
        seen[word] = index
    best, longest = (0, 0, 0), 0
    for period, _ in sorted(distances.most_common(_MAX_PERIODS)):
        differ = (index for index in range(len(words) - period) if words[index] != words[index + period])
        ends = [-1, *differ, len(words) - period]
        run, first = max((end - before - 1, -before) for before, end in itertools.pairwise(ends))
        if run > longest:
            best, longest = (1 - first, period, run + period), run
    return best
