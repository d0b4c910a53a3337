"""List schedules: valid ones, within the budget, and close to the bound where two groups and compute are all busy."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import LinePrices, random_problem
from support.thorough import examples

from graphshard.planner.search.beam import Beam, good_schedule
from graphshard.planner.search.bound import lower_bounds
from graphshard.planner.search.list_schedule import Rule, schedule_in_turn
from graphshard.planner.search.problem import Collective, Problem, Task
from graphshard.planner.search.simulate import simulate
from graphshard.planner.search.solve import plan

SEEDS = st.integers(0, 10**6)
RULE = Rule(num_gathers=8, num_reductions=8)


def tensor_parallel_backward(num_layers: int) -> Problem:
    """Layers of 8 s that sum twice over one group, and gather and reduce for 8.4 s over another."""
    tasks, ones = [], []
    for layer in range(num_layers):
        for part in range(2):
            gap = len(tasks)
            name = f"{layer}.{part}"
            ones += [
                Collective(name=f"g{name}.{i}", kind="all_gather", queue="shard", in_bytes=1, out_bytes=4,
                           earliest=0, deadline=gap, merge_key=("g",), limit="gather")
                for i in range(3)
            ]  # fmt: skip
            tasks += [Task(seconds=2.0), Task(seconds=2.0)]
            ones.append(
                Collective(name=f"s{name}", kind="all_reduce", queue="tensor", in_bytes=8, out_bytes=8,
                           earliest=gap + 1, deadline=gap + 1)
            )  # fmt: skip
            ones.append(
                Collective(name=f"n{name}", kind="all_reduce", queue="tensor", in_bytes=1, out_bytes=1,
                           earliest=gap + 2, deadline=2 * 2 * num_layers, merge_key=("n",))
            )  # fmt: skip
            after = (len(ones) - 1,)
            ones += [
                Collective(name=f"r{name}.{i}", kind="reduce_scatter", queue="shard", in_bytes=6, out_bytes=2,
                           earliest=gap + 2, deadline=2 * 2 * num_layers, merge_key=("r",), views_result=True,
                           after=after if i == 0 else (), limit="reduction")
                for i in range(3)
            ]  # fmt: skip
    return Problem(tasks=tasks, collectives=ones, prices=LinePrices(latency=0.1, bandwidth=8.0, copies=1e4))


def test_two_busy_groups_beside_compute():
    problem = tensor_parallel_backward(16)
    bounds = lower_bounds(problem)
    seconds = simulate(problem, schedule_in_turn(problem, RULE)).seconds
    assert bounds.seconds <= seconds < 1.05 * bounds.seconds
    assert plan(problem).seconds <= seconds


def test_names_of_groups_do_not_matter():
    """They are counters that differ between ranks."""
    problem = tensor_parallel_backward(4)
    groups = {"shard": "tensor", "tensor": "shard"}
    renamed = replace(
        problem, collectives=[replace(one, queue=groups[one.queue]) for one in problem.collectives]
    )
    assert schedule_in_turn(problem, RULE) == schedule_in_turn(renamed, RULE)
    assert plan(problem).steps == plan(renamed).steps


@examples(40)
@given(seed=SEEDS, is_tight=st.booleans(), most=st.sampled_from([1, 2, 8]))
def test_every_problem_has_a_list_schedule(seed, is_tight, most):
    problem = random_problem(seed, most=16, num_tasks=12, is_tight=is_tight)
    steps = schedule_in_turn(problem, Rule(num_gathers=most, num_reductions=most))
    assert simulate(problem, steps).seconds >= lower_bounds(problem).seconds * (1 - 1e-9)


@examples(40)
@given(seed=SEEDS, share=st.floats(0.0, 1.0))
def test_the_budget_is_kept(seed, share):
    problem = random_problem(seed, most=14, num_tasks=12, with_memory=True)
    free = simulate(problem, schedule_in_turn(problem, RULE)).peak_bytes
    least = max(task.live_bytes for task in problem.tasks)
    budget = int(least + share * (free - least))
    steps = schedule_in_turn(replace(problem, budget_bytes=budget), RULE)
    assert steps is None or simulate(problem, steps).peak_bytes <= budget


SEARCHES = {
    "in turn": lambda problem: schedule_in_turn(problem, RULE),
    "beam": lambda problem: good_schedule(problem, Beam(width=2)),
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_what_may_be_late_is_not_closed_when_it_should_have_ended(search):
    """A reduction of 2 s, begun at 0, that may end at 5: closed as soon as that is certain, which costs nothing."""
    one = Collective(name="r", kind="reduce_scatter", queue="shard", in_bytes=4, out_bytes=1, earliest=0, deadline=9,
                     ready_bytes=4, limit="reduction")  # fmt: skip
    prices = LinePrices(latency=1.0, bandwidth=4.0, spread=3.0)
    problem = Problem(tasks=[Task(seconds=1.0)] * 9, collectives=[one], prices=prices)
    steps = search(problem)
    assert [(step.position, step.is_start) for step in steps] == [(0, True), (5, False)]
    assert simulate(problem, steps).seconds == 9.0


def test_what_is_read_waits_for_what_comes_before_it():
    """A gather of a gather: the first one has no reader of its own."""
    first = Collective(name="a", kind="all_gather", queue="q", in_bytes=1, out_bytes=2, earliest=0, deadline=2,
                       limit="gather")  # fmt: skip
    second = replace(first, name="b", queue="p", deadline=1, after=(0,), limit="")
    tasks = [Task(seconds=10.0), Task(seconds=1.0)]
    problem = Problem(tasks=tasks, collectives=[first, second], prices=LinePrices())
    steps = schedule_in_turn(problem, RULE)
    assert [step.members for step in steps] == [(0,), (0,), (1,), (1,)]


def test_prefetches_of_the_user_are_left_to_the_beams():
    problem = replace(tensor_parallel_backward(2), prefetch=[(0, 1)])
    assert schedule_in_turn(problem, RULE) is None


def test_buckets_of_the_user_start_as_they_are():
    gathers, reductions = (0, 1), (5, 13)
    problem = replace(tensor_parallel_backward(2), fixed_buckets=[gathers, reductions])
    buckets = [step.members for step in schedule_in_turn(problem, RULE) if step.is_start]
    assert gathers in buckets and reductions in buckets
    assert sum(len(members) for members in buckets) == len(problem.collectives)
