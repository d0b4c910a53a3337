"""merge_unshards: one gather and one reduction for a parameter that is read several times."""

import pytest
import torch
from support.all_ranks import assert_all_gradients, assert_same, run_joint, step_inputs
from support.small_graphs import (
    GraphBuilder,
    ParameterSpec,
    aten,
    num_targets,
    parameter_graph,
    reduce_grad,
    run_pass,
    run_twice,
    text_of,
    unshard,
)

from graphshard.ir.rewrite import copy_graph
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.passes import MergeUnshards
from graphshard.pipeline.context import context_from_shard_ops
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.pipeline import Pipeline

SHARED = [("tied_embedding", 2), ("tied_embedding", 4), ("called_thrice", 3)]


def test_golden(captured, golden):
    graphs = captured("tied_embedding", 2)
    golden(text_of(graphs.captured, graphs.context), "merge_unshards.before")
    run_pass(MergeUnshards(), graphs.captured, graphs.context)
    golden(text_of(graphs.captured, graphs.context), "merge_unshards.after")


def test_nothing_to_merge(captured):
    graphs = captured("two_linears", 2)
    record = run_pass(MergeUnshards(), graphs.captured, graphs.context)
    assert not record.report.changed
    assert record.report.counts == {"gathers merged": 0, "reductions merged": 0}


@pytest.mark.parametrize(("name", "num_ranks"), SHARED)
def test_second_run_changes_nothing(captured, name, num_ranks):
    graphs = captured(name, num_ranks)
    first, second = run_twice(MergeUnshards(), graphs.captured, graphs.context)
    assert first.report.changed and not second.report.changed


@pytest.mark.parametrize(("name", "num_ranks"), [*SHARED, ("two_linears", 4)])
def test_parity(captured, name, num_ranks):
    graphs = captured(name, num_ranks)
    merged = copy_graph(graphs.captured)
    run_pass(MergeUnshards(), merged, graphs.context)
    inputs, expected = step_inputs(name, num_ranks)
    before, after = (run_joint(gm, graphs.context, inputs) for gm in (graphs.captured, merged))
    assert_same(before, expected)
    assert_same(after, expected)
    assert_all_gradients(after, graphs.context, trainable=len(graphs.context.parameters))
    torch.testing.assert_close(after.outputs, before.outputs, rtol=0.0, atol=0.0)


def test_three_reads_become_one_gather_and_one_reduction(captured):
    graphs = captured("called_thrice", 3)
    assert num_targets(graphs.captured, UNSHARD) == 6  # weight and bias, three calls
    record = run_pass(MergeUnshards(), graphs.captured, graphs.context)
    assert record.report.counts == {"gathers merged": 4, "reductions merged": 4}
    assert num_targets(graphs.captured, UNSHARD) == num_targets(graphs.captured, REDUCE_GRAD) == 2


def _two_reductions(*, alpha: float | None = None, unit: str = "root", also_returned: bool = False):
    build, spec = GraphBuilder(), ParameterSpec((4, 2))
    shard = build.input("primals_1", 2, 2)
    left, right = build.input("tangents_1", 4, 2), build.input("tangents_2", 4, 2)
    full = unshard(build, shard, "w", spec, 2)
    one = reduce_grad(build, left, "w", spec, 2)
    two = reduce_grad(build, right, "w", ParameterSpec((4, 2), unit=unit), 2)
    total = build(aten.add.Tensor, one, two, **({} if alpha is None else {"alpha": alpha}))
    gm = build.finish(full, *([one] if also_returned else []), total)
    return gm, context_from_shard_ops(gm)


def test_a_plain_sum_is_merged():
    gm, ctx = _two_reductions()
    assert run_pass(MergeUnshards(), gm, ctx).report.counts["reductions merged"] == 1


@pytest.mark.parametrize(
    "case",
    [{"alpha": 2.0}, {"unit": "other"}, {"also_returned": True}],
    ids=["scaled sum", "different reductions", "reduction read elsewhere"],
)
def test_declines_sums_that_are_not_one_gradient(case):
    gm, ctx = _two_reductions(**case)
    # A sum that was not merged leaves a gradient that is no reduction, and REDUCED would say so.
    report = MergeUnshards().run(gm, ctx)
    assert not report.changed
    assert num_targets(gm, REDUCE_GRAD) == 2


def test_parameters_of_equal_shape_stay_apart():
    gm, ctx = parameter_graph([ParameterSpec((4, 2)), ParameterSpec((4, 2))], 2)
    assert not run_pass(MergeUnshards(), gm, ctx).report.changed


def test_provides_merged():
    assert Fact.MERGED in Pipeline(MergeUnshards()).facts_at_end
