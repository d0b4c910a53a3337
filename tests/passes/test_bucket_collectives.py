"""bucket_collectives: one gather and one reduction per unit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.all_ranks import assert_same, pieces, run_halves, run_values, step_inputs
from support.small_graphs import (
    GROUP,
    LOWERING,
    GraphBuilder,
    ParameterSpec,
    aten,
    num_targets,
    parameter_graph,
    reduce_grad,
    run_pass,
    run_twice,
    text_of,
)
from support.thorough import examples

from graphshard.errors import OptionError
from graphshard.ir.bucket_ops import JOIN, PACK
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from graphshard.ir.params import padded_shape
from graphshard.ir.rewrite import GraphEmitter, copy_graph
from graphshard.ir.shard_rows import moved_to_row
from graphshard.passes import BucketCollectives
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import Fact, check_bucketed

CONVERT = torch.ops.prims.convert_element_type.default
HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_golden(captured, golden, half):
    graphs = captured("two_linears", 2)
    gm, ctx = getattr(graphs, half), getattr(graphs.context, f"for_{half}")()
    golden(text_of(gm, ctx), f"bucket_collectives.{half}.before")
    run_pass(BucketCollectives(), gm, ctx, *HELD)
    golden(text_of(gm, ctx), f"bucket_collectives.{half}.after")


def test_a_bucket_of_one_is_left_alone(captured):
    graphs = captured("tied_embedding", 2)
    record = run_pass(BucketCollectives(), graphs.forward, graphs.context.for_forward(), *HELD)
    assert not record.report.changed
    assert record.report.counts == {"gather buckets": 0, "reduction buckets": 0, "all-reduce buckets": 0}


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_second_run_changes_nothing(captured, half):
    graphs = captured("blocks_2", 2)
    gm, ctx = getattr(graphs, half), getattr(graphs.context, f"for_{half}")()
    first, second = run_twice(BucketCollectives(), gm, ctx, *HELD)
    assert first.report.changed and not second.report.changed


def test_refuses_an_unknown_rule():
    with pytest.raises(OptionError, match="bucket_collectives: by='size' is unknown; known: 'unit'"):
        BucketCollectives(by="size")


def _with_foreign_all_reduce(specs):
    """A lowered parameter graph whose last output is all-reduced on another group first."""
    gm, ctx = parameter_graph(specs, 2)
    LOWERING.run(gm, ctx)
    full = gm.graph.output_node().args[0][0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        build = GraphBuilder()
        build.graph = gm.graph
        total = build(WAIT, build(ALL_REDUCE, full, "sum", "some_other_group"))
    output = gm.graph.output_node()
    output.args = ([total, *output.args[0][1:]],)
    return gm, ctx


@pytest.mark.parametrize("num_parameters", [1, 2], ids=["nothing else to merge", "beside a bucket"])
def test_names_what_it_left_alone(num_parameters):
    gm, ctx = _with_foreign_all_reduce([ParameterSpec((4, 2))] * num_parameters)
    record = run_pass(BucketCollectives(), gm, ctx, *HELD)
    assert record.report.skipped == ("all_reduce_default (all_reduce) serves no single unit",)
    assert num_targets(gm, ALL_REDUCE) == 1


@pytest.mark.parametrize(
    ("name", "num_ranks", "reshard"),
    [
        ("two_linears", 2, None),
        ("two_linears", 4, None),
        ("two_linears", 4, False),
        ("called_thrice", 3, None),
        ("blocks_2", 2, None),
        ("frozen_first", 2, None),
    ],
)
def test_parity(captured, name, num_ranks, reshard):
    graphs = captured(name, num_ranks, reshard=reshard)
    forward, backward = copy_graph(graphs.forward), copy_graph(graphs.backward)
    assert run_pass(BucketCollectives(), forward, graphs.context.for_forward(), *HELD).report.changed
    assert run_pass(BucketCollectives(), backward, graphs.context.for_backward(), *HELD).report.changed
    inputs, expected = step_inputs(name, num_ranks)
    before = run_halves(graphs.forward, graphs.backward, graphs.context, inputs)
    after = run_halves(forward, backward, graphs.context, inputs)
    assert_same(after, before, bitwise=True)
    assert_same(after, expected)


def _in_a_row(param_dtype=torch.bfloat16):
    """Three neighbours, cast before they are gathered."""
    changes = {"dtype": torch.float32, "param_dtype": param_dtype}
    return [
        ParameterSpec((8, 3), row_offset=0, **changes),
        ParameterSpec((8,), row_offset=12, **changes),
        ParameterSpec((4, 2), row_offset=16, **changes),
    ]


def _bucketed_row(specs, num_ranks=2):
    gm, ctx = parameter_graph(specs, num_ranks)
    LOWERING.run(gm, ctx)
    before = copy_graph(gm)
    record, second = run_twice(BucketCollectives(), gm, ctx, *HELD)
    assert record.report.changed and not second.report.changed
    return before, gm, ctx


def test_golden_of_neighbours(golden):
    before, after, ctx = _bucketed_row(_in_a_row())
    golden(text_of(before, ctx), "bucket_collectives.row.before")
    golden(text_of(after, ctx), "bucket_collectives.row.after")


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_laid_out", [True, False], ids=["laid out", "elsewhere"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_neighbours_are_sent_as_they_lie(order, is_laid_out, param_dtype):
    """Or copied, where a user has put other tensors in their place."""
    specs = [_in_a_row(param_dtype)[index] for index in order]
    before, after, ctx = _bucketed_row(specs)
    assert num_targets(after, JOIN) == 1
    assert num_targets(after, PACK) == 1  # of the reduction
    full = [torch.randn(spec.shape) for spec in specs]
    grads = [torch.randn(spec.shape, dtype=param_dtype or torch.float32) for spec in specs]
    inputs = []
    for rank in range(2):
        shards = {spec.row_offset: pieces(value, 0, 2)[rank] for spec, value in zip(specs, full, strict=True)}
        if is_laid_out:
            offsets = sorted(shards)
            shards = dict(zip(offsets, moved_to_row([shards[offset] for offset in offsets]), strict=True))
        inputs.append([*(shards[spec.row_offset] for spec in specs), *grads])
    expected, found = (run_values(graph, inputs, ctx.mesh) for graph in (before, after))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    "change",
    [{"row_offset": -1}, {"row_offset": 100}, {"unit": "other"}, {"dtype": torch.float64}],
    ids=["no place", "far away", "another unit", "another dtype"],
)
def test_others_are_packed(change):
    specs = _in_a_row()
    _, after, _ = _bucketed_row([*specs[:2], replace(specs[2], **change)])
    is_apart = "unit" in change
    assert num_targets(after, JOIN) == (1 if is_apart else 0)
    assert num_targets(after, PACK) == (1 if is_apart else 2)


def test_shards_cast_to_different_dtypes_are_packed():
    """By a policy that only a hand-made graph has: what is gathered is equal, what is cast is not."""
    first, second, _ = _in_a_row(param_dtype=None)
    gm, ctx = parameter_graph([first, second], 2)
    LOWERING.run(gm, ctx)
    node = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)[0]
    with gm.graph.inserting_before(node):
        emit = GraphEmitter(gm.graph, origin=node)
        twice = emit(CONVERT, emit(CONVERT, node.args[0], torch.bfloat16), torch.float32)
    node.args = (twice, *node.args[1:])
    run_pass(BucketCollectives(), gm, ctx, *HELD)
    assert num_targets(gm, JOIN) == 0


SPECS = st.integers(1, 3).flatmap(
    lambda ndim: st.builds(
        ParameterSpec,
        shape=st.tuples(*[st.integers(1, 6)] * ndim),
        dim=st.integers(0, ndim - 1),
        unit=st.sampled_from(["a", "b"]),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    )
)


@examples(15)
@given(specs=st.lists(SPECS, min_size=1, max_size=5), num_ranks=st.integers(2, 4))
def test_any_mix_of_units_shapes_dims_and_dtypes(specs, num_ranks):
    gm, ctx = parameter_graph(specs, num_ranks)
    LOWERING.run(gm, ctx)
    bucketed = copy_graph(gm)
    run_pass(BucketCollectives(), bucketed, ctx, *HELD)
    assert num_targets(bucketed, ALL_GATHER) == len({spec.unit for spec in specs})
    assert num_targets(bucketed, REDUCE_SCATTER) == len({(spec.unit, spec.dtype) for spec in specs})

    full = [torch.randn(spec.shape, dtype=spec.dtype) for spec in specs]
    shards = [pieces(value, spec.dim, num_ranks) for value, spec in zip(full, specs, strict=True)]
    inputs = [
        [*(shard[rank] for shard in shards), *(torch.randn_like(value) for value in full)]
        for rank in range(num_ranks)
    ]
    before, after = (run_values(graph, inputs, ctx.mesh) for graph in (gm, bucketed))
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    assert all(torch.equal(value, want) for rank in after for value, want in zip(rank, full, strict=False))


def test_gathers_of_different_groups_stay_apart():
    """Two shards of one unit on two process groups: same unit and dtype, two buckets."""
    gm, ctx = parameter_graph([ParameterSpec((4, 2))] * 2, 2)
    LOWERING.run(gm, ctx)
    second = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)[1]
    second.args = (*second.args[:2], "another_group")
    record = run_pass(BucketCollectives(), gm, ctx, *HELD)
    assert record.report.counts == {"gather buckets": 0, "reduction buckets": 1, "all-reduce buckets": 0}
    assert second.args[2] != GROUP


def test_a_gather_of_computed_values_is_not_moved():
    """All-gathering activations is someone else's collective, even on our group."""
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    one = build.gather(build(aten.relu.default, x), 2)
    two = build.gather(build(aten.tanh.default, x), 2)
    gm = build.finish(one, two)
    record = run_pass(BucketCollectives(), gm, PassContext(), *HELD)
    assert not record.report.changed
    assert len(record.report.skipped) == 2
    assert not check_bucketed(gm, PassContext())


