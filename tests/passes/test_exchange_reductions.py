"""exchange_reductions: reduce-scatters as exchanges of pieces and sums."""

from itertools import chain

import pytest
import torch
from support.all_ranks import assert_same, pieces, run_halves, run_values, step_inputs
from support.small_graphs import (
    GROUP,
    LOWERING,
    GraphBuilder,
    ParameterSpec,
    num_targets,
    one_axis,
    parameter_graph,
    run_pass,
    run_twice,
    text_of,
)

from graphshard.ir.collectives import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT
from graphshard.ir.params import padded_shape
from graphshard.ir.rewrite import copy_graph
from graphshard.passes import BucketCollectives, ExchangeReductions
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.provenance import reduced_parameters
from graphshard.planner.merge_collectives import merge_reductions

HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)
STEP = ExchangeReductions(groups=(GROUP,))


def _step_of(graphs):
    return ExchangeReductions(groups=tuple(axis.group_name for axis in graphs.context.mesh.axes))


def _reduction(operation="sum", group=GROUP):
    """A reduce-scatter that is not of a gradient."""
    build = GraphBuilder()
    reduced = build(WAIT, build(REDUCE_SCATTER, build.input("primals_1", 6, 2), operation, 2, group))
    return build.finish(reduced), PassContext(mesh=one_axis(2))


def test_golden(captured, golden):
    graphs = captured("two_linears", 2)
    gm, ctx = graphs.backward, graphs.context.for_backward()
    golden(text_of(gm, ctx), "exchange_reductions.before")
    run_pass(_step_of(graphs), gm, ctx, *HELD)
    golden(text_of(gm, ctx), "exchange_reductions.after")


def test_other_groups_and_graphs_without_reductions_are_left_alone(captured):
    gm, ctx = _reduction(group="elsewhere")
    record = run_pass(STEP, gm, ctx)
    assert not record.report.changed and record.report.skipped == ()
    graphs = captured("two_linears", 2)
    record = run_pass(_step_of(graphs), graphs.forward, graphs.context.for_forward(), *HELD)
    assert not record.report.changed and record.report.counts == {"exchanged": 0}
    record = run_pass(ExchangeReductions(), graphs.backward, graphs.context.for_backward(), *HELD)
    assert not record.report.changed


def test_second_run_changes_nothing(captured):
    graphs = captured("blocks_2", 2)
    first, second = run_twice(_step_of(graphs), graphs.backward, graphs.context.for_backward(), *HELD)
    assert first.report.changed and not second.report.changed
    assert num_targets(graphs.backward, REDUCE_SCATTER) == 0


@pytest.mark.parametrize(
    ("operation", "why"),
    [("max", "max is no sum"), ("sum", "it reduces no gradient of a sharded parameter")],
    ids=["maximum", "a user's own"],
)
def test_refuses_what_is_no_sum_of_gradients(operation, why):
    gm, ctx = _reduction(operation)
    record = run_pass(STEP, gm, ctx)
    assert not record.report.changed
    assert record.report.skipped == (f"reduce_scatter_tensor_default stays a reduce-scatter: {why}",)


@pytest.mark.parametrize("force_sum", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_sums(force_sum, num_ranks, dtype):
    specs = [ParameterSpec((6, 2), dtype=dtype, force_sum=force_sum), ParameterSpec((3, 6), dim=1, dtype=dtype)]
    gm, ctx = parameter_graph(specs, num_ranks)
    LOWERING.run(gm, ctx)
    exchanged = copy_graph(gm)
    assert run_pass(STEP, exchanged, ctx, *HELD).report.counts == {"exchanged": 2}
    assert num_targets(exchanged, ALL_TO_ALL) == 2
    torch.manual_seed(0)
    shards = [torch.randn(*padded_shape(spec.shape, spec.dim, num_ranks)).to(dtype) for spec in specs]
    grads = [[torch.randn(spec.shape).to(dtype) for spec in specs] for _ in range(num_ranks)]
    inputs = [[*shards, *grad] for grad in grads]
    before, after = run_values(gm, inputs, ctx.mesh), run_values(exchanged, inputs, ctx.mesh)
    # One rounding each at most: 16-bit floats are added in 32 bits here, one by one there.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(after, before, rtol=2 * tolerance, atol=2 * tolerance)
    assert all(value.dtype == dtype for rank in after for value in rank)
    if num_ranks == 2:
        assert all(
            torch.equal(new.view(torch.int8), old.view(torch.int8))
            for new, old in zip(chain(*after), chain(*before), strict=True)
        )


def test_reductions_behind_one_all_reduce_are_exchanged_too():
    """Of hybrid sharding: a bucket of what several reduce-scatters give is summed over the copies."""
    specs = [ParameterSpec(shape, num_replicas=2) for shape in [(5, 2), (3,), (4, 4)]]
    gm, ctx = parameter_graph(specs, 2)
    LOWERING.run(gm, ctx)
    before = copy_graph(gm)
    merge_reductions(gm.graph, gm.graph.find_nodes(op="call_function", target=ALL_REDUCE))
    gm.recompile()
    served = [[binding.name for binding in bindings] for bindings in reduced_parameters(gm, ctx).values()]
    assert served == [["p0", "p1", "p2"], ["p0"], ["p1"], ["p2"]]
    assert run_pass(STEP, gm, ctx, *HELD).report.counts == {"exchanged": 3}
    torch.manual_seed(0)
    full = [torch.randn(spec.shape, dtype=torch.float64) for spec in specs]
    shards = [pieces(value, 0, 2) * 2 for value in full]
    inputs = [
        [*(shard[rank] for shard in shards), *(torch.randn_like(value) for value in full)] for rank in range(4)
    ]
    wanted, found = (run_values(graph, inputs, ctx.mesh) for graph in (before, gm))
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("merged", [False, True], ids=["single", "buckets"])
def test_parity(captured, num_ranks, merged):
    graphs = captured("blocks_2", num_ranks)
    backward, ctx = copy_graph(graphs.backward), graphs.context.for_backward()
    if merged:
        run_pass(BucketCollectives(), backward, ctx, *HELD)
    run_pass(_step_of(graphs), backward, ctx, *HELD)
    assert num_targets(backward, REDUCE_SCATTER) == 0 < num_targets(backward, ALL_TO_ALL)
    inputs, expected = step_inputs("blocks_2", num_ranks)
    assert_same(run_halves(graphs.forward, backward, graphs.context, inputs), expected)
