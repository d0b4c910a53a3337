"""schedule_collectives: gathers early, waits late, compute in its order."""

import itertools

import pytest
import torch
from all_ranks import assert_same, pieces, run_halves, run_values, step_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import (
    LOWERING,
    GraphBuilder,
    ParameterSpec,
    aten,
    reduce_grad,
    run_pass,
    run_twice,
    text_of,
    unshard,
)

from graphshard.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    is_collective,
    is_wait,
    short_name,
)
from graphshard.context import PassContext, context_from_shard_ops
from graphshard.errors import OptionError
from graphshard.facts import Fact
from graphshard.passes import BucketCollectives, ScheduleCollectives
from graphshard.provenance import is_layout
from graphshard.rewrite import copy_graph

HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)


def _bucketed_half(captured, name, num_ranks, half, **options):
    graphs = captured(name, num_ranks, **options)
    gm, ctx = getattr(graphs, half), getattr(graphs.context, f"for_{half}")()
    run_pass(BucketCollectives(), gm, ctx, *HELD)
    return gm, ctx


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_golden(captured, golden, half):
    gm, ctx = _bucketed_half(captured, "two_linears", 2, half)
    golden(text_of(gm, ctx), f"schedule_collectives.{half}.before")
    run_pass(ScheduleCollectives(), gm, ctx, *HELD)
    golden(text_of(gm, ctx), f"schedule_collectives.{half}.after")


def test_nothing_to_schedule():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2, 2)))
    record = run_pass(ScheduleCollectives(), gm, PassContext())
    assert not record.report.changed
    assert record.report.counts == {"gathers": 0, "reductions": 0}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_second_run_changes_nothing(captured, half, prefetch):
    gm, ctx = _bucketed_half(captured, "blocks_2", 2, half)
    first, second = run_twice(ScheduleCollectives(prefetch=prefetch), gm, ctx, *HELD)
    assert first.report.changed and not second.report.changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "prefetch=-1 must be at least 0"),
        ({"reductions_in_flight": 0}, "reductions_in_flight=0 must be at least 1"),
    ],
)
def test_refuses_options_that_cannot_be(options, message):
    with pytest.raises(OptionError, match=f"schedule_collectives: {message}"):
        ScheduleCollectives(**options)


def test_names_the_collectives_it_leaves_in_place():
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    total = build(WAIT, build(ALL_REDUCE, x, "sum", "foreign"))
    gathered = build.gather(total, 2, "foreign")
    gm = build.finish(gathered)
    record = run_pass(ScheduleCollectives(), gm, PassContext())
    assert not record.report.changed
    assert record.report.skipped == (
        "all_reduce_default (all_reduce) is not a gather of shards or a reduction",
        "all_gather_into_tensor_default (all_gather_into_tensor) is not a gather of shards or a reduction",
    )


@pytest.mark.parametrize(("prefetch", "in_flight"), [(0, 1), (1, 2), (4, 3)])
@pytest.mark.parametrize(("name", "num_ranks"), [("two_linears", 4), ("blocks_2", 2), ("tied_embedding", 2)])
def test_parity(captured, name, num_ranks, prefetch, in_flight):
    graphs = captured(name, num_ranks)
    forward, backward = copy_graph(graphs.forward), copy_graph(graphs.backward)
    step = ScheduleCollectives(prefetch=prefetch, reductions_in_flight=in_flight)
    run_pass(step, forward, graphs.context.for_forward(), *HELD)
    run_pass(step, backward, graphs.context.for_backward(), *HELD)
    inputs, expected = step_inputs(name, num_ranks)
    before = run_halves(graphs.forward, graphs.backward, graphs.context, inputs)
    after = run_halves(forward, backward, graphs.context, inputs)
    assert_same(after, before, bitwise=True)
    assert_same(after, expected)


def _compute(gm):
    return [
        node.name for node in gm.graph.nodes if not (is_layout(node) or is_collective(node) or is_wait(node))
    ]


def _open_reductions(gm):
    """The largest number of reductions started and not yet waited for."""
    is_open, most = set(), 0
    for node in gm.graph.nodes:
        if node.target is REDUCE_SCATTER:
            is_open.add(node)
            most = max(most, len(is_open))
        elif is_wait(node):
            is_open.discard(node.args[0])
    return most


def _gathers_ahead(gm):
    """For each waited gather, how many later gathers have started when the next compute runs."""
    started, waited, ahead = [], [], []
    for node in gm.graph.nodes:
        if node.target is ALL_GATHER:
            started.append(node)
        elif is_wait(node) and node.args[0] in started:
            waited.append(started.index(node.args[0]))
        elif node.op == "call_function" and not is_layout(node):
            ahead += [len(started) - index - 1 for index in waited]
            waited.clear()
    return ahead


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_prefetch_is_the_number_of_gathers_ahead(captured, prefetch):
    gm, ctx = _bucketed_half(captured, "blocks_2", 2, "forward", reshard=True)
    run_pass(ScheduleCollectives(prefetch=prefetch), gm, ctx, *HELD)
    # Three gathers: the root's and one per block.
    assert _gathers_ahead(gm) == [min(prefetch, remaining) for remaining in (2, 1, 0)]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_reductions_in_flight_are_bounded(captured, in_flight):
    gm, ctx = _bucketed_half(captured, "blocks_3", 2, "backward")
    run_pass(ScheduleCollectives(reductions_in_flight=in_flight), gm, ctx, *HELD)
    assert _open_reductions(gm) == in_flight


