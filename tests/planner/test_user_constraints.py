"""What a user insists on, in terms of a graph's nodes: buckets, prefetches, limits."""

import pytest
from support.planner_graphs import MESH, PRICES, NodePrices
from support.small_graphs import GraphBuilder, aten, text_of

from graphshard.errors import InfeasibleBudgetError, ProblemError
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER, is_collective
from graphshard.ir.rewrite import copy_graph
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import check_waited
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.schedule_graph import schedule_with_prices
from graphshard.planner.search.simulate import simulate
from graphshard.planner.user_constraints import Wishes

CONTEXT = PassContext(mesh=MESH, full_checks=True)


def _chain(num_gathers=6, num_reductions=0):
    """Products with gathered factors, and reduced products; the collectives, in order."""
    build = GraphBuilder()
    value = build.input("primals_0", 8, 8)
    shards = [build.input(f"primals_{i + 1}", 4, 8) for i in range(num_gathers)]
    results = []
    for shard in shards:
        value = build(aten.mm.default, value, build.gather(shard, 2))
    for _ in range(num_reductions):
        value = build(aten.relu.default, value)
        results.append(build.reduction(build(aten.mm.default, value, value), 2))
    gm = build.finish(*results, value)
    return gm, list(filter(is_collective, gm.graph.nodes))


def _positions(plan):
    starts = {step.members: (step.position, at) for at, step in enumerate(plan.steps) if step.is_start}
    waits = {step.members: (step.position, at) for at, step in enumerate(plan.steps) if not step.is_start}
    return starts, waits


def test_buckets_of_nodes_are_kept():
    gm, gathers = _chain()
    plan = schedule_with_prices(gm, PRICES, wishes=Wishes(fixed_buckets=[gathers[:2], gathers[2:5]]))
    assert sorted(len(bucket.names) for bucket in plan.buckets) == [1, 2, 3]
    assert len(list(filter(is_collective, gm.graph.nodes))) == 3
    assert not check_waited(gm, CONTEXT)


def test_a_prefetch_starts_right_after_the_wait_it_names():
    gm, gathers = _chain()
    pairs = [(gathers[0], gathers[2]), (gathers[1], gathers[3]), (gathers[3], gathers[4])]
    plan = schedule_with_prices(gm, PRICES, wishes=Wishes(prefetch=pairs, fixed_buckets=[[node] for node in gathers]))
    starts, waits = _positions(plan)
    for before, after in ((0, 2), (1, 3), (3, 4)):
        assert starts[(after,)][0] == waits[(before,)][0] and starts[(after,)] > waits[(before,)]
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    gathers = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    assert [len(plan.buckets), len(gathers)] == [6, 6]
    assert all(order[next(iter(node.users))] > order[node] for node in gathers)


def test_prefetches_of_buckets():
    """Each of the second bucket may be named: the bucket starts after the first is copied out."""
    gm, gathers = _chain()
    buckets = [gathers[:3], gathers[3:]]
    pairs = [(first, then) for first in buckets[0] for then in buckets[1]]
    plan = schedule_with_prices(gm, PRICES, wishes=Wishes(prefetch=pairs, fixed_buckets=buckets))
    starts, waits = _positions(plan)
    assert starts[(3, 4, 5)][0] == waits[(0, 1, 2)][0]


def test_limits_of_gathers_and_reductions_in_flight():
    gm, _ = _chain(num_gathers=4, num_reductions=4)
    plan = schedule_with_prices(gm, PRICES, wishes=Wishes(max_gathers=1, max_reductions=2))
    most = {"all_gather": 1, "reduce_scatter": 2}
    kinds = ["all_gather"] * 4 + ["reduce_scatter"] * 4
    in_flight = dict.fromkeys(most, 0)
    for step in plan.steps:
        kind = kinds[step.members[0]]
        in_flight[kind] += 1 if step.is_start else -1
        assert in_flight[kind] <= most[kind]
    assert len(gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)) >= 2


def test_a_gather_behind_a_reduction_starts_no_sooner_than_its_input_exists():
    """One that starts first of all, in the graph too, and one that is read sooner, which is not held back."""
    build = GraphBuilder()
    value = build.input("primals_0", 8, 8)
    first, second = (build.input(f"primals_{index}", 4, 8) for index in (1, 2))
    first, second = build.gather(first, 2), build.gather(second, 2)
    grad = build(aten.mm.default, value, first)
    reduced = build.reduction(grad, 2)
    gm = build.finish(reduced, build(aten.mm.default, grad, second))
    one, other, reduction = filter(is_collective, gm.graph.nodes)
    assert _positions(schedule_with_prices(copy_graph(gm), PRICES))[0][(1,)][0] == 0
    wishes = Wishes(behind=[(reduction, other), (reduction, one)])
    found = problem_of_graph(gm, PRICES, wishes=wishes)
    as_it_came = simulate(found.problem.without_wishes(), found.unplanned).seconds
    plan = schedule_with_prices(gm, PRICES, wishes=wishes)
    starts, _ = _positions(plan)
    assert (starts[(0,)][0], starts[(1,)][0]) == (0, 1)
    assert plan.unplanned_seconds == as_it_came
    reasons = {bucket.names: bucket.reason for bucket in plan.buckets}
    assert reasons[(other.name,)] == "the user has it start no sooner"
    assert not check_waited(gm, CONTEXT)


