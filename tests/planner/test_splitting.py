"""Splitting a collective: why the planner does not (docs/planning.md), on examples that the exact solver decides."""

import random
from dataclasses import replace

import pytest
from problems import LinePrices

from graphshard.planner.bound import lower_bounds
from graphshard.planner.exact import best_schedule
from graphshard.planner.problem import Collective, Problem, Task
from graphshard.planner.simulate import simulate


def _seconds(problem):
    return simulate(problem, best_schedule(problem)).seconds


def _halved(problem, index):
    """The collective as two of half its size, which may be merged with anything the whole may."""
    whole = problem.collectives[index]
    sizes = {
        name: getattr(whole, name) // 2 for name in ("in_bytes", "out_bytes", "ready_bytes", "kept_bytes")
    }
    halves = [replace(whole, **sizes), replace(whole, name="rest", **sizes)]
    others = [one for place, one in enumerate(problem.collectives) if place != index]
    return replace(problem, collectives=[*others, *halves])


def _gather(name, size, deadline, **changes):
    return Collective(name=name, kind="all_gather", queue="shard", in_bytes=size // 4, out_bytes=size, earliest=0,
                      deadline=deadline, merge_key=("gather",), limit="gather", **changes)  # fmt: skip


def _sharded_step(seed):
    """Gathers of inputs and reductions of results on one group, without a budget."""
    dice = random.Random(seed)
    end = 4
    tasks = [Task(seconds=float(dice.choice([0, 1, 3, 8]))) for _ in range(end)]
    ones = [
        _gather(f"g{place}", dice.choice([8, 16, 32, 64]), dice.randrange(end + 1))
        for place in range(dice.randrange(1, 3))
    ]
    for place in range(dice.randrange(0, 3)):
        size = dice.choice([8, 16, 32])
        ones.append(
            Collective(name=f"r{place}", kind="reduce_scatter", queue="shard", in_bytes=size, out_bytes=size // 4,
                       earliest=dice.randrange(end + 1), deadline=end, merge_key=("reduction",),
                       limit="reduction", views_result=True)
        )  # fmt: skip
    prices = LinePrices(latency=dice.choice([0.0, 0.5, 2.0]), copies=dice.choice([64.0, 1e9]))
    return Problem(tasks=tasks, collectives=ones, prices=prices)


@pytest.mark.parametrize("seed", range(60))
def test_without_a_budget_splitting_what_sharding_needs_is_never_faster(seed):
    problem = _sharded_step(seed)
    whole = _seconds(problem)
    for index in range(len(problem.collectives)):
        assert _seconds(_halved(problem, index)) >= whole - 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_no_bound_is_beaten_by_splitting(seed):
    """So what splitting could bring is part of the gap that a plan reports."""
    problem = _sharded_step(seed)
    urgent = Collective(
        name="sum", kind="all_reduce", queue="shard", in_bytes=4, out_bytes=4, earliest=1, deadline=1
    )
    for each in (problem, replace(problem, collectives=[urgent, *problem.collectives])):
        bound = lower_bounds(each).seconds
        for index in range(len(each.collectives)):
            assert _seconds(_halved(each, index)) >= bound - 1e-9


def test_splitting_can_help_where_a_budget_binds():
    """Half of the gather fits beside the task in front of its reader; the whole does not."""
    tasks = [Task(seconds=10.0, live_bytes=60, before_bytes=0), Task(seconds=1.0, live_bytes=0)]
    problem = Problem(
        tasks=tasks,
        collectives=[replace(_gather("g", 80, 1, kept_bytes=80), merge_key=None)],
        prices=LinePrices(latency=1.0, bandwidth=4.0),
        budget_bytes=100,
    )
    assert _seconds(problem) == 10.0 + 21.0 + 1.0
    assert _seconds(_halved(problem, 0)) == 11.0 + 11.0 + 1.0


def test_splitting_can_help_where_something_urgent_becomes_ready_meanwhile():
    """A sum that the next task reads waits behind a gather that nobody needs yet."""
    tasks = [Task(seconds=25.0), Task(seconds=25.0), Task(seconds=1.0)]
    urgent = Collective(
        name="sum", kind="all_reduce", queue="shard", in_bytes=4, out_bytes=4, earliest=1, deadline=1
    )
    ones = [urgent, replace(_gather("g", 184, 2), merge_key=None)]
    problem = Problem(tasks=tasks, collectives=ones, prices=LinePrices(latency=1.0, bandwidth=4.0))
    assert _seconds(problem) == 75.0 and _seconds(_halved(problem, 1)) == 53.0
    assert lower_bounds(problem).seconds <= 53.0
