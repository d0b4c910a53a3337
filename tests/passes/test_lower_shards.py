"""lower_shards: shard ops become collectives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.all_ranks import assert_same, pieces, run_joint, run_values, step_inputs
from support.small_graphs import (
    GraphBuilder,
    ParameterSpec,
    aten,
    num_targets,
    parameter_graph,
    run_pass,
    text_of,
)
from support.thorough import examples

from graphshard.errors import PipelineError
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER, short_name
from graphshard.ir.rewrite import copy_graph
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.passes import LowerShards, MergeUnshards, TagRecompute
from graphshard.pipeline.context import context_from_shard_ops
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.pipeline import Pipeline

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
    assert record.report.counts == {"gathers": 0, "reductions": 0, "pieces": 0}


@pytest.mark.parametrize("name", ["two_linears", "tied_embedding"])
def test_second_run_changes_nothing(captured, name):
    graphs = captured(name, 2)
    assert _lower(graphs.captured, graphs.context).report.changed
    second = run_pass(LowerShards(), graphs.captured, graphs.context)
    assert not second.report.changed


def test_refuses_parameters_that_are_gathered_twice():
    with pytest.raises(PipelineError, match="lower_shards requires MERGED, provided by no earlier pass"):
        Pipeline(LowerShards())


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


@examples(20)
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


def test_the_lowered_chain_of_a_parameter():
    """Every step of a gather that is cut along dim 1 and has padding."""
    gm, ctx = parameter_graph([ParameterSpec((3, 5), dim=1)], 2)
    _lower(gm, ctx)
    gathered = gm.graph.output_node().args[0][0]
    chain = []
    while gathered.op != "placeholder":
        chain.insert(0, gathered)
        (gathered,) = gathered.all_input_nodes
    ops = [
        "all_gather_into_tensor",
        "wait_tensor",
        "view",
        "permute",
        "clone",
        "view",
        "slice",
        "clone",
    ]
    assert [short_name(node) for node in chain] == ops


def test_tags_stay_behind():
    """The partitioner has read them: it saved nothing of the chain, or the full parameter alone."""
    gm, ctx = parameter_graph([ParameterSpec((5, 2)), ParameterSpec((5, 2), reshard=False)], 2)
    BEFORE.run(gm, ctx)
    assert text_of(gm, ctx).count("!recompute") == text_of(gm, ctx).count("!save") == 1
    run_pass(LowerShards(), gm, ctx)
    assert "!" not in text_of(gm, ctx)


def test_provides_waited_gathered_and_lowered():
    assert Pipeline(LowerShards(), given=READY).facts_at_end >= {Fact.WAITED, Fact.GATHERED, Fact.LOWERED}
