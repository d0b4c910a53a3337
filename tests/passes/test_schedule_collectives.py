"""schedule_collectives: gathers early, waits late, compute in its order."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.all_ranks import assert_same, pieces, run_halves, run_values, step_inputs
from support.small_graphs import (
    LOWERING,
    GraphBuilder,
    ParameterSpec,
    aten,
    open_reductions,
    reduce_grad,
    run_pass,
    run_twice,
    text_of,
    unshard,
)
from support.thorough import examples

from graphshard.errors import OptionError
from graphshard.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    is_collective,
    is_wait,
    short_name,
)
from graphshard.ir.op_traits import is_view
from graphshard.ir.rewrite import copy_graph
from graphshard.memory.kept_inputs import kept_inputs
from graphshard.memory.model import memory_timeline
from graphshard.passes import BucketCollectives, ScheduleCollectives
from graphshard.pipeline.context import PassContext, context_from_shard_ops
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.provenance import is_layout
from graphshard.planner.overlap_fit import fit
from graphshard.planner.rule_order import Decisions, Movable, Placement

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
    run_pass(ScheduleCollectives(memory="any"), gm, ctx, *HELD)
    golden(text_of(gm, ctx), f"schedule_collectives.{half}.after")


def _three_layers(half, batch, num_replicas=1, num_layers=3, with_partial=False):
    """A half of products in units of their own, whose activations have ``batch`` rows of four."""
    build = GraphBuilder()
    layers = range(num_layers)
    specs = [ParameterSpec((4, 4), unit=str(index), num_replicas=num_replicas) for index in layers]
    shards = [build.input(f"primals_{i}", 2, 4) for i in layers]
    if half == "forward":
        value, saved = build.input(f"primals_{num_layers}", batch, 4), []
        for index, spec in enumerate(specs):
            value = build(aten.mm.default, value, unshard(build, shards[index], f"p{index}", spec, 2))
            saved.append(value)
        gm = build.finish(*saved)
        ctx = context_from_shard_ops(gm, full_checks=True)
    else:
        saved = [build.input(f"mm_{i}", batch, 4) for i in layers]
        partial = [build.input(f"partial_{i}", 2, 4) for i in layers] if with_partial else [None] * num_layers
        of_sum, results = build.input("tangents_1", 1), [None] * num_layers
        value = build(aten.clone.default, build(aten.expand.default, of_sum, [batch, 4]))
        for index in reversed(layers):
            full = unshard(build, shards[index], f"p{index}", specs[index], 2)
            grad = build(aten.mm.default, build(aten.t.default, saved[index]), value)
            value = build(aten.mm.default, value, build(aten.t.default, full))
            results[index] = reduce_grad(build, grad, f"p{index}", specs[index], 2, partial=partial[index])
        gm = build.finish(*results, value)
        # The context of a joint graph takes every input that is no tangent for one of the forward.
        ctx = replace(context_from_shard_ops(gm, full_checks=True), first_gradient=0)
    LOWERING.run(gm, ctx)
    return gm, ctx


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_golden_where_memory_is_free(golden, half):
    gm, ctx = _three_layers(half, batch=64)
    golden(text_of(gm, ctx), f"schedule_collectives.free.{half}.before")
    run_pass(ScheduleCollectives(), gm, ctx, *HELD)
    golden(text_of(gm, ctx), f"schedule_collectives.free.{half}.after")


def test_golden_with_copies_of_shards(golden):
    gm, ctx = _three_layers("backward", batch=64, num_replicas=2)
    golden(text_of(gm, ctx), "schedule_collectives.hybrid.before")
    run_pass(ScheduleCollectives(memory="any"), gm, ctx, *HELD)
    golden(text_of(gm, ctx), "schedule_collectives.hybrid.after")


def _compute_while_open(gm, target):
    """For each collective of a kind, the products between its start and its wait."""
    nodes = list(gm.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    found = []
    for start in gm.graph.find_nodes(op="call_function", target=target):
        (wait,) = start.users
        between = nodes[position[start] : position[wait]]
        found.append(sum(node.target is aten.mm.default for node in between))
    return found


@pytest.mark.parametrize("with_partial", [False, True])
@pytest.mark.parametrize("memory", ["free", "any"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_compute_overlaps_with_both_reductions_of_a_hybrid_model(in_flight, memory, with_partial):
    """The last units' collectives are waited for at the end: no compute is left."""
    gm, ctx = _three_layers("backward", 256, num_replicas=2, num_layers=6, with_partial=with_partial)
    in_place = _compute_while_open(gm, REDUCE_SCATTER), _compute_while_open(gm, ALL_REDUCE)
    assert in_place == ([0] * 6, [0] * 6)
    record = run_pass(ScheduleCollectives(memory=memory, reductions_in_flight=in_flight), gm, ctx, *HELD)
    assert record.report.counts == {"gathers": 6, "reductions": 6, "all-reduces": 6}
    # The gradient of each layer's weight and of its input are two products.
    scattered, summed = _compute_while_open(gm, REDUCE_SCATTER), _compute_while_open(gm, ALL_REDUCE)
    assert all(scattered[:-1]) and all(summed[: 6 - in_flight - 1])
    assert open_reductions(gm) == in_flight


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_the_sequence_of_a_hybrid_model_does_not_depend_on_activations(batch):
    wanted = _starts(_scheduled(*_three_layers("backward", 64, num_replicas=2, num_layers=5), memory="any"))
    gm, ctx = _three_layers("backward", batch, num_replicas=2, num_layers=5)
    assert _starts(_scheduled(gm, ctx)) == _starts(_scheduled(gm, ctx, memory="any")) == wanted


