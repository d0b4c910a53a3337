"""spread_parameters: a full parameter is kept as pieces on few ranks, and gathered from them."""

import math

import pytest
from support.all_ranks import assert_all_gradients, assert_same, run_halves, run_joint, step_inputs
from support.small_graphs import (
    GraphBuilder,
    ParameterSpec,
    aten,
    num_targets,
    parameter_graph,
    run_pass,
    run_twice,
    text_of,
)

from graphshard.errors import PipelineError
from graphshard.ir.collectives import ALL_GATHER, group_name
from graphshard.ir.params import UnshardCall, padded_shape
from graphshard.ir.piece_ops import KEEP_PIECE, SPREAD
from graphshard.ir.rewrite import copy_graph, output_values
from graphshard.ir.shard_ops import UNSHARD
from graphshard.passes import MergeUnshards, SpreadParameters, TagRecompute
from graphshard.pipeline.context import context_from_shard_ops
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.pipeline import Pipeline

#: Model, ranks, and over how many of them a full parameter is spread.
SPREADS = [("two_linears", 4, 2), ("tied_embedding", 4, 2), ("blocks_2", 6, 3)]


def _merged(captured, name, num_ranks, spread_over):
    graphs = captured(name, num_ranks, reshard=spread_over)
    run_pass(MergeUnshards(), graphs.captured, graphs.context)
    return graphs


def test_golden(captured, golden):
    graphs = _merged(captured, "two_linears", 4, 2)
    golden(text_of(graphs.captured, graphs.context), "spread_parameters.before")
    run_pass(SpreadParameters(), graphs.captured, graphs.context)
    golden(text_of(graphs.captured, graphs.context), "spread_parameters.after")


@pytest.mark.parametrize("reshard", [True, False])
def test_nothing_to_spread(captured, reshard):
    graphs = _merged(captured, "two_linears", 4, reshard)
    record = run_pass(SpreadParameters(), graphs.captured, graphs.context)
    assert not record.report.changed
    assert record.report.counts == {"spread": 0}


def test_a_graph_without_gradients_is_left_alone(captured):
    graphs = captured("two_linears", 4, reshard=2, grad=False)
    assert num_targets(graphs.joint, UNSHARD) == 4 and num_targets(graphs.joint, KEEP_PIECE) == 0


def test_a_parameter_that_no_gradient_needs_is_named(captured):
    graphs = _merged(captured, "two_linears", 4, 2)
    record = run_pass(SpreadParameters(), graphs.captured, graphs.context)
    # A bias is added and the first weight is multiplied with the batch: no gradient reads them.
    assert record.report.counts == {"spread": 1}
    assert set(record.report.skipped) == {
        f"no gradient needs {name}" for name in ("first.weight", "first.bias", "second.bias")
    }


def test_refuses_to_run_before_reads_are_merged():
    with pytest.raises(PipelineError, match="spread_parameters requires MERGED, provided by no earlier pass"):
        Pipeline(SpreadParameters(), MergeUnshards())


def test_tags_made_before_it_do_not_hold():
    """The pieces and the second gathers have no tags yet."""
    assert Fact.TAGGED not in Pipeline(MergeUnshards(), TagRecompute(), SpreadParameters()).facts_at_end
    assert Fact.TAGGED in Pipeline(MergeUnshards(), SpreadParameters(), TagRecompute()).facts_at_end


@pytest.mark.parametrize(("name", "num_ranks", "spread_over"), SPREADS)
def test_second_run_changes_nothing(captured, name, num_ranks, spread_over):
    graphs = _merged(captured, name, num_ranks, spread_over)
    first, second = run_twice(SpreadParameters(), graphs.captured, graphs.context)
    assert first.report.changed and not second.report.changed