COPIED = [ParameterSpec((5, 2), num_replicas=2), ParameterSpec((3,), num_replicas=2)]


def test_all_reduces_of_a_unit_are_merged_without_a_copy():
    """The reduce-scattered bucket is what is summed over the copies."""
    gm, ctx = parameter_graph(COPIED, 2)
    LOWERING.run(gm, ctx)
    bucketed = copy_graph(gm)
    record, second = run_twice(BucketCollectives(), bucketed, ctx, *HELD)
    assert record.report.counts == {"gather buckets": 1, "reduction buckets": 1, "all-reduce buckets": 1}
    assert not second.report.changed and check_bucketed(bucketed, ctx) == []
    assert num_targets(bucketed, PACK) == 2  # into the gather and into the reduce-scatter
    (total,) = bucketed.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    scattered = total.args[0].args[0]
    assert total.args[0].target is WAIT and scattered.target is REDUCE_SCATTER

    full = [torch.randn(spec.shape, dtype=torch.float64) for spec in COPIED]
    shards = [pieces(value, 0, 2) * 2 for value in full]
    inputs = [
        [*(shard[rank] for shard in shards), *(torch.randn_like(value) for value in full)]
        for rank in range(4)
    ]
    before, after = (run_values(graph, inputs, ctx.mesh) for graph in (gm, bucketed))
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