@pytest.mark.parametrize("with_partial", [False, True])
@pytest.mark.parametrize("memory", ["free", "any"])
def test_second_run_on_a_hybrid_model_changes_nothing(memory, with_partial):
    gm, ctx = _three_layers("backward", 64, num_replicas=2, with_partial=with_partial)
    first, second = run_twice(ScheduleCollectives(memory=memory), gm, ctx, *HELD)
    assert first.report.changed and not second.report.changed


@pytest.mark.parametrize("with_partial", [False, True])
@pytest.mark.parametrize("memory", ["free", "any"])
def test_a_hybrid_model_keeps_its_results(memory, with_partial):
    gm, ctx = _three_layers("backward", 4, num_replicas=2, with_partial=with_partial)
    scheduled = _scheduled(gm, ctx, memory=memory)
    shapes = [node.meta["val"].shape for node in gm.graph.find_nodes(op="placeholder")]
    inputs = [
        [torch.randn(shape, dtype=torch.float64) for shape in shapes if tuple(shape) != (0,)]
        for _ in range(4)
    ]
    before, after = (run_values(graph, inputs, ctx.mesh) for graph in (gm, scheduled))
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_overlap_that_is_not_free_is_declined_by_name(half):
    gm, ctx = _three_layers(half, batch=1)
    record = run_pass(ScheduleCollectives(), gm, ctx, *HELD)
    assert any("is not started before" in reason for reason in record.report.skipped)
    why = re.compile(r"would raise the peak above [\d.]+ \w+$|starts that overlaps exceeds .+ by [\d.]+ \w+ at least$")
    assert all(map(why.search, record.report.skipped))


def _peak(gm):
    return memory_timeline(gm, kept=kept_inputs(gm)).peak_bytes


def _starts(gm):
    """Collectives in the order in which they start."""
    return [node.name for node in gm.graph.nodes if is_collective(node)]


