"""The cases of a large grid that `make test` runs; the others are slow."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

Case = Mapping[str, int]
"""By argument, a number that stands for its value."""


def mark_unsampled(items: Sequence[pytest.Item]) -> None:
    """Of each test marked `sampled`, marks the cases slow that `covering` leaves out."""
    grids: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_sampled = isinstance(item, pytest.Function) and item.get_closest_marker("sampled") is not None
        # A case that is slow anyway covers nothing in `make test`.
        if is_sampled and item.get_closest_marker("slow") is None:
            grids[item.path, item.function].append(item)
    for cases in grids.values():
        # Values need not be hashable; those of one `parametrize` are the same objects in each case.
        kept = covering([{name: id(value) for name, value in case.callspec.params.items()} for case in cases])
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(pytest.mark.slow)


def covering(cases: Sequence[Case]) -> set[int]:
    """Cases in which each two values of different arguments meet, if they meet at all; greedily few.

    With two arguments that would be all: then cases in which each value occurs. Arguments that are given together,
    by one `parametrize`, count as one.
    """
    columns = {name: tuple(case[name] for case in cases) for name in cases[0]}
    names = list({column: name for name, column in columns.items()}.values())
    strength = min(2, len(names) - 1)
    wanted = [
        {(some, tuple(case[name] for name in some)) for some in combinations(names, strength)} for case in cases
    ]
    missing, kept = set().union(*wanted), set()
    while missing:
        best = max(range(len(cases)), key=lambda place: len(wanted[place] & missing))
        kept.add(best)
        missing -= wanted[best]
    return kept or {0}
