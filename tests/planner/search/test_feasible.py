"""Schedules made of what the user insists on, where no search finds any."""

import random
from dataclasses import replace

import pytest
from support.problems import LinePrices, random_problem

from graphshard.errors import ProblemError
from graphshard.planner.search.exact import best_schedule
from graphshard.planner.search.feasible import constrained_schedules
from graphshard.planner.search.problem import Collective, Problem, Task
from graphshard.planner.search.solve import is_possible, plan


def _prefetching(seed):
    """A problem of at most six collectives with one or two prefetches that can be kept; None if they cannot."""
    dice = random.Random(seed)
    problem = random_problem(seed, most=6, num_tasks=6, is_tight=dice.random() < 0.5, with_memory=True)
    count = len(problem.collectives)
    if count < 2:
        return None
    pairs = [tuple(sorted(dice.sample(range(count), 2))) for _ in range(dice.randrange(1, 3))]
    problem = replace(problem, prefetch=pairs)
    return None if best_schedule(problem) is None else problem


KEPT = [problem for problem in map(_prefetching, range(60)) if problem is not None]


def test_what_can_be_kept_is_kept():
    assert len(KEPT) > 20
    for problem in KEPT:
        assert any(is_possible(problem, steps) for steps in constrained_schedules(problem))


@pytest.mark.parametrize("seed", [0, 5])
def test_prefetches_of_more_than_ten_collectives_are_kept_if_they_can_be(seed):
    problem = _prefetching(seed)
    filler = Collective(name="f", kind="all_reduce", queue="r", in_bytes=4, out_bytes=4, earliest=6, deadline=6)
    ones = [*problem.collectives, *[filler] * (11 - len(problem.collectives))]
    assert plan(replace(problem, collectives=ones)).solver == "beam"


def _gathers(*deadlines, **changes):
    ones = [
        Collective(name=f"g{place}", kind="all_gather", queue="q", in_bytes=1, out_bytes=4, earliest=0,
                   deadline=deadline, merge_key=("gather",), limit="gather")
        for place, deadline in enumerate(deadlines)
    ]  # fmt: skip
    return Problem(tasks=[Task(seconds=1.0)] * 4, collectives=ones, prices=LinePrices(), **changes)


def test_a_wait_moves_up_to_where_the_next_must_start():
    """The first is read last, but the second starts behind it, and the third, of the bucket of both, behind that."""
    problem = _gathers(4, 3, 2, 2, prefetch=[(0, 1), (1, 2)], fixed_buckets=[(2, 3)])
    late, *_ = constrained_schedules(problem)
    assert [(step.position, step.members) for step in late] == [
        (2, members) for members in ((0,), (0,), (1,), (1,), (2, 3), (2, 3))
    ]
    assert is_possible(problem, late)


@pytest.mark.parametrize("prefetch", [[(0, 1), (1, 0)], [(0, 0)]])
def test_a_circle_has_no_schedule(prefetch):
    problem = _gathers(4, 4, prefetch=prefetch)
    assert not list(constrained_schedules(problem))
    with pytest.raises(ProblemError, match="ask for fewer of them"):
        plan(problem)


def test_what_must_start_before_it_exists_has_no_schedule():
    problem = _gathers(1, 4, prefetch=[(0, 1)])
    ones = [problem.collectives[0], replace(problem.collectives[1], earliest=2)]
    assert not list(constrained_schedules(replace(problem, collectives=ones)))