def _scheduled(gm, ctx, **options):
    copied = copy_graph(gm)
    run_pass(ScheduleCollectives(**options), copied, ctx, *HELD)
    return copied


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_the_sequence_of_starts_does_not_depend_on_activations(half, batch):
    """Ranks with batches of different sizes must issue the same collectives."""
    gm, ctx = _three_layers(half, batch)
    wanted = _starts(_scheduled(*_three_layers(half, 64), memory="any"))
    assert _starts(_scheduled(gm, ctx)) == _starts(_scheduled(gm, ctx, memory="any")) == wanted


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_free_overlap_does_not_raise_the_peak(captured, half):
    for gm, ctx in (
        _three_layers(half, 64),
        _three_layers(half, 64, num_replicas=2),
        _bucketed_half(captured, "blocks_3", 2, half),
    ):
        in_place = _peak(_scheduled(gm, ctx, prefetch=0, reductions_in_flight=1))
        assert _peak(_scheduled(gm, ctx)) <= in_place
        if half == "backward":
            assert _peak(_scheduled(gm, ctx, memory="any")) > in_place


def test_free_overlap_takes_what_there_is():
    """In a forward all memory is there until the last layer; in a backward the other way round."""
    gm, ctx = _three_layers("forward", 64)
    assert _gathers_ahead(_scheduled(gm, ctx)) == [1, 1, 0]
    gm, ctx = _three_layers("backward", 64)
    assert _gathers_ahead(_scheduled(gm, ctx, memory="any"))[0] == 1
    assert _gathers_ahead(_scheduled(gm, ctx))[0] == 0


def _without_views(order):
    return [node.name for node in order if not is_view(node)]


@pytest.mark.parametrize("slack", [0, 64, 128, 10**6])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_budget_is_kept(captured, half, slack):
    """More budget, more overlap, never above the budget."""
    gm, ctx = _bucketed_half(captured, "blocks_3", 2, half)
    movable = Movable(gm, ctx)
    budget = _peak(_scheduled(gm, ctx, prefetch=0, reductions_in_flight=1)) + slack
    wanted = Decisions(prefetch=1, in_flight=2)
    decisions, declined = fit(gm, movable, wanted, budget_bytes=budget)
    order = Placement(movable, decisions).order()
    assert memory_timeline(gm, kept=kept_inputs(gm), order=order).peak_bytes <= budget
    assert bool(declined) == (slack < 10**6)
    if slack == 10**6:
        assert _without_views(order) == _without_views(Placement(movable, wanted).order())


def test_a_budget_that_no_order_meets_is_said():
    gm, ctx = _three_layers("backward", 64)
    _, declined = fit(gm, Movable(gm, ctx), Decisions(prefetch=1, in_flight=2), budget_bytes=1000)
    assert declined[0].startswith("the sequence of starts that overlaps exceeds 1000 B by ")


def test_nothing_to_schedule():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2, 2)))
    record = run_pass(ScheduleCollectives(), gm, PassContext())
    assert not record.report.changed
    assert record.report.counts == {"gathers": 0, "reductions": 0, "all-reduces": 0}