def test_all_reduces_of_pending_sums_are_merged_with_a_copy():
    """Partial sums of earlier micro-batches are added to each piece, so the bucket is packed again."""
    build = GraphBuilder()
    grads = [build.input(f"primals_{i}", *spec.shape) for i, spec in enumerate(COPIED)]
    pending = [build.input(f"arg{i}_1", *padded_shape(spec.shape, 0, 2)) for i, spec in enumerate(COPIED)]
    tangent = build.input("tangents_1", 1)
    reduced = [
        reduce_grad(build, grad, f"p{i}", spec, 2, partial=partial)
        for i, (grad, partial, spec) in enumerate(zip(grads, pending, COPIED, strict=True))
    ]
    gm = build.finish(*reduced, *([None] * len(pending)))
    assert tangent.users == {}
    _, joint = parameter_graph(COPIED, 2)
    ctx = joint.for_backward()
    LOWERING.run(gm, ctx)
    bucketed = copy_graph(gm)
    record = run_pass(BucketCollectives(), bucketed, ctx, *HELD)
    assert record.report.counts == {"gather buckets": 0, "reduction buckets": 1, "all-reduce buckets": 1}
    assert num_targets(bucketed, PACK) == 2
    inputs = [
        [torch.randn(node.meta["val"].shape, dtype=torch.float64) for node in [*grads, *pending, tangent]]
        for _ in range(4)
    ]
    before, after = (run_values(graph, inputs, ctx.mesh) for graph in (gm, bucketed))
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