def test_gathers_follow_the_order_of_need():
    """The second parameter is gathered first in the graph, but read last."""
    build, spec = GraphBuilder(), ParameterSpec((4, 4))
    x = build.input("primals_0", 4, 4)
    shards = [build.input(f"primals_{i}", 2, 4) for i in (1, 2)]
    late, early = (unshard(build, shard, f"p{i}", spec, 2) for i, shard in enumerate(shards))
    gm = build.finish(build(aten.mm.default, build(aten.mm.default, x, early), late))
    ctx = context_from_shard_ops(gm)
    LOWERING.run(gm, ctx)
    run_pass(ScheduleCollectives(), gm, ctx, *HELD)
    gathers = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    assert [node.args[0].name for node in gathers] == ["primals_2", "primals_1"]


STEPS = st.lists(st.one_of(st.integers(0, 3), st.just("reduce")), min_size=1, max_size=8)


def _random_program(steps, gathers_first):
    """Matrix products with four parameters and reductions of what came out so far, on two ranks."""
    build, spec, used = GraphBuilder(), ParameterSpec((4, 4)), {}
    shards = [build.input(f"primals_{i}", 2, 4) for i in range(4)]
    value = build.input("primals_4", 4, 4)
    results = []
    for index in sorted({step for step in steps if step != "reduce"}) if gathers_first else ():
        used[index] = unshard(build, shards[index], f"p{index}", spec, 2)
    for step in steps:
        if step == "reduce":
            results.append(reduce_grad(build, value, "p0", spec, 2))
            continue
        if step not in used:
            used[step] = unshard(build, shards[step], f"p{step}", spec, 2)
        value = build(aten.mm.default, value, build(aten.t.default, used[step]))
    gm = build.finish(value, *results)
    ctx = context_from_shard_ops(gm, full_checks=True)
    LOWERING.run(gm, ctx)
    return gm, ctx


@settings(max_examples=20, deadline=None)
@given(
    steps=STEPS.filter(lambda steps: any(step != "reduce" for step in steps)),
    gathers_first=st.booleans(),
    prefetch=st.integers(0, 3),
    in_flight=st.integers(1, 3),
)
def test_any_program_keeps_its_compute_and_its_result(steps, gathers_first, prefetch, in_flight):
    gm, ctx = _random_program(steps, gathers_first)
    scheduled = copy_graph(gm)
    step = ScheduleCollectives(prefetch=prefetch, reductions_in_flight=in_flight)
    _, second = run_twice(step, scheduled, ctx, *HELD)
    assert not second.report.changed
    assert _compute(scheduled) == _compute(gm)
    assert _open_reductions(scheduled) <= in_flight
    assert max(_gathers_ahead(scheduled)) <= prefetch + 1
    full = [torch.randn(4, 4, dtype=torch.float64) for _ in range(5)]
    shards = [pieces(value, 0, 2) for value in full[:4]]
    inputs = [[*(shard[rank] for shard in shards), full[4]] for rank in range(2)]
    before, after = (run_values(graph, inputs, ctx.mesh) for graph in (gm, scheduled))
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


def test_a_dead_view_of_a_gathered_parameter_survives():
    """What nothing reads keeps existing, in front of the output."""
    gm, ctx = _random_program([0, 1], gathers_first=False)
    wait = next(node for node in gm.graph.nodes if is_wait(node))
    with gm.graph.inserting_after(wait):
        dead = gm.graph.call_function(aten.t.default, (wait,))
    dead.meta["val"] = wait.meta["val"].t()
    run_pass(ScheduleCollectives(), gm, ctx, *HELD)
    nodes = list(gm.graph.nodes)
    assert nodes[-2] is dead and nodes[-1].op == "output"


def test_only_collectives_and_their_layout_move(captured):
    gm, ctx = _bucketed_half(captured, "blocks_3", 2, "backward")
    before = copy_graph(gm)
    run_pass(ScheduleCollectives(prefetch=2), gm, ctx, *HELD)
    assert _compute(gm) == _compute(before)
    kinds = [
        [short_name(node) for node in graph.graph.nodes if is_collective(node)] for graph in (before, gm)
    ]
    assert sorted(kinds[0]) == sorted(kinds[1])
    assert [key for key, _ in itertools.groupby(kinds[1])] != [key for key, _ in itertools.groupby(kinds[0])]