def test_members_of_a_bucket_are_held_back_no_further_than_it_is_read():
    gm, gathers = _chain(num_gathers=2, num_reductions=1)
    *gathers, reduction = gathers
    wishes = Wishes(fixed_buckets=[gathers], behind=[(reduction, gather) for gather in gathers])
    plan = schedule_with_prices(gm, PRICES, wishes=wishes)
    assert plan.buckets[0].names == tuple(gather.name for gather in gathers)


def test_a_graph_that_breaks_the_wishes_is_timed_but_not_kept():
    """Merging these costs far more than it saves: the graph as it came is faster, and not allowed."""
    gm, gathers = _chain(num_gathers=3)
    prices = NodePrices(latency=1e-3, bandwidth=1e6, copies=100.0)
    found = problem_of_graph(gm, prices, wishes=Wishes(fixed_buckets=[gathers]))
    as_it_came = simulate(found.problem.without_wishes(), found.unplanned).seconds
    plan = schedule_with_prices(gm, prices, wishes=Wishes(fixed_buckets=[gathers]))
    assert plan.unplanned_seconds == as_it_came < plan.seconds
    assert [bucket.names for bucket in plan.buckets] == [tuple(node.name for node in gathers)]


def test_the_budget_error_respects_the_wishes():
    gm, gathers = _chain()
    with pytest.raises(InfeasibleBudgetError) as caught:
        schedule_with_prices(gm, PRICES, wishes=Wishes(fixed_buckets=[gathers]), memory_budget=3000)
    plan = schedule_with_prices(
        gm, PRICES, wishes=Wishes(fixed_buckets=[gathers]), memory_budget=caught.value.smallest_bytes
    )
    assert plan.peak_bytes <= caught.value.smallest_bytes and len(plan.buckets) == 1


def test_wishes_about_what_cannot_move_are_noted():
    build = GraphBuilder()
    x = build.input("primals_0", 4, 4)
    state, other = build.input("primals_1", 2, 4), build.input("primals_2", 2, 4)
    value = build(aten.mm.default, x, build.gather(state, 2, "shard_group"))
    value = build(aten.mm.default, value, build.gather(other, 2, "shard_group"))
    gm = build.finish(value, build(aten.copy_.default, state, build(aten.relu.default, state)))
    written, free = filter(is_collective, gm.graph.nodes)
    wishes = Wishes(fixed_buckets=[[written, free]], prefetch=[(written, free)], behind=[(written, free)])
    plan = schedule_with_prices(gm, PRICES, wishes=wishes)
    assert plan.notes[1:] == (
        "all_gather_into_tensor_default_1 is not held back behind all_gather_into_tensor_default: "
        "one of them stays in its place",
        "all_gather_into_tensor_default is not in the bucket asked for: it stays in its place",
        "all_gather_into_tensor_default_1 is not prefetched after all_gather_into_tensor_default: "
        "one of them stays in its place",
    )


@pytest.mark.parametrize(
    "wishes",
    [
        lambda gathers: {"fixed_buckets": [gathers[:2]]},
        lambda gathers: {"prefetch": [gathers[:2]]},
        lambda gathers: {"behind": [gathers[:2]]},
    ],
)
def test_nodes_of_another_graph_are_refused(wishes):
    (gm, _), (_, gathers) = _chain(), _chain()
    before = text_of(gm, CONTEXT)
    message = f"are of another one, or were erased: {gathers[0].name}, {gathers[1].name}; look them up in gm.graph"
    with pytest.raises(ProblemError, match=message):
        schedule_with_prices(gm, PRICES, wishes=Wishes(**wishes(gathers)))
    assert text_of(gm, CONTEXT) == before


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (lambda gathers: {"prefetch": [(gathers[0], gathers[1]), (gathers[1], gathers[0])]}, "ask for fewer"),
        (lambda gathers: {"fixed_buckets": [gathers[:2], gathers[1:3]]}, "is in two fixed buckets"),
        (lambda gathers: {"fixed_buckets": [[gathers[0].args[0]]]}, "these do not: primals_1"),
        (lambda gathers: {"behind": [(gathers[0], gathers[0].args[0])]}, "these do not: primals_1"),
        (lambda gathers: {"max_gathers": -1}, "max_gathers=-1 must be 0, for any number, or more"),
        (lambda gathers: {"max_reductions": -2}, "max_reductions=-2 must be 0, for any number, or more"),
        (
            lambda gathers: {"prefetch": [(gathers[0], next(iter(gathers[1].users)))]},
            "these do not: wait_tensor",
        ),
    ],
)
@pytest.mark.parametrize("num_gathers", [3, 12])
def test_wishes_that_cannot_be_kept_change_nothing(wishes, message, num_gathers):
    gm, gathers = _chain(num_gathers)
    before = text_of(gm, CONTEXT)
    with pytest.raises(ProblemError, match=message):
        schedule_with_prices(gm, PRICES, wishes=Wishes(**wishes(gathers)))
    assert text_of(gm, CONTEXT) == before
