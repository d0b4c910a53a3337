"""Where a sequence of words repeats itself: layers among the calls of a model, or among the lines of its text."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

#: Distances between equal words that are tried as the period, the most frequent first.
_MAX_PERIODS = 16


def periodic_stretch(words: Sequence[int]) -> tuple[int, int, int]:
    """Start, period and length of the stretch with the most repeated words; the shortest period breaks ties.

    Args:
        words: equal numbers for what counts as equal.

    Returns:
        (0, 1, 0) if no word stands twice.
    """
    seen: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for index, word in enumerate(words):
        if word in seen:
            distances[index - seen[word]] += 1
        seen[word] = index
    best, longest = (0, 1, 0), 0
    for period, _ in sorted(distances.most_common(_MAX_PERIODS)):
        differ = (index for index in range(len(words) - period) if words[index] != words[index + period])
        ends = [-1, *differ, len(words) - period]
        run, first = max((end - before - 1, -before) for before, end in itertools.pairwise(ends))
        if run > longest:
            best, longest = (1 - first, period, run + period), run
    return best
