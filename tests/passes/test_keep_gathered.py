"""keep_gathered: which units keep their gathered parameters for the backward."""

import pytest
from support.all_ranks import assert_same, run_halves, step_inputs
from support.small_graphs import GraphBuilder, aten, num_targets, run_pass, run_twice, text_of

from graphshard.backend.pipelines import JOINT_PIPELINE
from graphshard.ir.collectives import ALL_GATHER
from graphshard.ir.params import UnshardCall
from graphshard.ir.shard_ops import UNSHARD
from graphshard.passes import KeepGathered, MergeUnshards, SpreadParameters, TagRecompute
from graphshard.pipeline.context import context_from_shard_ops
from graphshard.pipeline.pipeline import Pipeline
from graphshard.testing import capture_graphs


def _units_kept(gm):
    calls = [UnshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)]
    return {call.unit for call in calls if call.reshard == 1}


def _merged(captured, name, **options):
    graphs = captured(name, 2, **options)
    run_pass(MergeUnshards(), graphs.captured, graphs.context)
    return graphs.captured, graphs.context


def test_golden(captured, golden):
    gm, ctx = _merged(captured, "two_linears")
    golden(text_of(gm, ctx), "keep_gathered.before")
    run_pass(KeepGathered(units=("first",)), gm, ctx)
    golden(text_of(gm, ctx), "keep_gathered.after")


def test_nothing_to_choose():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2, 2)))
    record = run_pass(KeepGathered(), gm, context_from_shard_ops(gm))
    assert not record.report.changed
    assert record.report.counts == {"kept": 0, "freed": 0}


def test_second_run_changes_nothing(captured):
    first, second = run_twice(KeepGathered(units=("blocks.1",)), *_merged(captured, "blocks_2"))
    assert first.report.changed and not second.report.changed
    assert first.report.counts == second.report.counts == {"kept": 6, "freed": 10}


@pytest.mark.parametrize("units", [(), ("blocks.0",), ("blocks.1", "root"), ("blocks.0", "blocks.1", "root")])
def test_the_named_units_and_no_others_are_kept(captured, units):
    gm, ctx = _merged(captured, "blocks_2")
    assert _units_kept(gm) == {"root"}
    run_pass(KeepGathered(units=units), gm, ctx)
    assert _units_kept(gm) == set(units)


@pytest.mark.parametrize("reshard", [True, False])
def test_what_the_user_said_stays(captured, reshard):
    gm, ctx = _merged(captured, "blocks_2", reshard=reshard)
    before = _units_kept(gm)
    record = run_pass(KeepGathered(units=("blocks.0",)), gm, ctx)
    assert not record.report.changed and _units_kept(gm) == before
    assert "blocks.0.up.weight: reshard_after_forward of blocks.0 was given" in record.report.skipped


def test_unknown_units_are_named(captured):
    gm, ctx = _merged(captured, "blocks_2")
    record = run_pass(KeepGathered(units=("blocks.7",)), gm, ctx)
    assert record.report.skipped == ("no unit 'blocks.7' in this graph",)


@pytest.mark.parametrize("units", [(), ("blocks.1",), ("blocks.0", "blocks.1", "root")])
def test_parity_and_gathers_of_the_backward(captured, fake_group, units):
    from support.small_models import MODELS, example_batch, shard_units

    pipeline = Pipeline(MergeUnshards(), SpreadParameters(), KeepGathered(units=units), TagRecompute())
    assert pipeline.facts_at_end == JOINT_PIPELINE.facts_at_end
    model = shard_units(MODELS["blocks_2"]().double(), fake_group(2))
    graphs = capture_graphs(model, example_batch("blocks_2").double(), pipeline=pipeline)
    # A block's backward needs its three weights and, since the norm runs again, the norm's bias; the root's, one.
    freed = {"blocks.0": 4, "blocks.1": 4, "root": 1}.items()
    assert num_targets(graphs.backward, ALL_GATHER) == sum(count for unit, count in freed if unit not in units)
    inputs, values = step_inputs("blocks_2", 2)
    assert_same(run_halves(graphs.forward, graphs.backward, graphs.context, inputs), values)
