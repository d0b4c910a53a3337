"""Which units keep gathered parameters: choices by cost, within a budget."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.thorough import examples

from graphshard.errors import InfeasibleBudgetError
from graphshard.planner.search.keep_units import KeepingCost, choose_kept, extend_kept
from graphshard.progress import TimeLimit

UNITS = ("a", "b", "c", "root")


def _evaluate(budget, gathers=1.0, held=10, base=100):
    """Each kept unit saves ``gathers`` seconds and holds ``held`` bytes."""
    asked = []

    def evaluate(kept):
        asked.append(kept)
        peak = base + held * len(kept)
        if peak > budget:
            raise InfeasibleBudgetError(budget, peak, is_smallest=False)
        return KeepingCost(seconds=50.0 - gathers * len(kept), peak_bytes=peak)

    return evaluate, asked


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(100, ()), (110, ("root",)), (129, ("c", "root")), (130, ("b", "c", "root")), (1000, UNITS)],
)
def test_the_last_units_that_fit_are_kept(budget, kept):
    evaluate, _ = _evaluate(budget)
    choice = choose_kept(UNITS, ("root",), evaluate)
    assert choice.units == kept
    assert choice.cost == evaluate(kept)
    assert dict(choice.tried)[()] == evaluate(())


def test_keeping_that_saves_no_time_is_left():
    evaluate, _ = _evaluate(1000, gathers=0.0)
    assert choose_kept(UNITS, ("root",), evaluate).units == ()


def test_a_budget_that_nothing_keeps_names_the_smallest_found():
    evaluate, _ = _evaluate(99)
    with pytest.raises(InfeasibleBudgetError, match="of 99 bytes; the smallest found that is kept is 100 bytes"):
        choose_kept(UNITS, ("root",), evaluate)


def test_of_many_units_few_choices_are_tried():
    units = tuple(map(str, range(100)))
    evaluate, asked = _evaluate(100 + 10 * 37)
    assert choose_kept(units, (), evaluate).units == units[63:]
    assert len(asked) == len(set(asked)) <= 10


@examples(40)
@given(
    costs=st.lists(st.tuples(st.floats(1, 2), st.integers(50, 150)), min_size=16, max_size=16),
    default=st.sets(st.sampled_from(UNITS)),
)
def test_never_worse_than_none_all_or_the_default(costs, default):
    subsets = [kept for size in range(5) for kept in itertools.combinations(UNITS, size)]
    table = dict(zip(subsets, costs, strict=True))

    def evaluate(kept):
        seconds, peak = table[kept]
        if peak > 100:
            raise InfeasibleBudgetError(100, peak, is_smallest=False)
        return KeepingCost(seconds=seconds, peak_bytes=peak)

    named = [(), UNITS, tuple(unit for unit in UNITS if unit in default)]
    rivals = [table[kept][0] for kept in named if table[kept][1] <= 100]
    try:
        choice = choose_kept(UNITS, tuple(default), evaluate)
    except InfeasibleBudgetError:
        assert not rivals
        return
    assert choice.cost.peak_bytes <= 100
    assert all(choice.cost.seconds <= rival * (1 + 1e-8) for rival in rivals)


@pytest.mark.parametrize(
    ("budget", "default", "kept", "asked"),
    [
        (110, ("root",), ("root",), 2),
        (120, ("root",), ("c", "root"), 3),
        (1000, ("root",), UNITS, 4),
        (1000, ("b",), UNITS, 4),
        (120, ("b",), ("b", "root"), 3),
        (100, (), (), 2),
    ],
)
def test_further_last_units_are_kept_beside_the_default_as_long_as_they_fit(budget, default, kept, asked):
    evaluate, tried = _evaluate(budget)
    choice = extend_kept(UNITS, default, evaluate)
    assert (choice.units, len(tried)) == (kept, asked)
    assert [units for units, _ in choice.tried] == tried
    assert choice.cost == dict(choice.tried)[kept]


def test_no_further_unit_is_kept_that_saves_no_time():
    evaluate, asked = _evaluate(1000, gathers=0.0)
    assert extend_kept(UNITS, ("root",), evaluate).units == ("root",)
    assert asked == [("root",), ("c", "root")]


class CountedLimit(TimeLimit):
    """Of 10 seconds, of which each choice takes some."""

    num_evaluated = 0
    seconds_each = 0.0

    def part(self, share):
        shorter = super().part(share)
        shorter.seconds_each, shorter.num_evaluated = self.seconds_each, self.num_evaluated
        return shorter

    def spent(self):
        return self.num_evaluated * self.seconds_each


@pytest.mark.parametrize(("seconds_each", "num_tried"), [(1.0, 4), (2.0, 3), (4.0, 2), (6.0, 1)])
def test_the_first_choice_beside_the_default_may_take_all_the_time(seconds_each, num_tried):
    """Those after it are to end within two thirds of it."""
    evaluate, asked = _evaluate(1000)
    limit = CountedLimit(seconds=10.0)
    limit.seconds_each = seconds_each

    def counted(units):
        limit.num_evaluated += 1
        return evaluate(units)

    extend_kept(UNITS, ("root",), counted, limit)
    assert len(asked) == num_tried and limit.was_reached is (num_tried < 4)


def test_a_default_that_does_not_fit_is_told():
    evaluate, _ = _evaluate(105)
    with pytest.raises(InfeasibleBudgetError):
        extend_kept(UNITS, ("root",), evaluate)
