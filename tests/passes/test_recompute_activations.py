"""recompute_activations: activations that are computed again in the backward."""

import pytest
from support.all_ranks import assert_same, run_halves, step_inputs
from support.small_graphs import GraphBuilder, aten, run_pass, run_twice, text_of
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.backend.pipelines import JOINT_PIPELINE
from graphshard.ir.collectives import ALL_GATHER, WAIT
from graphshard.ir.rewrite import output_values
from graphshard.passes import RecomputeActivations
from graphshard.pipeline.context import context_from_shard_ops
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.pipeline import Pipeline
from graphshard.testing import capture_graphs

TAGGED = frozenset({Fact.MERGED, Fact.REDUCED, Fact.TAGGED})


def _tagged(captured, name="two_linears"):
    graphs = captured(name, 2)
    return graphs.joint, graphs.context


def _names(gm, *targets):
    return tuple(node.name for node in gm.graph.nodes if node.target in targets)


def _tags(gm, names):
    return {node.name: node.meta.get("recompute") for node in gm.graph.nodes if node.name in names}


def test_golden(captured, golden):
    gm, ctx = _tagged(captured)
    golden(text_of(gm, ctx), "recompute_activations.before")
    (activation,) = _names(gm, aten.relu.default)
    (first, *_) = _names(gm, aten.addmm.default)
    record = run_pass(RecomputeActivations(recomputed=(activation,), saved=(first,)), gm, ctx, *TAGGED)
    assert record.report.counts == {"recomputed": 1, "saved": 1}
    golden(text_of(gm, ctx), "recompute_activations.after")
    assert _tags(gm, (activation, first)) == {
        activation: CheckpointPolicy.MUST_RECOMPUTE, first: CheckpointPolicy.MUST_SAVE,
    }  # fmt: skip


def test_nothing_to_tag(captured):
    record = run_pass(RecomputeActivations(), *_tagged(captured), *TAGGED)
    assert not record.report.changed
    assert record.report.counts == {"recomputed": 0, "saved": 0}


def test_second_run_changes_nothing(captured):
    gm, ctx = _tagged(captured)
    first, second = run_twice(RecomputeActivations(recomputed=_names(gm, aten.relu.default)), gm, ctx, *TAGGED)
    assert first.report.changed and not second.report.changed


def test_names_that_are_missing_are_skipped(captured):
    record = run_pass(RecomputeActivations(recomputed=("a",), saved=("b",)), *_tagged(captured), *TAGGED)
    assert not record.report.changed
    assert record.report.skipped == ("no node 'a' in this graph", "no node 'b' in this graph")


def test_what_has_a_tag_keeps_it(captured):
    """With its region: between regions of ``torch.utils.checkpoint`` the partitioner saves what crosses."""
    gm, ctx = _tagged(captured)
    (activation,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    activation.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 7}

    def tags():
        return {node.name: (node.meta["recompute"], node.meta["ac_graph_id"]) for node in tagged}

    tagged = [node for node in gm.graph.nodes if "recompute" in node.meta]
    before, names = tags(), tuple(node.name for node in tagged)
    assert len(set(before.values())) == 2
    for step in (RecomputeActivations(saved=names), RecomputeActivations(recomputed=names)):
        record = run_pass(step, gm, ctx, *TAGGED)
        assert not record.report.changed and tags() == before


def test_what_lies_between_is_computed_again_too(captured):
    """Of a layer norm only parts could be saved, and it would not be computed again by itself."""
    gm, ctx = _tagged(captured, "blocks_2")
    relu, *_ = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    norm, *_ = gm.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    (before,) = [source for source in norm.all_input_nodes if source.target is aten.addmm.default]
    run_pass(RecomputeActivations(recomputed=(relu.name,), saved=(before.name,)), gm, ctx, *TAGGED)
    (result,) = [user for user in norm.users if user.args[1] == 0]
    assert set(_tags(gm, (relu.name, norm.name, result.name)).values()) == {CheckpointPolicy.MUST_RECOMPUTE}
    assert _tags(gm, (before.name,)) == {before.name: CheckpointPolicy.MUST_SAVE}


def test_sizes_are_left_alone():
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    gm = build.finish(build(aten.relu.default, x))
    with gm.graph.inserting_after(x):
        size = gm.graph.call_function(aten.sym_size.int, (x, 0))
    size.meta["val"] = 2
    report = RecomputeActivations(recomputed=(size.name,)).run(gm, context_from_shard_ops(gm))
    assert not report.changed and "recompute" not in size.meta


def test_a_collective_runs_once():
    """Nor is what it gathers computed again for it."""
    build = GraphBuilder()
    first = build(aten.relu.default, build.input("primals_1", 2, 2))
    gathered = build(WAIT, build(ALL_GATHER, first, 2, "shard"))
    gm = build.finish(build(aten.relu.default, gathered))
    *names, last = _names(gm, aten.relu.default, ALL_GATHER, WAIT)
    step = RecomputeActivations(recomputed=(*names[1:], last))
    record = run_pass(step, gm, context_from_shard_ops(gm), *TAGGED)
    assert record.report.counts == {"recomputed": 1, "saved": 0}
    assert set(_tags(gm, names).values()) == {None}


@pytest.mark.parametrize("name", ["two_linears", "blocks_2"])
def test_parity_and_what_is_saved(captured, fake_group, name):
    from support.small_models import MODELS, example_batch, shard_units

    plain = captured(name, 2)
    results = {value.name for value in output_values(plain.joint.graph) if value is not None}
    saved = [value.name for value in output_values(plain.forward.graph) if value.name not in results]
    nodes = plain.joint.graph.nodes
    ops = {node.name for node in nodes if node.op == "call_function" and "recompute" not in node.meta}
    dropped = ops & set(saved[::2])
    assert dropped
    step = RecomputeActivations(recomputed=tuple(dropped), saved=tuple(set(saved) - dropped))
    pipeline = Pipeline(*JOINT_PIPELINE.passes, step, given=JOINT_PIPELINE.given)
    assert pipeline.facts_at_end == JOINT_PIPELINE.facts_at_end
    model = shard_units(MODELS[name]().double(), fake_group(2))
    graphs = capture_graphs(model, example_batch(name).double(), pipeline=pipeline)
    assert not {value.name for value in output_values(graphs.forward.graph)} & dropped
    inputs, values = step_inputs(name, 2)
    assert_same(run_halves(graphs.forward, graphs.backward, graphs.context, inputs), values)

