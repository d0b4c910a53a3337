"""Small changes to a schedule: each kind is found, and none breaks what the schedule kept."""

from dataclasses import replace

import pytest
from support.problems import LinePrices, random_problem
from support.thorough import drawn

from graphshard.errors import PlanError
from graphshard.planner.search import local_search as polish
from graphshard.planner.search import solve
from graphshard.planner.search.exact import best_schedule, least_peak
from graphshard.planner.search.local_search import polished
from graphshard.planner.search.machine import Step
from graphshard.planner.search.problem import Collective, Problem, Task
from graphshard.planner.search.simulate import simulate
from graphshard.planner.search.solve import Effort, in_place, is_possible, plan

RANDOM = [random_problem(seed, most=6, num_tasks=6, with_memory=True) for seed in range(900, 930)]


def _gather(deadline, num_bytes=8, **changes):
    return Collective(
        name=f"g{deadline}", kind="all_gather", queue="shard", in_bytes=0, out_bytes=num_bytes, earliest=0,
        deadline=deadline, merge_key=("gather",), limit="gather", **changes,
    )  # fmt: skip


def _reduction(earliest, end, **changes):
    return Collective(
        name=f"r{earliest}", kind="reduce_scatter", queue="shard", in_bytes=8, out_bytes=0, earliest=earliest,
        deadline=end, merge_key=("reduction",), views_result=True, limit="reduction", **changes,
    )  # fmt: skip


def _problem(ones, seconds, *, latency=1.0, **changes):
    """Each of eight bytes takes its latency and 2 s; copies cost nothing to speak of."""
    prices = LinePrices(latency=latency, bandwidth=4.0, copies=1e9)
    return Problem(tasks=[Task(seconds=each) for each in seconds], collectives=ones, prices=prices, **changes)


def _improved(problem, steps):
    found = polished(problem, steps)
    assert simulate(problem, found).seconds <= simulate(problem, steps).seconds
    return found


def test_a_start_moves_as_far_as_it_helps():
    problem = _problem([_gather(9)], [1.0] * 10)
    found = _improved(problem, [Step(9, True, (0,)), Step(9, False, (0,))])
    assert simulate(problem, found).seconds == 10.0
    assert found[0].position <= 6


def test_a_wait_moves():
    problem = _problem([_reduction(1, 5)], [1.0] * 5)
    found = _improved(problem, [Step(1, True, (0,)), Step(1, False, (0,))])
    assert simulate(problem, found).seconds == 5.0
    assert found[1].position >= 4


def test_a_start_moves_past_another_of_its_gap():
    """The second is needed first."""
    ones = [_gather(4), replace(_gather(2), merge_key=None)]
    problem = _problem(ones, [3.0, 0.0, 3.0, 0.0, 0.0])
    steps = [Step(0, True, (0,)), Step(0, True, (1,)), Step(2, False, (1,)), Step(4, False, (0,))]
    assert simulate(problem, steps).seconds == 9.0
    assert simulate(problem, _improved(problem, steps)).seconds == 6.0


def test_two_buckets_become_one():
    problem = _problem([_gather(0), _gather(1)], [1.0, 1.0], latency=8.0)
    found = _improved(problem, in_place(problem))
    assert found == [Step(0, True, (0, 1)), Step(0, False, (0, 1))]


def test_a_bucket_falls_in_two():
    problem = _problem([_gather(0), _gather(1)], [9.0, 1.0], latency=0.5)
    found = _improved(problem, [Step(0, True, (0, 1)), Step(0, False, (0, 1))])
    assert simulate(problem, found).seconds == pytest.approx(2.5 + 10.0)


def test_a_reduction_leaves_one_that_is_ready_later():
    problem = _problem([_reduction(1, 6), _reduction(5, 6)], [2.0] * 6, latency=0.5)
    found = _improved(problem, [Step(5, True, (0, 1)), Step(6, False, (0, 1))])
    assert simulate(problem, found).seconds == pytest.approx(12.5)


@pytest.mark.parametrize("merged", [(0, 1), (0, 1, 2)], ids=str)
def test_a_member_goes_over_to_the_next_bucket(merged):
    """Two buckets are best: what is read at once, and the rest; one that is too large delays the first task."""
    problem = _problem([_gather(0), _gather(1), _gather(1), _gather(1)], [7.5, 1.0], latency=1.5)
    rest = tuple(sorted({0, 1, 2, 3} - set(merged)))
    steps = [Step(0, True, merged), Step(0, True, rest), Step(0, False, merged), Step(1, False, rest)]
    found = _improved(problem, steps)
    assert simulate(problem, found).seconds == simulate(problem, best_schedule(problem)).seconds
    assert simulate(problem, found).seconds == pytest.approx(12.0)
    assert found[0].members == (0,) and len(found) == 4


@pytest.mark.parametrize("problem", drawn(RANDOM))
def test_what_was_kept_is_kept(problem):
    """The budget, and what the user insists on."""
    budget = least_peak(problem) + 6
    limited = replace(problem, budget_bytes=budget, max_gathers=1, max_reductions=1)
    steps = in_place(limited)
    if not is_possible(limited, steps):
        limited = replace(limited, budget_bytes=simulate(limited, steps).peak_bytes)
    found = _improved(limited, steps)
    assert is_possible(limited, found)
    assert simulate(limited, best_schedule(limited)).seconds <= simulate(limited, found).seconds + 1e-6
    assert polished(limited, steps) == found


