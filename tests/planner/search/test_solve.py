"""The planner on problems too large for brute force."""

import contextlib
import io
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.brief_search import briefly
from support.problems import LinePrices, random_problem
from support.thorough import drawn, examples, is_thorough

from graphshard.errors import InfeasibleBudgetError, PlanError, ProblemError
from graphshard.planner.search import solve
from graphshard.planner.search.beam import Beam, block_length, good_schedule
from graphshard.planner.search.bound import lower_bounds
from graphshard.planner.search.condense import condense, expand
from graphshard.planner.search.machine import Step
from graphshard.planner.search.problem import Collective, Problem, Task
from graphshard.planner.search.simulate import simulate
from graphshard.planner.search.solve import Effort, in_place, leanest_schedule, plan, smallest_budget
from graphshard.progress import TimeLimit

SEEDS = st.integers(0, 10**6)


@briefly()
@examples(25)
@given(seed=SEEDS, with_memory=st.booleans())
def test_a_plan_is_valid_no_slower_than_in_place_and_no_faster_than_the_bound(seed, with_memory):
    problem = random_problem(seed, most=16, num_tasks=12, with_memory=with_memory)
    found = plan(problem, unplanned=in_place(problem))
    again = simulate(problem, found.steps)
    assert (again.seconds, again.peak_bytes) == (found.seconds, found.peak_bytes)
    assert found.seconds <= found.unplanned_seconds
    assert found.seconds >= found.bounds.seconds * (1 - 1e-9)
    assert found.gap == pytest.approx(found.seconds / found.bounds.seconds - 1) or not found.bounds.seconds


@briefly()
@examples(15)
@given(seed=SEEDS, share=st.floats(0.0, 1.0))
def test_the_budget_is_kept_or_refused_with_one_that_works(seed, share):
    problem = random_problem(seed, most=14, num_tasks=12, with_memory=True)
    free = simulate(problem, plan(problem).steps).peak_bytes
    least = max(task.live_bytes for task in problem.tasks)
    budget = int(least + share * (free - least))
    try:
        found = plan(replace(problem, budget_bytes=budget))
    except InfeasibleBudgetError as error:
        assert error.smallest_bytes > budget
        found = plan(replace(problem, budget_bytes=error.smallest_bytes))
        budget = error.smallest_bytes
    assert found.peak_bytes <= budget


