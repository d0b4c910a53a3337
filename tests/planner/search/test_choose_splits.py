"""Splitting collectives (docs/reference/planning.md): where it cannot help, solved exactly, and where plans do it."""

import random
from dataclasses import replace

import pytest
import torch
from support.planner_graphs import MESH, PRICES, inputs_of, random_graph
from support.problems import LinePrices
from support.small_graphs import GROUP, GraphBuilder, aten, num_targets
from support.thorough import drawn
from torch import fx

from graphshard.errors import InfeasibleBudgetError, PlanError
from graphshard.ir.bucket_ops import JOIN, JOIN_PARTS, PACK
from graphshard.ir.collectives import ALL_REDUCE, WAIT, is_collective
from graphshard.ir.shard_rows import RowPlace
from graphshard.planner.plan_graph import measured_peak, plan_graph
from graphshard.planner.search import choose_splits as splits
from graphshard.planner.search.bound import lower_bounds
from graphshard.planner.search.choose_splits import seconds_in_a_row, splits_to_try
from graphshard.planner.search.exact import best_schedule
from graphshard.planner.search.machine import Step
from graphshard.planner.search.problem import Collective, Problem, Task
from graphshard.planner.search.simulate import simulate
from graphshard.planner.user_constraints import Wishes
from graphshard.testing import run_on_all_ranks

pytestmark = pytest.mark.usefixtures("brief_plans")


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


@pytest.mark.parametrize("seed", drawn(range(60)))
def test_without_a_budget_splitting_what_sharding_needs_is_never_faster(seed):
    problem = _sharded_step(seed)
    whole = _seconds(problem)
    for index in range(len(problem.collectives)):
        assert _seconds(_halved(problem, index)) >= whole - 1e-9


@pytest.mark.parametrize("seed", drawn(range(60)))
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


MIB = 2**20


class GraphPrices(LinePrices):
    """A product takes ten seconds, a copy what it takes, anything else nothing."""

    def compute_seconds(self, gm):
        seconds = {node: 10.0 for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default)}
        for target in (JOIN_PARTS, PACK):
            for node in gm.graph.find_nodes(op="call_function", target=target):
                seconds[node] = self.copy_seconds(4 * node.meta["val"].numel())
        return seconds


#: 16 MiB a second.
EVEN = GraphPrices(latency=0.01, bandwidth=16.0 * MIB, copies=1e4 * MIB)

#: Of each collective a part passes beside the one in front of it.
BESIDE = replace(EVEN, turns=0.4)


def _input(build, name, *shape):
    return build.input(name, *shape, dtype=torch.float32)


