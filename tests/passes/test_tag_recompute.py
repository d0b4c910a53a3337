"""tag_recompute: what the partitioner keeps and what it gathers again."""

import operator

import pytest
from support.all_ranks import assert_same, run_halves, run_joint, step_inputs
from support.small_graphs import GraphBuilder, ParameterSpec, aten, run_pass, run_twice, text_of, unshard
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ir.params import ExtendedInputs, UnshardCall
from graphshard.ir.shard_ops import UNSHARD
from graphshard.passes import MergeUnshards, TagRecompute
from graphshard.pipeline.context import context_from_shard_ops
from graphshard.pipeline.pipeline import Pipeline


def test_golden(captured, golden):
    graphs = captured("two_linears", 2)
    run_pass(MergeUnshards(), graphs.captured, graphs.context)
    golden(text_of(graphs.captured, graphs.context), "tag_recompute.before")
    run_pass(TagRecompute(), graphs.captured, graphs.context)
    golden(text_of(graphs.captured, graphs.context), "tag_recompute.after")


def test_nothing_to_tag():
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    gm = build.finish(build(aten.relu.default, x))
    record = run_pass(TagRecompute(), gm, context_from_shard_ops(gm))
    assert not record.report.changed
    assert record.report.counts == {"recomputed": 0, "saved": 0}


@pytest.mark.parametrize("reshard", [True, False])
def test_second_run_changes_nothing(captured, reshard):
    graphs = captured("two_linears", 2, reshard=reshard)
    run_pass(MergeUnshards(), graphs.captured, graphs.context)
    first, second = run_twice(TagRecompute(), graphs.captured, graphs.context)
    assert first.report.changed and not second.report.changed
    assert first.report.counts == {"recomputed": 4 * reshard, "saved": 4 * (not reshard)}


