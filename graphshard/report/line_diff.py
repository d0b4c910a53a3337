"""Unified diffs of long texts, in about linear time where most lines are unique, as in graphs.

difflib takes time proportional to lines times changes. Here lines that occur once in each text are matched first: the
longest sequence of them with the same order in both ("patience" diff, Bram Cohen). difflib compares only what lies
between.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import Match, SequenceMatcher

#: A stretch between matched lines counts as replaced if the product of its lengths in both texts is above this.
MOST_COMPARED = 1_000_000


def unified_lines(before: Sequence[str], after: Sequence[str], *, context: int = 2) -> Iterator[str]:
    """The lines of a unified diff, without the two that name the files; none if the texts are equal."""
    for group in _Anchored(before, after).get_grouped_opcodes(context):
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        yield f"@@ -{_range(a0, a1)} +{_range(b0, b1)} @@"
        for kind, i0, i1, j0, j1 in group:
            if kind == "equal":
                yield from (f" {line}" for line in before[i0:i1])
            else:
                yield from (f"-{line}" for line in before[i0:i1])
                yield from (f"+{line}" for line in after[j0:j1])


def _range(start: int, end: int) -> str:
    """A range as diff writes it: the first line, counted from 1, and the number of lines."""
    return f"{start + 1 if end > start else start},{end - start}"


class _Anchored(SequenceMatcher):
    """A matcher that compares only between lines that are unique in both texts."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, before, after, autojunk=False)
        self._before, self._after = before, after

    def get_matching_blocks(self) -> list[Match]:
        before, after = self._before, self._after
        whole = (len(before), len(after))
        blocks: list[Match] = []
        for (i0, j0), (i1, j1) in itertools.pairwise([(-1, -1), *_anchors(before, after), whole]):
            _append(blocks, *_between(before, after, (i0 + 1, i1), (j0 + 1, j1)))
            if (i1, j1) != whole:
                _append(blocks, Match(i1, j1, 1))
        return [*blocks, Match(*whole, 0)]


def _append(blocks: list[Match], *new: Match) -> None:
    for one in new:
        last = blocks[-1] if blocks else None
        if last and (last.a + last.size, last.b + last.size) == (one.a, one.b):
            blocks[-1] = Match(last.a, last.b, last.size + one.size)
        elif one.size:
            blocks.append(one)


def _between(
    before: Sequence[str], after: Sequence[str], rows: tuple[int, int], columns: tuple[int, int]
) -> list[Match]:
    left, right = before[slice(*rows)], after[slice(*columns)]
    if not left or not right or len(left) * len(right) > MOST_COMPARED:
        return []
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return [Match(rows[0] + one.a, columns[0] + one.b, one.size) for one in blocks if one.size]


def _anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Positions of unique common lines: the longest sequence that rises in both texts."""
    counts, others = Counter(before), Counter(after)
    place = {line: index for index, line in enumerate(after) if others[line] == 1}
    pairs = [(i, place[line]) for i, line in enumerate(before) if counts[line] == 1 and line in place]
    lowest: list[int] = []  # the smallest last position of a rising sequence, by its length
    at: list[int] = []
    behind: list[int] = []
    for number, (_, j) in enumerate(pairs):
        length = bisect.bisect_left(lowest, j)
        behind.append(at[length - 1] if length else -1)
        lowest[length : length + 1] = [j]
        at[length : length + 1] = [number]
    found = []
    number = at[-1] if at else -1
    while number >= 0:
        found.append(pairs[number])
        number = behind[number]
    return found[::-1]