def _with_a_large_weight(num_rows=4096, urgent=False):
    """Two products, and one with a gathered weight of ``num_rows`` x 4 KiB; behind the first, if asked for, a sum."""
    build = GraphBuilder()
    x, shard = _input(build, "primals_0", 4096, 8), _input(build, "primals_1", num_rows // 2, 1024)
    wide, narrow = _input(build, "primals_2", 8, 8192), _input(build, "primals_3", 8192, num_rows)
    activation = build(aten.mm.default, x, wide)
    if urgent:
        activation = build(WAIT, build(ALL_REDUCE, activation, "sum", GROUP))
    value = build(aten.mm.default, build(aten.mm.default, activation, narrow), build.gather(shard, 2))
    return build.finish(value)


def _only_a_gather():
    """Nothing runs beside the gather of a weight of 32 MiB."""
    build = GraphBuilder()
    x, shard = _input(build, "primals_0", 16, 8192), _input(build, "primals_1", 4096, 1024)
    return build.finish(build(aten.mm.default, x, build.gather(shard, 2)))


def _only_a_reduction():
    build = GraphBuilder()
    x, y = _input(build, "primals_0", 8192, 16), _input(build, "primals_1", 16, 1024)
    return build.finish(build.reduction(build(aten.mm.default, x, y), 2))


@pytest.fixture(scope="module")
def split_gather():
    """The graph of nothing but a gather, and its plan, in which that is split; neither is changed."""
    gm = _only_a_gather()
    return gm, plan_graph(gm, BESIDE)


def _whole(monkeypatch, gm, prices, **options):
    """The plan without any trial of parts."""
    with monkeypatch.context() as patch:
        patch.setattr(splits, "OVER_LARGE", 2**60)
        return plan_graph(gm, prices, **options).plan


def test_a_part_of_a_gather_runs_where_the_whole_does_not_fit(monkeypatch):
    """Beside two activations half of the weight's 16 MiB has room; when the parts are joined one of these is gone."""
    gm = _with_a_large_weight()
    free = plan_graph(gm, EVEN, device_type="cuda").plan
    assert free.exposed_seconds == 0.0 and not free.splits
    budget = free.peak_bytes - 8 * MIB
    assert budget == measured_peak(gm, "cuda") + 8 * MIB
    whole = _whole(monkeypatch, gm, EVEN, memory_budget=budget, device_type="cuda")
    planned = plan_graph(gm, EVEN, memory_budget=budget, device_type="cuda")
    assert whole.exposed_seconds > 0.5
    assert planned.plan.splits == (("all_gather_into_tensor_default", 4),)
    assert planned.plan.seconds < 0.99 * whole.seconds
    assert planned.plan.unplanned_seconds == whole.unplanned_seconds
    assert planned.plan.peak_bytes == measured_peak(planned.gm, "cuda") <= budget
    assert "all_gather_into_tensor_default is split into 4 parts" in str(planned.plan)


@pytest.mark.parametrize("make", [pytest.param(_only_a_gather, marks=pytest.mark.slow), _only_a_reduction])
def test_parts_that_pass_beside_each_other_are_faster_than_the_whole(monkeypatch, make):
    gm = make()
    for prices, expected in ((EVEN, []), (BESIDE, [8])):
        plan = plan_graph(gm, prices).plan
        assert [number for _, number in plan.splits] == expected
        if expected:
            assert plan.seconds < 0.95 * _whole(monkeypatch, gm, prices).seconds


def test_what_is_urgent_does_not_wait_for_all_of_a_long_gather(monkeypatch):
    gm = _with_a_large_weight(urgent=True, num_rows=65536)
    slow = replace(EVEN, bandwidth=8.0 * MIB)
    whole, plan = _whole(monkeypatch, gm, slow), plan_graph(gm, slow).plan
    assert ("all_gather_into_tensor_default", 4) in plan.splits
    assert plan.seconds < 0.99 * whole.seconds


def test_small_ones_stay_whole(monkeypatch):
    """Unless they are called over-large."""
    gm = _only_a_gather()
    monkeypatch.setattr(splits, "OVER_LARGE", 32 * MIB + 1)
    assert not plan_graph(gm, BESIDE).plan.splits
    monkeypatch.setattr(splits, "OVER_LARGE", 32 * MIB)
    assert plan_graph(gm, BESIDE).plan.splits


def test_what_compute_waits_longest_for_is_tried_first(monkeypatch):
    """With all others for whose parts there is room, then alone; a large problem has one trial, far from its bound."""
    ones = [replace(_gather(f"g{size}", size * MIB, 1), merge_key=None) for size in (16, 64, 8, 32, 4)]
    problem = Problem(tasks=[Task(seconds=1.0)], collectives=ones, prices=BESIDE)
    steps = [Step(0, start, (index,)) for index in range(5) for start in (True, False)]

    def tried(least_seconds=1.0, most_parts=8):
        return splits_to_try(problem, steps, lambda index: most_parts, least_seconds=least_seconds)

    assert tried() == [[(1, 8), (3, 8), (0, 8), (2, 4)], [(1, 8)]]
    for many, expected in (
        (5 + 7 + 7 + 7 + 3, tried()),
        (5 + 7 + 7 + 7 + 2, [[(1, 8), (3, 8), (0, 8)], [(1, 8)]]),
        (5 + 7 + 3, [[(1, 8), (2, 4)], [(1, 8)]]),
        (5 + 7, [[(1, 8)]]),
        (4, [[(1, 8)]]),
    ):
        monkeypatch.setattr(splits, "MANY", many)
        assert tried() == expected
    assert tried(least_seconds=simulate(problem, steps).seconds / 1.04) == []
    assert tried(most_parts=1) == []


def test_what_keeps_the_queue_busy_is_tried():
    """Compute waits for the sum behind it alone; where the queue is free when the sum starts, all stays whole."""
    gather = replace(_gather("g", 736 * MIB, 2), merge_key=None)
    urgent = Collective(
        name="sum", kind="all_reduce", queue="shard", in_bytes=MIB, out_bytes=MIB, earliest=1, deadline=1
    )
    steps = [Step(0, True, (1,)), Step(1, True, (0,)), Step(1, False, (0,)), Step(2, False, (1,))]
    for seconds, expected in ((25.0, [[(1, 4)]]), (50.0, [])):
        tasks = [Task(seconds=seconds), Task(seconds=25.0), Task(seconds=1.0)]
        problem = Problem(tasks=tasks, collectives=[urgent, gather], prices=EVEN)
        waited = {run.members: run.exposed_seconds for run in simulate(problem, steps).runs}
        assert waited[1,] == 0.0 < waited[0,]
        assert splits_to_try(problem, steps, lambda index: 8, least_seconds=26.0) == expected


def test_plans_at_their_bound_are_not_tried():
    """Unless parts pass beside each other by more than the whole, which no bound knows."""
    one = replace(_gather("g", 32 * MIB, 1), merge_key=None)
    for prices, expected in ((EVEN, []), (BESIDE, [[(0, 8)]])):
        problem = Problem(tasks=[Task(seconds=1.0)], collectives=[one], prices=prices)
        steps = [Step(0, True, (0,)), Step(1, False, (0,))]
        seconds = simulate(problem, steps).seconds
        assert splits_to_try(problem, steps, lambda index: 8, least_seconds=0.995 * seconds) == expected
        assert splits_to_try(problem, steps, lambda index: 1, least_seconds=0.5 * seconds) == []
        assert splits_to_try(problem, steps, lambda index: 2, least_seconds=0.5 * seconds) == [[(0, 2)]]
        idle = replace(problem, tasks=[Task(seconds=500.0)])
        assert splits_to_try(idle, steps, lambda index: 8, least_seconds=1.0) == []


def test_what_the_user_names_stays_whole():
    gm = _only_a_gather()
    (gather,) = filter(is_collective, gm.graph.nodes)
    for wishes in (Wishes(fixed_buckets=[[gather]]), Wishes(merge=False)):
        assert not plan_graph(gm, BESIDE, wishes=wishes).plan.splits
    assert not plan_graph(_only_a_reduction(), BESIDE, wishes=Wishes(max_reductions=1)).plan.splits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "wishes"),
    [(_only_a_gather, Wishes(max_gathers=8, max_reductions=1)), (_only_a_reduction, Wishes(max_gathers=1))],
)
def test_limits_that_parts_keep_do_not_stop_them(make, wishes):
    assert plan_graph(make(), BESIDE, wishes=wishes).plan.splits