def _tags(gm):
    return [node.meta.get("recompute") for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("reshard", [True, False])
def test_views_follow_only_a_recomputed_parameter(reshard):
    build, spec = GraphBuilder(), ParameterSpec((4, 2), reshard=reshard)
    shard, x = build.input("primals_1", 2, 2), build.input("primals_2", 3, 2)
    full = unshard(build, shard, "w", spec, 2)
    turned = build(aten.t.default, full)
    half = build(aten._to_copy.default, turned)
    gm = build.finish(build(aten.mm.default, x, half))
    run_pass(MergeUnshards(), gm, context_from_shard_ops(gm))
    run_pass(TagRecompute(), gm, context_from_shard_ops(gm))
    recompute, save = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert _tags(gm) == ([recompute] * 3 + [None] if reshard else [save, None, None, None])


def test_a_value_that_depends_on_an_activation_is_not_tagged():
    build = GraphBuilder()
    shard, x = build.input("primals_1", 2, 2), build.input("primals_2", 4, 2)
    full = unshard(build, shard, "w", ParameterSpec((4, 2)), 2)
    scaled = build(aten.mul.Tensor, full, x)
    gm = build.finish(build(aten.t.default, scaled))
    run_pass(TagRecompute(), gm, context_from_shard_ops(gm), *MergeUnshards.provides)
    assert _tags(gm) == [CheckpointPolicy.MUST_RECOMPUTE, None, None]


def held_input(build: GraphBuilder):
    """A tensor of the shard that this rank reads beside what it gathers."""
    return build.graph.find_nodes(op="placeholder")[4]


def _tagged(*, reshard: bool = True, rescale=None) -> dict[str, CheckpointPolicy | None]:
    """The tags of a weight that is sent as a cast payload and a scale, and is multiplied by an activation."""
    build, spec = GraphBuilder(), ParameterSpec((4, 2), reshard=reshard)
    shard, scale = build.input("primals_1", 2, 2), build.input("primals_2", 2, 1)
    x, own_scale = build.input("primals_3", 3, 2), build.input("primals_4", 4, 1)
    held = build.input("primals_5", 4, 1)
    sent = build(aten.neg.default, shard)
    payload = unshard(build, sent, "w[0]", spec, 2)
    scales = unshard(build, scale, "w[1]", ParameterSpec((4, 1), reshard=reshard), 2)
    if rescale is not None:
        scales = rescale(build, scales, own_scale)
    full = build(aten.mul.Tensor, payload, scales)
    gm = build.finish(build(aten.mm.default, x, build(aten.t.default, full)))
    own = ExtendedInputs(name="w", shape=(4, 2), carrier="", inner=(held.name,))
    context = context_from_shard_ops(gm, extended=[own])
    record = run_pass(TagRecompute(), gm, context, *MergeUnshards.provides)
    assert record.report.counts == {"recomputed": 2 * reshard, "saved": 2 * (not reshard)}
    return {node.name: node.meta.get("recompute") for node in gm.graph.nodes if node.op == "call_function"}


def test_what_is_made_of_the_parts_of_a_parameter_is_recomputed_and_what_is_sent_is_saved():
    again, save = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert list(_tagged().values()) == [save, again, again, again, again, None]


def test_a_cast_in_front_of_the_gather_is_free_to_choose_where_nothing_is_gathered_again():
    save = CheckpointPolicy.MUST_SAVE
    assert list(_tagged(reshard=False).values()) == [None, save, save, None, None, None]


@pytest.mark.parametrize(
    "rescale",
    [
        lambda build, scales, other: build(operator.getitem, build(aten.split.Tensor, scales, 4), 0),
        lambda build, scales, other: build(aten.mul.Tensor, scales, held_input(build)),
    ],
    ids=["item_of_a_split", "with_a_shard"],
)
def test_items_and_shards_do_not_end_what_is_made_of_parts_alone(rescale):
    tags = _tagged(rescale=rescale)
    assert set(list(tags.values())[1:-1]) == {CheckpointPolicy.MUST_RECOMPUTE}


def test_what_a_whole_parameter_is_cast_from_is_not_saved():
    build = GraphBuilder()
    sent = build(aten.neg.default, build.input("primals_1", 2, 2))
    full = unshard(build, sent, "w", ParameterSpec((4, 2)), 2)
    gm = build.finish(build(aten.t.default, full))
    run_pass(TagRecompute(), gm, context_from_shard_ops(gm), *MergeUnshards.provides)
    assert _tags(gm) == [None, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE]


@pytest.mark.parametrize(
    "rescale",
    [
        lambda build, scales, other: build(aten.mul.Tensor, scales, other),
        lambda build, scales, other: build(aten.bernoulli.default, scales),
        lambda build, scales, other: build(aten.mul_.Tensor, scales, scales),
    ],
    ids=["of_another_input", "random", "in_place"],
)
def test_what_is_made_of_parts_and_something_else_is_not_tagged(rescale):
    again, save = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert list(_tagged(rescale=rescale).values()) == [save, again, again, None, None, None, None]


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize(("name", "num_ranks"), [("two_linears", 4), ("tied_embedding", 2)])
def test_parity_of_the_partitioned_halves(captured, name, num_ranks, reshard):
    graphs = captured(name, num_ranks, reshard=reshard)
    inputs, expected = step_inputs(name, num_ranks)
    halves = run_halves(graphs.forward, graphs.backward, graphs.context, inputs)
    assert_same(halves, expected)
    assert_same(halves, run_joint(graphs.joint, graphs.context, inputs), bitwise=True)


def test_every_gather_of_a_real_graph_is_tagged(captured):
    graphs = captured("blocks_2", 2)
    Pipeline(MergeUnshards(), TagRecompute()).run(graphs.captured, graphs.context)
    gathers = graphs.captured.graph.find_nodes(op="call_function", target=UNSHARD)
    kept = {
        UnshardCall(*node.args).name
        for node in gathers
        if node.meta["recompute"] == CheckpointPolicy.MUST_SAVE
    }
    assert kept == {"enter.weight", "enter.bias", "leave.weight", "leave.bias"}