@pytest.mark.parametrize(("problems", "graphs"), [(2, 1), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_other_hashes_in_another_process_give_the_same_plans(problems, graphs):
    script = (
        "import contextlib\n"
        "from support.brief_search import brief_search\n"
        "from support.planner_graphs import PRICES, random_graph\n"
        "from support.problems import random_problem\n"
        "from graphshard.planner.schedule_graph import schedule_with_prices\n"
        "from graphshard.planner.search.solve import plan\n"
        f"with {'contextlib.nullcontext' if is_thorough() else 'brief_search'}():\n"
        f"    print([plan(random_problem(seed, most=14, num_tasks=10)).steps for seed in range({problems})])\n"
        f"    print([schedule_with_prices(random_graph(seed), PRICES).steps for seed in range({graphs})])\n"
    )
    paths = str(Path(__file__).parents[2])
    said = set()
    if not is_thorough():  # this process has yet other hashes, and has imported everything
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(script, {})
        said.add(printed.getvalue())
    said |= {
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=300,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        ).stdout
        for seed in (("1", "2") if is_thorough() else ("1",))
    }  # fmt: skip
    (text,) = said
    assert text.count("Step(") > 8 * (problems + graphs)


@briefly()
@examples(15)
@given(seed=SEEDS)
def test_names_do_not_matter_and_plans_repeat(seed):
    problem = random_problem(seed, most=14, num_tasks=10)
    groups = {"copies": "z", "shard": "m", "tensor": "a"}  # in another order
    renamed = replace(
        problem,
        collectives=[
            replace(one, name=f"z{37 * index % 97}", queue=groups[one.queue])
            for index, one in enumerate(problem.collectives)
        ],
        position_names=[f"node {index}" for index in range(len(problem.tasks))],
    )
    assert plan(problem).steps == plan(renamed).steps == plan(problem).steps


@examples(25)
@given(seed=SEEDS, with_memory=st.booleans())
def test_condensing_changes_no_time(seed, with_memory):
    problem = random_problem(seed, most=8, num_tasks=30, with_memory=with_memory)
    small, gaps = condense(problem)
    steps = good_schedule(small, Beam())
    there, here = simulate(small, steps), simulate(problem, expand(steps, gaps))
    assert there.seconds == pytest.approx(here.seconds)
    assert here.peak_bytes <= there.peak_bytes


def transformer(num_layers, half, prices, task_seconds=8e-3):
    """Nine parameters a layer, of the sizes of an 8-billion-parameter model."""
    sizes = [8 << 10, 32 << 20, 8 << 20, 8 << 20, 32 << 20, 8 << 10, 112 << 20, 112 << 20, 112 << 20]
    tasks, found = [], []
    layers = range(num_layers) if half == "forward" else reversed(range(num_layers))
    for layer in layers:
        for size in sizes if half == "forward" else reversed(sizes):
            live = (layer + 1) << 27
            found.append(
                Collective(name="gather", kind="all_gather", queue="shard", in_bytes=size // 64, out_bytes=size,
                           earliest=0, deadline=len(tasks), merge_key=("gather",), kept_bytes=size, limit="gather")
            )  # fmt: skip
            seconds = task_seconds * size / (424 << 20)
            tasks += [Task(seconds=seconds, live_bytes=live, before_bytes=live >> 1)] * 2
            if half == "backward":
                found.append(
                    Collective(name="reduction", kind="reduce_scatter", queue="shard", in_bytes=size,
                               out_bytes=size // 64, earliest=len(tasks), deadline=18 * num_layers,
                               merge_key=("reduction",), ready_bytes=size, kept_bytes=size // 64,
                               limit="reduction", views_result=True)
                )  # fmt: skip
    return Problem(tasks=tasks, collectives=found, prices=prices)


FAST = LinePrices(latency=30e-6, bandwidth=100e9, copies=1.5e12)
SLOW = LinePrices(latency=250e-6, bandwidth=45e9, copies=1.5e12)


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize(("prices", "most"), [(FAST, 0.01), (SLOW, 0.12)])
def test_the_gap_of_a_transformer_is_small(half, prices, most):
    found = plan(transformer(12, half, prices))
    assert found.solver == "beam" and 0 <= found.gap < most


def test_merging_pays_where_latency_rules_and_not_where_copies_do():
    slow = plan(transformer(4, "backward", replace(SLOW, latency=5e-3)))
    assert len(slow.buckets) < 36
    dear = plan(transformer(4, "backward", replace(FAST, copies=1e9)))
    sizes = [len(bucket.names) for bucket in dear.buckets if bucket.num_bytes > 1 << 20]
    assert max(sizes) == 1


def test_more_memory_is_no_slower():
    problem = transformer(6, "backward", FAST, task_seconds=4e-3)
    smallest, is_exact = smallest_budget(problem)
    assert not is_exact
    seconds = []
    for extra in (0, 1 << 26, 1 << 28, 1 << 33):
        found = plan(replace(problem, budget_bytes=smallest + extra))
        assert found.peak_bytes <= smallest + extra
        assert found.bounds.seconds <= found.seconds
        seconds.append(found.seconds)
    assert seconds[-1] == min(seconds) < seconds[0]


@pytest.mark.parametrize("seed", [12, 29, 37])
def test_the_leanest_schedule_takes_less_than_in_place(seed):
    problem = random_problem(seed, most=18, num_tasks=12, with_memory=True)
    steps, is_leanest = leanest_schedule(problem)
    peak = simulate(problem, steps).peak_bytes
    assert (peak, is_leanest) == smallest_budget(problem) and not is_leanest
    assert peak < simulate(problem, in_place(problem)).peak_bytes
    assert plan(replace(problem, budget_bytes=peak)).peak_bytes <= peak


def test_no_memory_is_taken_for_time_that_no_model_can_tell_apart():
    """But within a budget the fastest is taken, and no plan is slower than the graph as it came."""
    problem = random_problem(377, most=16, num_tasks=12, is_long=True, with_memory=True)
    lean, fast = plan(problem), plan(replace(problem, budget_bytes=10**6))
    assert fast.seconds < lean.seconds <= fast.seconds * 1.001
    assert lean.peak_bytes < fast.peak_bytes
    assert plan(problem, unplanned=fast.steps).seconds == fast.seconds


def test_the_bound_knows_the_budget():
    """No room for a gather beside any task but the one that reads it: each is exposed."""
    tasks = [Task(seconds=4.0, live_bytes=100) for _ in range(4)]
    gathers = [
        Collective(name=f"g{i}", kind="all_gather", queue="q", in_bytes=2, out_bytes=8, earliest=0, deadline=i,
                   kept_bytes=8, limit="gather")
        for i in range(4)
    ]  # fmt: skip
    problem = Problem(tasks=tasks, collectives=gathers, prices=LinePrices(latency=2.0, bandwidth=4.0))
    assert lower_bounds(problem).seconds == plan(problem).seconds == 20.0
    tight = plan(replace(problem, budget_bytes=107))
    assert tight.seconds == 32.0 and tight.bounds.memory > tight.bounds.queue
    assert "the budget: 8 B more do not fit before task 0" in str(tight)


@pytest.mark.parametrize("merge_key", [("reduction",), None])
def test_the_bound_knows_what_a_bucket_frees(merge_key):
    """Two reductions of 8 bytes, each a piece of 200 bytes: a bucket frees both tensors, one alone keeps its own."""
    tasks = [Task(seconds=each, live_bytes=300) for each in (1.0, 1.0, 100.0)]
    ones = [
        Collective(name=f"r{i}", kind="reduce_scatter", queue="q", in_bytes=8, out_bytes=4, earliest=2, deadline=3,
                   ready_bytes=200, kept_bytes=4, merge_key=merge_key, limit="reduction", views_result=True)
        for i in range(2)
    ]  # fmt: skip
    prices = LinePrices(latency=1.0, bandwidth=8.0, copies=1e9)
    problem = Problem(tasks=tasks, collectives=ones, prices=prices, budget_bytes=480)
    found = plan(problem)
    assert found.seconds == pytest.approx(102.0 if merge_key else 106.0)
    assert 0 <= found.gap < 0.02


def test_empty_collectives_are_planned():
    prices = LinePrices(latency=2.0)
    ones = [_one(in_bytes=0, out_bytes=0, merge_key=("gather",)) for _ in range(2)]
    for some, seconds in ((ones[:1], 2.0), (ones, 2.0), ([*ones, _one(merge_key=("gather",))], 3.0)):
        found = plan(Problem(tasks=[Task(seconds=1.0)] * 2, collectives=some, prices=prices))
        assert found.bounds.queue <= found.seconds
        assert found.seconds == pytest.approx(1.0 + seconds, abs=0.1)


def test_delays_by_another_group_are_in_the_bound_of_a_queue():
    """Two reductions behind a sum that nothing hides, or two gathers in front of it: one group alone does not tell."""
    tasks = [Task(seconds=1.0) for _ in range(3)]
    whole = Collective(name="sum", kind="all_reduce", queue="tensor", in_bytes=32, out_bytes=32, earliest=1,
                       deadline=1)  # fmt: skip
    assert plan(Problem(tasks=tasks, collectives=[whole], prices=LinePrices())).seconds == 13.0
    reductions = [
        Collective(name=f"r{i}", kind="reduce_scatter", queue="q", in_bytes=8, out_bytes=2, earliest=2, deadline=3)
        for i in range(2)
    ]
    gathers = [
        Collective(name=f"g{i}", kind="all_gather", queue="q", in_bytes=2, out_bytes=8, earliest=0, deadline=0)
        for i in range(2)
    ]
    for some, seconds in ((reductions, 20.0), (gathers, 21.0)):
        problem = Problem(tasks=tasks, collectives=[*some, whole], prices=LinePrices())
        bounds = lower_bounds(problem)
        assert plan(problem).seconds == bounds.queue == seconds and bounds.windows == seconds - 4.0


class SteppedPrices(LinePrices):
    """A protocol switch: dearer above 16 bytes, by more than a line says."""

    def collective_seconds(self, kind, num_bytes, group):
        return super().collective_seconds(kind, num_bytes, group) + (50.0 if num_bytes > 16 else 0.0)


@pytest.mark.parametrize("seed", drawn(range(20)))
def test_the_bound_holds_where_prices_are_not_concave(seed):
    problem = random_problem(seed, most=5, num_tasks=4, prices=SteppedPrices())
    found = plan(problem)
    assert found.solver == "exact" and lower_bounds(problem).seconds <= found.seconds + 1e-9


def test_a_users_buckets_prefetches_and_limits_are_kept():
    problem = replace(transformer(2, "forward", FAST), fixed_buckets=[tuple(range(9)), tuple(range(9, 18))])
    found = plan(problem)
    assert [len(bucket.names) for bucket in found.buckets] == [9, 9]
    pairs = [(index, index + 1) for index in range(17)]
    problem = replace(transformer(2, "forward", FAST), prefetch=pairs)
    starts = {step.members: step.position for step in plan(problem).steps if step.is_start}
    waits = {step.members: step.position for step in plan(problem).steps if not step.is_start}
    assert all(starts[(after,)] == waits[(before,)] for before, after in pairs)
    limited = plan(replace(transformer(2, "forward", FAST), max_gathers=1))
    assert [step.is_start for step in limited.steps] == [True, False] * (len(limited.steps) // 2)


@pytest.mark.parametrize("states", [solve.MOST_EXACT_STATES, 1000])
def test_wishes_that_only_the_leanest_schedule_keeps_are_kept(states):
    """No search finds one that starts two gathers behind another, and what is left of the states is too little."""
    problem = random_problem(350, most=9, num_tasks=6, with_memory=True)
    problem = replace(problem, max_reductions=1, prefetch=[(2, 5), (2, 4)])
    assert not list(solve._searched(problem, limit=TimeLimit()))
    found = plan(problem, effort=Effort(exact_states=states))
    assert found.solver == ("exact" if states > 1000 else "beam")
    assert simulate(problem, found.steps).seconds == found.seconds
    assert plan(replace(problem, budget_bytes=found.peak_bytes)).peak_bytes <= found.peak_bytes


def test_a_plan_says_what_is_exposed_and_why():
    found = plan(transformer(1, "backward", SLOW))
    text = str(found)
    assert "gap" in text and "first in the graph" in text
    assert sum(bucket.exposed_seconds for bucket in found.buckets) == pytest.approx(found.exposed_seconds)
    assert found.compute_seconds + found.exposed_seconds == pytest.approx(found.seconds)
    assert found.to_dict()["buckets"][0]["kind"] == "all_gather"
    assert all(bool(bucket.reason) == bool(bucket.exposed_seconds) for bucket in found.buckets)
    assert not math.isnan(found.gap)


def _one(**changes):
    values = {"name": "a", "kind": "all_gather", "queue": "q", "in_bytes": 1, "out_bytes": 4, "earliest": 0}
    return Collective(**{**values, "deadline": 1, **changes})


@pytest.mark.parametrize(
    ("collectives", "changes", "message"),
    [
        ([_one(earliest=2)], {}, "a exists from gap 2 and is read in gap 1 of 2"),
        ([_one(after=(0,))], {}, r"a comes after \(0,\), which are not all earlier ones"),
        ([_one(), _one()], {"fixed_buckets": [(0, 1)]}, "a and a cannot be merged"),
        ([_one()], {"prefetch": [(0, 3)]}, "a prefetch names a collective that does not exist"),
        ([_one()], {"shared_links": [("q", "r"), ("r", "s")]}, "process groups on two shared links: r"),
        ([_one()], {"fixed_buckets": [(0,), (0,)]}, "a collective is in two fixed buckets"),
        ([_one()], {"fixed_buckets": [(3,)]}, "names a collective that does not exist"),
        (
            [_one(merge_key=("k",)), _one(merge_key=("k",), queue="r")],
            {},
            "a and a have one merge key, but are of other kinds or groups",
        ),
        (
            [_one(merge_key=("k",), deadline=0), _one(merge_key=("k",), earliest=1)],
            {"fixed_buckets": [(0, 1)]},
            "a is read before the rest of its bucket exists",
        ),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(collectives, changes, message):
    with pytest.raises(ProblemError, match=message):
        Problem(tasks=[Task(seconds=1.0)] * 2, collectives=collectives, prices=FAST, **changes)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "before task 1: a is read but not waited for .rule 8."),
        ([Step(0, False, (0,))], "a is waited for but not in flight .rule 2."),
        ([Step(0, True, (0,)), Step(0, True, (0,))], "a cannot start: it has started already .rule 2."),
        ([Step(1, True, (0,)), Step(0, False, (0,))], "a: its step comes after a later one .rule 1."),
        ([Step(0, True, (1,))], "b cannot start: its data is not ready .rule 3."),
        ([Step(0, True, (0,)), Step(1, False, (0,))], "b is never waited for .rule 2."),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(steps, message):
    collectives = [_one(), _one(name="b", earliest=1, deadline=2)]
    problem = Problem(tasks=[Task(seconds=1.0)] * 2, collectives=collectives, prices=FAST)
    with pytest.raises(PlanError, match=message):
        simulate(problem, steps)


@pytest.mark.parametrize(
    ("steps", "changes", "message"),
    [
        ([Step(0, True, (1,))], {}, "b cannot start: what it comes after is not waited for .rule 4."),
        ([Step(0, True, (0,))], {"fixed_buckets": [(0, 1)]}, "a cannot start: the user fixed another bucket .rule 5."),
        (
            [Step(0, True, (0,)), Step(0, True, (1,))],
            {"max_gathers": 1},
            "b cannot start: 1 are in flight, which is the limit .rule 6.",
        ),
        ([Step(0, True, (1,))], {"prefetch": [(0, 1)]}, "b cannot start: the user starts it after another .rule 7."),
        (
            [Step(0, True, (0,)), Step(0, False, (0,))],
            {"prefetch": [(0, 1)]},
            "before task 0: a prefetch that the user asked for has not started .rule 7.",
        ),
    ],
)
def test_the_error_names_the_rule_that_a_schedule_breaks(steps, changes, message):
    alike = {"merge_key": ("m",), "limit": "gather"}
    collectives = [_one(**alike), _one(name="b", after=() if changes else (0,), **alike)]
    problem = Problem(tasks=[Task(seconds=1.0)] * 2, collectives=collectives, prices=FAST, **changes)
    with pytest.raises(PlanError, match=message):
        simulate(problem, steps)


def test_the_length_of_a_block():
    assert block_length([1, 2, 3] * 4) == 3
    assert block_length([9, *([1, 2, 3] * 8), 7]) == 3
    assert block_length([1, 2, 4, 8, 16, 32]) == 0
    assert block_length([5] * 6) == 1


class CountedLimit(TimeLimit):
    """A limit that is over after some questions; it counts them."""

    def __init__(self, answers):
        super().__init__(seconds=1.0)
        self.answers, self.asked = answers, 0

    def left(self):
        self.asked += 1
        return 1.0 if self.asked <= self.answers else 0.0


def test_a_search_ends_at_its_limit_with_the_best_so_far():
    problem = transformer(1, "backward", SLOW)
    best = plan(problem)
    counts = []
    for answers in (0, 1, 3, 1000):
        limit = CountedLimit(answers)
        found = plan(problem, effort=Effort(limit=limit))
        assert simulate(problem, found.steps).seconds >= best.seconds * (1 - 1e-9)
        counts.append((limit.was_reached, limit.asked))
    assert [reached for reached, _ in counts][:3] == [True, True, True]
    assert counts[0][1] < counts[-1][1]


def test_a_plan_that_starts_from_another_searches_no_more(monkeypatch):
    problem = random_problem(3, most=16, num_tasks=30, is_long=True, with_memory=True)
    searched = plan(problem, effort=Effort(polishes=False, exact_states=0))
    monkeypatch.setattr(solve, "_searched", lambda *_, **__: pytest.fail("a search runs"))
    again = plan(problem, start=searched.steps, effort=Effort(polishes=False, exact_states=0))
    assert again.steps == searched.steps
    late = plan(problem, start=in_place(problem), effort=Effort(exact_states=0))
    assert late.seconds < simulate(problem, in_place(problem)).seconds, "it is improved"


def test_a_start_with_large_buckets_stays_as_it_is():
    problem = replace(transformer(6, "forward", FAST, task_seconds=4e-3), prefers_large=True)
    found = plan(problem)
    again = plan(problem, start=found.steps)
    assert (found.solver, again.solver) == ("large", "followed") and again.steps == found.steps


def test_a_start_must_have_buckets_that_may_be_merged_here():
    problem = transformer(2, "forward", FAST, task_seconds=4e-3)
    merged = plan(replace(problem, prefers_large=True)).steps
    assert solve.can_start(problem, merged) and any(len(step.members) > 1 for step in merged)
    kinds = ("one", "other")
    mixed = [replace(one, merge_key=(kinds[place % 2],)) for place, one in enumerate(problem.collectives)]
    assert not solve.can_start(replace(problem, collectives=tuple(mixed)), merged)


@briefly()
def test_a_start_over_the_budget_is_left():
    problem = random_problem(3, most=16, num_tasks=12, with_memory=True)
    free = plan(problem)
    tight = replace(problem, budget_bytes=free.peak_bytes - 1)
    found, alone = plan(tight, start=free.steps), plan(tight)
    assert found == alone and found.peak_bytes < free.peak_bytes