def test_wishes_are_said_of_a_copy_of_the_graph():
    nodes = [fx.Graph().placeholder(name) for name in "abcdef"]
    twin = {node: fx.Graph().placeholder(f"{node.name}_twin") for node in nodes}
    a, b, c, d, e, f = nodes
    wishes = Wishes(fixed_buckets=[[a, b]], prefetch=[(c, d)], behind=[(e, f)], max_gathers=3, merge=False)
    assert wishes.named() == set(nodes)
    assert wishes.on(twin) == Wishes(
        fixed_buckets=[(twin[a], twin[b])], prefetch=[(twin[c], twin[d])], behind=[(twin[e], twin[f])],
        max_gathers=3, merge=False,
    )  # fmt: skip


@pytest.mark.slow
def test_neighbours_stay_neighbours_beside_one_that_is_split():
    """Two shards that lie in a row are gathered without a copy in front, in the graph with parts too."""
    build = GraphBuilder()
    x, shard = _input(build, "primals_0", 16, 8192), _input(build, "primals_1", 4096, 1024)
    small = [_input(build, f"primals_{index}", 512, 1024) for index in (2, 3)]
    value = build(aten.mm.default, x, build.gather(shard, 2))
    for one in [build.gather(one, 2) for one in small]:
        value = build(aten.mm.default, value, one)
    gm = build.finish(value)
    _, *gathers = filter(is_collective, gm.graph.nodes)
    places = {gather: RowPlace("unit", 512 * 1024 * index, 512 * 1024) for index, gather in enumerate(gathers)}
    wishes = Wishes(fixed_buckets=[gathers])
    for lying, expected in ((places, JOIN), ({}, PACK)):
        planned = plan_graph(gm, BESIDE, places=lying, wishes=wishes)
        assert planned.plan.splits and num_targets(planned.gm, expected) == 1