@pytest.mark.parametrize("memory", ["free", "any"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_second_run_changes_nothing(captured, half, prefetch, memory):
    gm, ctx = _bucketed_half(captured, "blocks_2", 2, half)
    first, second = run_twice(ScheduleCollectives(prefetch=prefetch, memory=memory), gm, ctx, *HELD)
    assert first.report.changed and not second.report.changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "prefetch=-1 must be at least 0"),
        ({"reductions_in_flight": 0}, "reductions_in_flight=0 must be at least 1"),
        ({"memory": "cheap"}, "memory='cheap' is unknown; known: 'free', 'any'"),
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


@pytest.mark.parametrize("memory", ["free", "any"])
@pytest.mark.parametrize(("prefetch", "in_flight"), [(0, 1), (1, 2), (4, 3)])
@pytest.mark.parametrize(("name", "num_ranks"), [("two_linears", 4), ("blocks_2", 2), ("tied_embedding", 2)])
def test_parity(captured, name, num_ranks, prefetch, in_flight, memory):
    graphs = captured(name, num_ranks)
    forward, backward = copy_graph(graphs.forward), copy_graph(graphs.backward)
    step = ScheduleCollectives(prefetch=prefetch, reductions_in_flight=in_flight, memory=memory)
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
    run_pass(ScheduleCollectives(prefetch=prefetch, memory="any"), gm, ctx, *HELD)
    # Three gathers: the root's and one per block.
    assert _gathers_ahead(gm) == [min(prefetch, remaining) for remaining in (2, 1, 0)]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_reductions_in_flight_are_bounded(captured, in_flight):
    gm, ctx = _bucketed_half(captured, "blocks_3", 2, "backward")
    run_pass(ScheduleCollectives(reductions_in_flight=in_flight, memory="any"), gm, ctx, *HELD)
    assert open_reductions(gm) == in_flight


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


def _random_program(steps, gathers_first, rows=4, num_replicas=1):
    """Matrix products with four parameters and reductions of what came out so far, on two shards."""
    build, spec, used = GraphBuilder(), ParameterSpec((4, 4), num_replicas=num_replicas), {}
    shards = [build.input(f"primals_{i}", 2, 4) for i in range(4)]
    value = build.input("primals_4", rows, 4)
    results = []
    for index in sorted({step for step in steps if step != "reduce"}) if gathers_first else ():
        used[index] = unshard(build, shards[index], f"p{index}", spec, 2)
    for step in steps:
        if step == "reduce":
            results.append(reduce_grad(build, build(aten.slice.Tensor, value, 0, 0, 4), "p0", spec, 2))
            continue
        if step not in used:
            used[step] = unshard(build, shards[step], f"p{step}", spec, 2)
        value = build(aten.mm.default, value, build(aten.t.default, used[step]))
    gm = build.finish(value, *results)
    ctx = context_from_shard_ops(gm, full_checks=True)
    LOWERING.run(gm, ctx)
    return gm, ctx


@examples(20)
@given(
    steps=STEPS.filter(lambda steps: any(step != "reduce" for step in steps)),
    gathers_first=st.booleans(),
    prefetch=st.integers(0, 3),
    in_flight=st.integers(1, 3),
    memory=st.sampled_from(["free", "any"]),
    rows=st.sampled_from([4, 32]),
    num_replicas=st.sampled_from([1, 2]),
)
def test_any_program_keeps_its_compute_and_its_result(
    steps, gathers_first, prefetch, in_flight, memory, rows, num_replicas
):
    gm, ctx = _random_program(steps, gathers_first, rows, num_replicas)
    scheduled = copy_graph(gm)
    options = {"prefetch": prefetch, "reductions_in_flight": in_flight}
    step = ScheduleCollectives(**options, memory=memory)
    _, second = run_twice(step, scheduled, ctx, *HELD)
    assert not second.report.changed
    assert _compute(scheduled) == _compute(gm)
    assert open_reductions(scheduled) <= in_flight
    assert max(_gathers_ahead(scheduled)) <= prefetch + 1
    if memory == "free":
        assert _starts(scheduled) == _starts(_scheduled(gm, ctx, **options, memory="any"))
        movable = Movable(gm, ctx)
        sequence = [node for node in scheduled.graph.nodes if is_collective(node)]
        names = {node.name: node for node in gm.graph.nodes}
        kept_sequence = Decisions(sequence=[names[node.name] for node in sequence])
        at_best = memory_timeline(gm, kept=kept_inputs(gm), order=Placement(movable, kept_sequence).order())
        in_place = _peak(_scheduled(gm, ctx, prefetch=0, reductions_in_flight=1))
        assert _peak(scheduled) <= max(at_best.peak_bytes, in_place)
    full = [torch.randn(4, 4, dtype=torch.float64) for _ in range(4)]
    shards = [pieces(value, 0, 2) for value in full]
    batch = torch.randn(rows, 4, dtype=torch.float64)
    inputs = [[*(shard[rank % 2] for shard in shards), batch] for rank in range(2 * num_replicas)]
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
    run_pass(ScheduleCollectives(prefetch=2, memory="any"), gm, ctx, *HELD)
    assert _compute(gm) == _compute(before)
    kinds = [
        [short_name(node) for node in graph.graph.nodes if is_collective(node)] for graph in (before, gm)
    ]
    assert sorted(kinds[0]) == sorted(kinds[1])
    assert [key for key, _ in itertools.groupby(kinds[1])] != [key for key, _ in itertools.groupby(kinds[0])]