def test_some_random_schedules_get_faster():
    before = [simulate(one, in_place(one)).seconds for one in RANDOM]
    after = [simulate(one, polished(one, in_place(one))).seconds for one in RANDOM]
    assert sum(map(float.__lt__, after, before)) > len(RANDOM) / 2


def test_it_ends_after_so_much_work(monkeypatch):
    problem = _problem([_gather(9)], [1.0] * 10)
    monkeypatch.setattr(polish, "_MOST_WORK", 11)
    steps = [Step(9, True, (0,)), Step(9, False, (0,))]
    assert polished(problem, steps) == steps


def test_an_impossible_schedule_stays():
    problem = _problem([_gather(1)], [1.0, 1.0], budget_bytes=1)
    assert polished(problem, in_place(problem)) == in_place(problem)


# in plans ----------------------------------------------------------------------------------------


MIDDLING = [
    random_problem(seed, most=16, num_tasks=12, is_long=True, with_memory=True, is_tight=True) for seed in range(40)
]
SMALL = [problem for problem in MIDDLING if len(problem.collectives) <= solve.EXACT_COLLECTIVES][:8]
MIDDLING = [problem for problem in MIDDLING if len(problem.collectives) > solve.EXACT_COLLECTIVES]


def test_plans_of_middling_problems_are_made_better(monkeypatch):
    with_changes = [plan(problem).seconds for problem in MIDDLING]
    monkeypatch.setattr(solve, "polished", lambda problem, steps, limit: list(steps))
    without = [plan(problem).seconds for problem in MIDDLING]
    assert all(one <= other for one, other in zip(with_changes, without, strict=True))
    assert sum(one < other for one, other in zip(with_changes, without, strict=True)) >= 3


def test_small_problems_that_have_too_many_states_are_made_better_too(monkeypatch):
    monkeypatch.setattr(solve, "EXACT_STATES", 10)
    exact = [plan(problem) for problem in SMALL]
    assert {found.solver for found in exact} == {"exact"}  # more states, once there is a good schedule
    with_changes = [plan(problem, effort=Effort(exact_states=10)) for problem in SMALL]
    assert {found.solver for found in with_changes} == {"beam"}
    monkeypatch.setattr(solve, "polished", lambda problem, steps, limit: list(steps))
    without = [plan(problem, effort=Effort(exact_states=10)).seconds for problem in SMALL]
    assert all(one.seconds <= other for one, other in zip(with_changes, without, strict=True))
    assert any(one.seconds < other for one, other in zip(with_changes, without, strict=True))


def test_less_memory_is_tried_where_the_budget_binds(monkeypatch):
    """What a beam drops for want of memory depends on chance."""
    asked, again = [], []
    real = solve._searched

    def searched(problem, searches=None, *, limit):
        asked.append(problem.budget_bytes)
        again.append(searches)
        found = list(real(problem, searches, limit=limit))
        if searches is None:
            done.append(sorted((simulate(problem, steps).seconds, place) for place, (_, steps) in enumerate(found)))
            names.append([search for search, _ in found])
        return iter(found)

    done, names = [], []

    monkeypatch.setattr(solve, "_searched", searched)
    problem = MIDDLING[0]
    free = plan(problem)
    assert asked == [None]
    for budget, more in ((10 * free.peak_bytes, []), (free.peak_bytes, [0.98, 0.96])):
        asked.clear()
        again.clear()
        assert plan(replace(problem, budget_bytes=budget)).seconds <= free.seconds + 1e-6
        assert asked == [budget, *(round(share * budget) for share in more)]
        best = [names[-1][place] for _, place in done[-1][: solve.NUM_AGAIN]]
        assert again[0] is None and all(set(searches) == set(best) for searches in again[1:])


@pytest.mark.parametrize("seed", drawn(range(900, 930)))
def test_what_is_left_out_of_simulations_changes_nothing(seed):
    """As if each changed schedule was simulated from its beginning to its end."""
    problem = random_problem(seed, most=6, num_tasks=6, with_memory=True)
    steps = in_place(problem)

    def cost(schedule):
        try:
            found = simulate(problem, schedule)
        except PlanError:
            return None
        is_over = problem.budget_bytes is not None and found.peak_bytes > problem.budget_bytes
        return None if is_over else (float(f"{found.seconds:.7g}"), found.peak_bytes)

    best, least, is_better = steps, cost(steps), cost(steps) is not None
    while is_better:
        is_better = False
        for bucket in [step.members for step in best if step.is_start]:
            for changed in polish._changes(problem, best, bucket):
                found = cost(changed)
                if found is not None and found < least:
                    best, least, is_better = changed, found, True
                    break
    assert polished(problem, steps) == best


@pytest.mark.parametrize("name", ["seconds", "peak_bytes", "held_bytes"])
def test_a_state_that_is_better_in_anything_is_followed(name):
    """So is one that has done something else."""
    state = simulate(RANDOM[0], in_place(RANDOM[0])).end
    assert polish._is_no_better(state, state)
    more = replace(state, **{name: getattr(state, name) + 1})
    assert polish._is_no_better(more, state) and not polish._is_no_better(state, more)
    assert not polish._is_no_better(replace(state, waited=0), state)
