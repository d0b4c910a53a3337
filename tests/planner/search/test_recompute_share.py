"""How many activations are saved, chosen together with the units that keep their parameters."""

import pytest

from graphshard.errors import InfeasibleBudgetError
from graphshard.planner.search.keep_units import KeepingCost
from graphshard.planner.search.recompute_share import SHARES, choose_saved

UNITS = ["a", "b", "root"]
DEFAULT = ["root"]
EVERY = tuple(UNITS)


class Step:
    """10 bytes and -5 s for each unit that is kept, 100 bytes of activations, some seconds to compute them again."""

    def __init__(self, budget, again, floor=0):
        self.budget, self.again, self.floor = budget, again, floor
        self.asked = []

    def __call__(self, kept, share):
        assert (kept, share) not in self.asked, "asked twice"
        self.asked.append((kept, share))
        saved = 1.0 if share is None else max(share, self.floor)
        num_bytes = round(100 * saved) + 10 * len(kept)
        if num_bytes > self.budget:
            raise InfeasibleBudgetError(self.budget, num_bytes, is_smallest=False)
        return KeepingCost(seconds=100 - 5 * len(kept) + self.again * (1 - saved), peak_bytes=num_bytes)


def chosen(step):
    return choose_saved(UNITS, DEFAULT, step)


def test_where_all_units_can_be_kept_nothing_is_computed_again():
    step = Step(130, again=1)
    assert chosen(step) == (None, ("a", "b", "root"))
    assert {share for _, share in step.asked} == {None}


def test_the_fastest_share_that_fits_is_saved():
    """Of what a smaller share frees each unit saves 5 s."""
    step = Step(60, again=100)
    assert chosen(step) == (0.5, ("root",))
    assert (EVERY, 0.1) not in step.asked, "with all units at 0.25 it only computes more again"
    assert chosen(Step(60, again=20)) == (0.25, EVERY)


@pytest.mark.parametrize(("again", "expected"), [(1, (0.75, ("a", "b", "root"))), (90, (None, ("root",)))])
def test_computing_again_and_gathering_again_are_weighed(again, expected):
    """115 bytes: all activations and one unit, or three units and a share."""
    assert chosen(Step(115, again=again)) == expected


def test_the_best_share_is_tried_with_every_choice_of_units():
    """Within 95, a share of 0.75 and two units: neither none nor all."""
    step = Step(95, again=400)
    assert chosen(step) == (0.75, ("b", "root"))


def test_of_many_units_no_choice_that_was_found_is_lost():
    """Of more than 6 units only some runs are tried with the best share, and these do not fit here."""
    units = [str(index) for index in range(20)]
    without = tuple(units[13:])

    def evaluate(kept, share):
        if (share is None and len(kept) <= 7) or (kept, share) == (without, 0.5):
            return KeepingCost(seconds=(90 if share else 100) - len(kept), peak_bytes=1)
        raise InfeasibleBudgetError(1, 2, is_smallest=False)

    assert choose_saved(units, [], evaluate) == (0.5, without)


def test_a_budget_that_nothing_keeps_is_refused_with_the_smallest_that_was_found():
    with pytest.raises(InfeasibleBudgetError) as refused:
        chosen(Step(20, again=1, floor=0.3))
    assert refused.value.smallest_bytes == 30


def test_without_units_shares_alone_are_tried():
    assert choose_saved([], [], Step(60, again=1))[0] == 0.5
    assert choose_saved([], [], Step(100, again=1))[0] is None


def test_shares_may_be_left_out():
    step = Step(115, again=1)
    assert choose_saved(UNITS, DEFAULT, step, shares=()) == (None, ("root",))
    assert {share for _, share in step.asked} == {None}
    with pytest.raises(InfeasibleBudgetError):
        choose_saved(UNITS, DEFAULT, Step(60, again=1), shares=())


def test_shares_fall():
    assert list(SHARES) == sorted(SHARES, reverse=True) and 0 < SHARES[-1] < SHARES[0] < 1
