"""How much of a collective passes beside the one in front of it: rows and what lies between."""

import itertools
import random

import pytest

from graphshard.cost.overlaps import OverlapRows


def test_in_between_it_is_linear_in_seconds_and_above_the_last_ratio_stays():
    rows = OverlapRows.of([(400, 4.0, 2.0), (100, 2.0, 0.5)])
    assert [rows.overlapped(seconds) for seconds in (0.0, 1.0, 2.0, 3.0, 4.0, 8.0)] == [0.0, 0.25, 0.5, 1.25, 2.0, 4.0]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1, 2.0, 1.0), (2, 2.0, 0.0), (3, 1.0, 0.0)], ((2.0, 1.0),)),  # larger, but no slower
        ([(1, 2.0, 1.0), (2, 4.0, 0.5)], ((2.0, 1.0), (4.0, 1.0))),  # overlaps by less
        ([(1, 2.0, 0.5), (2, 3.0, 3.0)], ((2.0, 0.5), (3.0, 1.5))),  # has less left
    ],
)
def test_noise_does_not_turn_a_longer_collective_into_a_shorter_one(rows, expected):
    assert OverlapRows.of(rows).rows == ((0.0, 0.0), *expected)


@pytest.mark.parametrize("seed", range(20))
def test_neither_overlap_nor_what_is_left_falls(seed):
    dice = random.Random(seed)
    measured = [(2**k, dice.random() * 2**k, dice.random() * 2**k) for k in range(8)]
    rows = OverlapRows.of(measured)
    seconds = sorted(dice.random() * 300 for _ in range(200))
    overlaps = [rows.overlapped(each) for each in seconds]
    assert all(0 <= overlap <= each for each, overlap in zip(seconds, overlaps, strict=True))
    for (s0, o0), (s1, o1) in itertools.pairwise(zip(seconds, overlaps, strict=True)):
        assert o0 <= o1 + 1e-12
        assert s0 - o0 <= s1 - o1 + 1e-12
