"""lower_shards: shard ops become collectives."""

import pytest
import torch
from all_ranks import assert_same, pieces, run_joint, run_values, step_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import (
    GraphBuilder,
    ParameterSpec,
    aten,
    copy_graph,
    num_targets,
    parameter_graph,
    run_pass,
    text_of,
)

from graphshard.collectives import ALL_GATHER, REDUCE_SCATTER
from graphshard.context import context_from_shard_ops
from graphshard.errors import PipelineError
from graphshard.facts import Fact
from graphshard.ops import REDUCE_GRAD, UNSHARD
from graphshard.passes import LowerShards, MergeUnshards, TagRecompute
from graphshard.pipeline import Pipeline

BEFORE = Pipeline(MergeUnshards(), TagRecompute())
READY = BEFORE.facts_at_end


def _lower(gm, ctx):
    BEFORE.run(gm, ctx)
    (record,) = Pipeline(LowerShards(), given=READY).run(gm, ctx)
    return record


def test_golden(captured, golden):
    graphs = captured("two_linears", 2)
    BEFORE.run(graphs.captured, graphs.context)
    golden(text_of(graphs.captured, graphs.context), "lower_shards.before")
    run_pass(LowerShards(), graphs.captured, graphs.context)
    golden(text_of(graphs.captured, graphs.context), "lower_shards.after")


def test_nothing_to_lower():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2, 2)))
    record = run_pass(LowerShards(), gm, context_from_shard_ops(gm))
    assert not record.report.changed
    assert record.report.counts == {"gathers": 0, "reductions": 0}


@pytest.mark.parametrize("name", ["two_linears", "tied_embedding"])
def test_second_run_changes_nothing(captured, name):
    graphs = captured(name, 2)
    assert _lower(graphs.captured, graphs.context).report.changed
    second = run_pass(LowerShards(), graphs.captured, graphs.context)
    assert not second.report.changed


def test_refuses_untagged_gathers():
    with pytest.raises(PipelineError, match="lower_shards requires TAGGED, provided by no earlier pass"):
        Pipeline(MergeUnshards(), LowerShards())


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("two_linears", 2), ("two_linears", 4), ("tied_embedding", 3), ("called_thrice", 3)],
)
def test_parity(captured, name, num_ranks):
    graphs = captured(name, num_ranks)
    BEFORE.run(graphs.captured, graphs.context)
    lowered = copy_graph(graphs.captured)
    run_pass(LowerShards(), lowered, graphs.context)
    inputs, expected = step_inputs(name, num_ranks)
    before, after = (run_joint(gm, graphs.context, inputs) for gm in (graphs.captured, lowered))
    assert_same(after, before, bitwise=True)
    assert_same(after, expected)


SPECS = st.integers(1, 3).flatmap(
    lambda ndim: st.builds(
        ParameterSpec,
        shape=st.tuples(*[st.integers(1, 7)] * ndim),
        dim=st.integers(0, ndim - 1),
        reshard=st.booleans(),
    )
)


@settings(max_examples=20, deadline=None)
@given(specs=st.lists(SPECS, min_size=1, max_size=3), num_ranks=st.integers(2, 4))
def test_any_shape_on_any_dim(specs, num_ranks):
    gm, ctx = parameter_graph(specs, num_ranks)
    lowered = copy_graph(gm)
    _lower(lowered, ctx)
    assert num_targets(lowered, UNSHARD) == num_targets(lowered, REDUCE_GRAD) == 0
    assert num_targets(lowered, ALL_GATHER) == num_targets(lowered, REDUCE_SCATTER) == len(specs)

    full = [torch.randn(spec.shape, dtype=torch.float64) for spec in specs]
    shards = [pieces(value, spec.dim, num_ranks) for value, spec in zip(full, specs, strict=True)]
    grads = [[torch.randn_like(value) for value in full] for _ in range(num_ranks)]
    inputs = [[*(shard[rank] for shard in shards), *grads[rank]] for rank in range(num_ranks)]
    before, after = (run_values(graph, inputs, ctx.mesh) for graph in (gm, lowered))
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)

    means = [sum(rank[i] for rank in grads) / num_ranks for i in range(len(specs))]
    reduced = [
        pieces(mean, spec.dim, num_ranks, padding=0.0) for mean, spec in zip(means, specs, strict=True)
    ]
    expected = [[*full, *(piece[rank] for piece in reduced)] for rank in range(num_ranks)]
    torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)


def test_a_kept_parameter_is_tagged_at_its_last_step_only():
    gm, ctx = parameter_graph([ParameterSpec((5, 2), reshard=False)], 2)
    _lower(gm, ctx)
    lines = text_of(gm, ctx).splitlines()
    assert [line.split(" ")[0] for line in lines if line.endswith("!save")] == ["%slice_0:"]


def test_a_resharded_parameter_is_tagged_at_every_step():
    gm, ctx = parameter_graph([ParameterSpec((3, 5), dim=1)], 2)
    _lower(gm, ctx)
    tagged = [line.split(":")[0] for line in text_of(gm, ctx).splitlines() if line.endswith("!recompute")]
    ops = [
        "all_gather_into_tensor_0",
        "wait_tensor_0",
        "view_0",
        "permute_0",
        "clone_0",
        "view_1",
        "slice_0",
        "clone_1",
    ]
    assert tagged == [f"%{op}" for op in ops]


def test_provides_waited_gathered_and_lowered():
    assert Pipeline(LowerShards(), given=READY).facts_at_end >= {Fact.WAITED, Fact.GATHERED, Fact.LOWERED}