def test_wishes_about_others_hold_in_the_graph_with_parts():
    """A gather that the user has start behind another's wait, beside one that is split."""
    build = GraphBuilder()
    x, shard = _input(build, "primals_0", 16, 8192), _input(build, "primals_1", 4096, 1024)
    small = [_input(build, f"primals_{index}", 512, 1024) for index in (2, 3)]
    value = build(aten.mm.default, x, build.gather(shard, 2))
    for one in small:
        value = build(aten.mm.default, value, build.gather(one, 2))
    gm = build.finish(value)
    _, first, second = filter(is_collective, gm.graph.nodes)
    planned = plan_graph(gm, BESIDE, wishes=Wishes(prefetch=[(first, second)]))
    assert [number for _, number in planned.plan.splits] == [8]
    buckets = {name: bucket for bucket in planned.plan.buckets for name in bucket.names}
    assert buckets[second.name].start == buckets[first.name].wait
    assert buckets[second.name].issued_at >= buckets[first.name].finished_at


@pytest.mark.slow
def test_a_budget_that_parts_do_not_keep_keeps_the_whole():
    """Joining takes room for the parts beside the whole."""
    gm = _only_a_gather()
    smallest = measured_peak(gm, "cuda")
    plan = plan_graph(gm, BESIDE, memory_budget=smallest, device_type="cuda").plan
    assert plan.peak_bytes <= smallest and not plan.splits
    assert plan_graph(gm, BESIDE, memory_budget=smallest + 33 * MIB, device_type="cuda").plan.splits
    with pytest.raises(InfeasibleBudgetError):
        plan_graph(gm, BESIDE, memory_budget=smallest - MIB, device_type="cuda")


def test_another_rank_follows_the_parts(split_gather):
    gm, planned = split_gather
    followed = plan_graph(gm, EVEN, known=planned.known)  # of itself it would not split
    assert planned.known.splits == ((0, 8),)
    assert [node.name for node in followed.gm.graph.nodes] == [node.name for node in planned.gm.graph.nodes]
    assert followed.plan.splits == planned.plan.splits and followed.known == planned.known
    for wrong in ((1, 2), (0, 8192)):
        with pytest.raises(PlanError, match=rf"has collective {wrong[0]} in {wrong[1]} parts, which it cannot"):
            plan_graph(gm, EVEN, known=replace(planned.known, splits=(wrong,)))


def test_the_graph_itself_stays_as_it_is(split_gather):
    gm, planned = split_gather
    assert [node.name for node in gm.graph.nodes] == [node.name for node in _only_a_gather().graph.nodes]
    assert num_targets(planned.gm, JOIN_PARTS) == 1


@pytest.mark.parametrize("seed", drawn([0, 1, 2, 3, 4, 6, 7]))
def test_random_graphs_with_parts_compute_the_same_and_are_no_slower(monkeypatch, seed):
    gm = random_graph(seed)
    prices = replace(PRICES, latency=0.01, bandwidth=200.0, turns=0.5)
    whole = _whole(monkeypatch, gm, prices)
    monkeypatch.setattr(splits, "OVER_LARGE", 1)
    free = plan_graph(gm, prices)
    tight = plan_graph(gm, prices, memory_budget=whole.peak_bytes)
    assert free.plan.splits or tight.plan.splits
    assert free.plan.seconds <= whole.seconds and tight.plan.peak_bytes <= whole.peak_bytes
    inputs = inputs_of(gm, seed)
    expected = run_on_all_ranks(gm, inputs, MESH)
    for planned in (free, tight):
        planned.gm.recompile()
        for mine, theirs in zip(run_on_all_ranks(planned.gm, inputs, MESH), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_planning_again_changes_nothing(split_gather):
    _, planned = split_gather
    again = plan_graph(planned.gm, BESIDE)
    assert [node.name for node in again.gm.graph.nodes] == [node.name for node in planned.gm.graph.nodes]
    assert not again.plan.splits and again.plan.seconds == planned.plan.seconds


def test_parts_in_a_row():
    one = _gather("g", 32 * MIB, 1)
    problem = Problem(tasks=[Task(seconds=1.0)], collectives=[one], prices=BESIDE)
    assert seconds_in_a_row(problem, one, 1) == pytest.approx(2.01)
    assert seconds_in_a_row(problem, one, 4) == pytest.approx(4 * 0.51 - 3 * 0.2)
