"""exchange_reductions: reduce-scatters as exchanges of pieces and sums."""

import pytest
import torch
from all_ranks import assert_same, run_halves, run_values, step_inputs
from small_graphs import GROUP, GraphBuilder, num_targets, one_axis, run_pass, run_twice, text_of

from graphshard.collectives import ALL_TO_ALL, REDUCE_SCATTER, WAIT
from graphshard.context import PassContext
from graphshard.facts import Fact
from graphshard.passes import BucketCollectives, ExchangeReductions
from graphshard.rewrite import copy_graph

HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)
STEP = ExchangeReductions(groups=(GROUP,))


def _step_of(graphs):
    return ExchangeReductions(groups=tuple(axis.group_name for axis in graphs.context.mesh.axes))


def _reduction(operation="sum", num_ranks=2, dtype=torch.float64, shape=(6, 2), group=GROUP):
    build = GraphBuilder()
    value = build.input("primals_1", *shape, dtype=dtype)
    reduced = build(WAIT, build(REDUCE_SCATTER, value, operation, num_ranks, group))
    return build.finish(reduced), PassContext(mesh=one_axis(num_ranks))


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
    ("gm", "why"),
    [
        (_reduction("max")[0], "max is no sum"),
        (_reduction(dtype=torch.int64)[0], "torch.int64 is no floating-point dtype"),
    ],
    ids=["maximum", "integers"],
)
def test_refuses_what_is_no_sum_of_floats(gm, why):
    record = run_pass(STEP, gm, PassContext(mesh=one_axis(2)))
    assert not record.report.changed
    assert record.report.skipped == (f"reduce_scatter_tensor_default stays a reduce-scatter: {why}",)


def test_a_reduction_that_leaves_unwaited_stays():
    build = GraphBuilder()
    gm = build.finish(build(REDUCE_SCATTER, build.input("primals_1", 4, 2), "sum", 2, GROUP))
    record = run_pass(STEP, gm, PassContext(mesh=one_axis(2)))
    assert not record.report.changed
    (sentence,) = record.report.skipped
    assert sentence.endswith("stays a reduce-scatter: something other than one wait reads it")


@pytest.mark.parametrize("operation", ["sum", "avg"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_sums(operation, num_ranks, dtype):
    gm, ctx = _reduction(operation, num_ranks, dtype)
    exchanged = copy_graph(gm)
    assert run_pass(STEP, exchanged, ctx).report.counts == {"exchanged": 1}
    assert num_targets(exchanged, ALL_TO_ALL) == 1
    torch.manual_seed(0)
    inputs = [[torch.randn(6, 2).to(dtype)] for _ in range(num_ranks)]
    before, after = run_values(gm, inputs, ctx.mesh), run_values(exchanged, inputs, ctx.mesh)
    exact = sum(value.double() for (value,) in inputs) / (num_ranks if operation == "avg" else 1)
    for (value,), piece in zip(after, exact.chunk(num_ranks), strict=True):
        torch.testing.assert_close(value, piece.to(dtype))
    if num_ranks == 2:
        torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


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
