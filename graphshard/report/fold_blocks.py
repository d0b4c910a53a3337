"""Folds the repeated blocks of a graph's text, such as the layers of a transformer.

Two lines are alike if they are equal without the numbers in names. A stretch of lines that repeats is written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..periods import periodic_stretch

#: The fewest repetitions, and the fewest lines, that are folded.
_MIN_BLOCKS, _MIN_LINES = 3, 12

#: Numbers that differ between blocks: those of a name, of a module's path and of a version of a value.
_NUMBER = re.compile(r"(?<=[._])\d+\b")


def folded_lines(lines: Sequence[str]) -> Iterator[str]:
    """The lines with the first of each run of equal blocks, and a comment for the others."""
    kinds: dict[str, int] = {}
    words = [kinds.setdefault(_NUMBER.sub("N", line), len(kinds)) for line in lines]
    yield from _folded(lines, words)


def _folded(lines: Sequence[str], words: Sequence[int]) -> Iterator[str]:
    start, period, length = periodic_stretch(words)
    count = length // period
    if count < _MIN_BLOCKS or length < _MIN_LINES:
        yield from lines
        return
    end = start + count * period
    yield from _folded(lines[:start], words[:start])
    yield from lines[start : start + period]
    yield f"# {count - 1} more blocks of {period} lines like the {period} above, but for numbers in names"
    yield from _folded(lines[end:], words[end:])
