"""Where a sequence repeats itself."""

import pytest

from graphshard.periods import periodic_stretch


@pytest.mark.parametrize(
    ("words", "stretch"),
    [
        ([], (0, 1, 0)),
        ([1, 2, 3], (0, 1, 0)),
        ([9, 1, 2, 1, 2, 1, 2, 8], (1, 2, 6)),
        ([1, 1, 1, 1], (0, 1, 4)),
        ([0, 1, 2, 3, 1, 2, 3, 1, 2], (1, 3, 8)),
    ],
)
def test_the_longest_stretch_and_its_shortest_period(words, stretch):
    assert periodic_stretch(words) == stretch