@pytest.mark.parametrize(("name", "num_ranks", "spread_over"), SPREADS)
def test_parity(captured, name, num_ranks, spread_over):
    """The joint graph before and after, and the partitioned halves."""
    graphs = _merged(captured, name, num_ranks, spread_over)
    before = copy_graph(graphs.captured)
    run_pass(SpreadParameters(), graphs.captured, graphs.context)
    inputs, expected = step_inputs(name, num_ranks)
    kept_whole, spread = (run_joint(gm, graphs.context, inputs) for gm in (before, graphs.captured))
    assert_same(spread, kept_whole, bitwise=True)
    assert_same(spread, expected)
    assert_all_gradients(spread, graphs.context, trainable=len(graphs.context.parameters))
    assert_same(run_halves(graphs.forward, graphs.backward, graphs.context, inputs), expected)


@pytest.mark.parametrize(("name", "num_ranks", "spread_over"), SPREADS)
def test_backward_gathers_over_few_ranks_from_pieces(captured, name, num_ranks, spread_over):
    graphs = captured(name, num_ranks, reshard=spread_over)
    mesh = graphs.context.mesh

    def gathers(gm):
        return [
            (mesh.find(group_name(node)).label, node.args[1])
            for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
        ]

    assert set(gathers(graphs.forward)) == {("shard", num_ranks)}
    num_spread = num_targets(graphs.forward, SPREAD)
    assert gathers(graphs.backward) == [(f"shard/{spread_over}", spread_over)] * num_spread
    assert num_spread > 0


@pytest.mark.parametrize(("name", "num_ranks", "spread_over"), SPREADS)
def test_pieces_are_saved_and_no_full_parameter(captured, name, num_ranks, spread_over):
    graphs = captured(name, num_ranks, reshard=spread_over)
    inputs = graphs.backward.graph.find_nodes(op="placeholder")
    num_saved = sum(not node.name.startswith("tangents_") for node in inputs)
    saved = output_values(graphs.forward.graph)[-num_saved:]
    pieces = [node for node in saved if node.target is SPREAD]
    spread = [
        UnshardCall(*node.args)
        for node in graphs.joint.graph.find_nodes(op="call_function", target=UNSHARD)
        if UnshardCall(*node.args).group_size == spread_over
    ]
    expected = [padded_shape(call.shape, call.dim, spread_over) for call in spread]
    assert sorted(list(node.meta["val"].shape) for node in pieces) == sorted(expected)
    matrices = {math.prod(each.shape) for each in graphs.context.parameters if len(each.shape) > 1}
    others = {node.meta["val"].numel() for node in saved if node not in pieces}
    assert matrices and not matrices & others


def test_views_are_made_again_of_the_second_gather():
    """A gradient reads a transpose that the forward made: it reads one of what is gathered again."""
    build, spec = GraphBuilder(), ParameterSpec((4, 4))
    shard, x = build.input("primals_1", 1, 4), build.input("primals_2", 2, 4)
    tangent = build.input("tangents_1", 2, 4)
    call = spec.call(shard, build.handle(), "w", 4)._replace(reshard=2, reshard_group="pairs")
    turned = build(aten.t.default, build(UNSHARD, *call))
    gm = build.finish(build(aten.mm.default, x, turned), None, build(aten.mm.default, tangent, turned))
    ctx = context_from_shard_ops(gm)
    record = run_pass(SpreadParameters(), gm, ctx, *MergeUnshards.provides)
    assert record.report.counts == {"spread": 1}
    forward, backward = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    second = backward.args[1].args[0]
    assert backward.args[1] is not forward.args[1]
    assert second.target is UNSHARD and UnshardCall(*second.args).group_name == "pairs"
    assert second.args[0].args[0] is forward.args[1].args[0].args[0]  # both are items of one keep_piece


def test_a_parameter_whose_shards_all_ranks_keep_stays():
    gm, ctx = parameter_graph([ParameterSpec((4, 2))], 4)
    before = text_of(gm, ctx)
    assert not run_pass(SpreadParameters(), gm, ctx, *MergeUnshards.provides).report.changed
    assert text_of(gm, ctx) == before
