"""Facts: each checker accepts a good graph and names a violation made by hand."""

import operator
from dataclasses import replace

import pytest
import torch
from support.small_graphs import (
    LOWERING,
    GraphBuilder,
    ParameterSpec,
    aten,
    parameter_graph,
    reduce_grad,
    unshard,
)

from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, WAIT, c10d
from graphshard.ir.params import ParameterBinding
from graphshard.passes import BucketCollectives, MergeUnshards, ScheduleCollectives, TagRecompute
from graphshard.pipeline.context import PassContext, context_from_shard_ops
from graphshard.pipeline.facts import (
    CHECKERS,
    Fact,
    check_bucketed,
    check_gathered,
    check_lowered,
    check_merged,
    check_reduced,
    check_scheduled,
    check_tagged,
    check_typed,
    check_waited,
)
from graphshard.pipeline.pipeline import Pipeline

FULL = PassContext(full_checks=True)


def _lowered(*specs):
    gm, ctx = parameter_graph(specs or (ParameterSpec((4, 2)), ParameterSpec((3,))), 2)
    LOWERING.run(gm, ctx)
    return gm, ctx


def _first(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)[0]


def test_every_fact_has_a_checker():
    assert set(CHECKERS) == set(Fact)


@pytest.mark.parametrize("fact", Fact, ids=lambda fact: fact.name)
@pytest.mark.parametrize("name", ["two_linears", "tied_embedding"])
def test_a_finished_half_holds_every_fact(captured, fact, name):
    graphs = captured(name, 2)
    for half in ("forward", "backward"):
        gm, ctx = getattr(graphs, half), getattr(graphs.context, f"for_{half}")()
        Pipeline(BucketCollectives(), ScheduleCollectives(), given=LOWERING.facts_at_end).run(gm, ctx)
        assert CHECKERS[fact](gm, ctx) == []


def test_typed_finds_a_missing_value():
    gm, _ = _lowered()
    del _first(gm, ALL_GATHER).meta["val"]
    (problem,) = check_typed(gm, PassContext())
    assert problem.startswith("all_gather_into_tensor") and problem.endswith("has no fake value")


def test_a_node_without_a_result_needs_no_value():
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2, dtype=torch.float32)
    node = build(aten.relu.default, x)
    gm = build.finish(node)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(aten._assert_async.msg, (node, "not zero"))
        gm.graph.call_function(torch.ops.prims._sink_tokens.default, ([node],))
    assert check_typed(gm, FULL) == []


def test_sizes_that_depend_on_data_are_not_computed_again():
    """Each call of such an op has symbols of its own; here a value that the op does not give stands for them."""
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2, dtype=torch.float32)
    node = build(aten.relu.default, x)
    node.meta["val"], node.meta["unbacked_bindings"] = torch.empty(3, 2), {"u0": ()}
    assert check_typed(build.finish(node), FULL) == []


@pytest.mark.parametrize(
    "wrong", [torch.empty(3, 2), torch.empty(2, 2, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_typed_finds_a_wrong_value_in_full_mode(wrong):
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2, dtype=torch.float32)
    node = build(aten.relu.default, x)
    gm = build.finish(node)
    assert check_typed(gm, FULL) == []
    node.meta["val"] = wrong
    (problem,) = check_typed(gm, FULL)
    assert problem.startswith("relu") and "but aten.relu.default gives f32[2, 2]" in problem
    assert check_typed(gm, PassContext()) == []


def test_typed_finds_arguments_an_op_rejects():
    """`Graph.lint` accepts an `mm` with one argument."""
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    node = build(aten.mm.default, x, x)
    gm = build.finish(node)
    node.args = (x,)
    gm.graph.lint()
    (problem,) = check_typed(gm, FULL)
    assert "aten.mm.default rejects its arguments" in problem


def test_waited_finds_a_missing_wait():
    build = GraphBuilder()
    x = build.input("primals_1", 2)
    build(ALL_GATHER, x, 2, "g")
    assert check_waited(build.finish(x), FULL) == [
        "all_gather_into_tensor_default (all_gather_into_tensor) has 0 waits, expected 1"
    ]


def test_waited_finds_two_waits():
    build = GraphBuilder()
    started = build(ALL_GATHER, build.input("primals_1", 2), 2, "g")
    (problem,) = check_waited(build.finish(build(WAIT, started), build(WAIT, started)), FULL)
    assert "has 2 waits, expected 1" in problem


@pytest.mark.parametrize("also_waited", [True, False])
def test_waited_finds_a_read_before_the_wait(also_waited):
    build = GraphBuilder()
    started = build(ALL_GATHER, build.input("primals_1", 2), 2, "g")
    early = build(aten.relu.default, started)
    gm = build.finish(early, *([build(WAIT, started)] if also_waited else []))
    (problem,) = check_waited(gm, FULL)
    assert "is read by relu_default before a wait" in problem


def test_waited_lets_a_started_collective_leave_the_graph():
    """Whoever gets the output waits for it."""
    build = GraphBuilder()
    started = build(ALL_GATHER, build.input("primals_1", 2), 2, "g")
    assert check_waited(build.finish(started), FULL) == []


def test_waited_counts_each_item_of_a_coalesced_collective():
    def graph(num_waits):
        build = GraphBuilder()
        inputs = [build.input(f"primals_{i}", 2) for i in range(2)]
        started = build(c10d.all_reduce_coalesced.default, inputs, "sum", "g")
        items = [build(operator.getitem, started, i) for i in range(2)]
        return build.finish(*(build(WAIT, item) for item in items[:num_waits]))

    assert check_waited(graph(2), FULL) == []
    (problem,) = check_waited(graph(1), FULL)
    assert "has 1 waits, expected 2" in problem


def _read_shard(op):
    build = GraphBuilder()
    shard = build.input("primals_0", 2, 2)
    _, ctx = parameter_graph([ParameterSpec((4, 2))], 2)
    return build.finish(build(op, shard)), ctx


def test_gathered_finds_compute_on_a_shard():
    gm, ctx = _read_shard(aten.relu.default)
    assert check_gathered(gm, ctx) == ["relu_default (aten.relu.default) reads a shard of p0 ungathered"]


def test_gathered_finds_compute_beside_the_gather():
    """A shard may be gathered and still be read ungathered somewhere else."""
    gm, ctx = _lowered()
    shard = gm.graph.find_nodes(op="placeholder")[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        stray = gm.graph.call_function(aten.relu.default, (shard,))
    stray.meta["val"] = shard.meta["val"]
    assert check_gathered(gm, ctx)


def test_gathered_ignores_an_unread_or_returned_shard():
    _, ctx = parameter_graph([ParameterSpec((4, 2))], 2)
    build = GraphBuilder()
    shard = build.input("primals_0", 2, 2)
    assert check_gathered(build.finish(shard), ctx) == []


def test_reduced_finds_a_local_gradient():
    build, spec = GraphBuilder(), ParameterSpec((4, 2))
    shard, grad = build.input("primals_1", 2, 2), build.input("tangents_1", 4, 2)
    full = unshard(build, shard, "w", spec, 2)
    local = build(aten.slice.Tensor, grad, 0, 0, 2)
    gm = build.finish(full, local)
    assert check_reduced(gm, context_from_shard_ops(gm)) == [
        "the gradient of w (slice_tensor) does not come from a reduction"
    ]


def test_reduced_finds_a_sum_of_reductions_and_other_values():
    build, spec = GraphBuilder(), ParameterSpec((4, 2))
    shard, grad = build.input("primals_1", 2, 2), build.input("tangents_1", 4, 2)
    reduced = reduce_grad(build, grad, "w", spec, 2)
    gm = build.finish(unshard(build, shard, "w", spec, 2), build(aten.add.Tensor, reduced, shard))
    assert check_reduced(gm, context_from_shard_ops(gm))


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
def test_reduced_finds_a_gradient_that_was_only_moved(collective):
    """A collective that does not reduce is not a reduction."""
    build, spec = GraphBuilder(), ParameterSpec((4, 2))
    shard, grad = build.input("primals_1", 2, 2), build.input("tangents_1", 1, 2)
    full = unshard(build, shard, "w", spec, 2)
    if collective == "all_gather":
        moved = build.gather(grad, 2)
    else:
        moved = build(WAIT, build(c10d.all_to_all_single.default, grad, [1, 1], [1, 0], "g"))
    gm = build.finish(full, moved)
    assert check_reduced(gm, context_from_shard_ops(gm))


def test_reduced_accepts_no_gradient_and_an_all_reduce_on_top():
    gm, ctx = _lowered(ParameterSpec((4, 2)))
    assert check_reduced(gm, ctx) == []
    output = gm.graph.output_node()
    output.args = ([*output.args[0][:-1], None],)
    assert check_reduced(gm, ctx) == []
    assert check_reduced(gm, ctx.for_forward()) == []


def test_merged_finds_a_second_gather():
    build, spec = GraphBuilder(), ParameterSpec((4, 2))
    shard = build.input("primals_1", 2, 2)
    gm = build.finish(unshard(build, shard, "w", spec, 2), unshard(build, shard, "w", spec, 2))
    assert check_merged(gm, FULL) == ["w is unsharded by unshard_default and again by unshard_default_1"]
    MergeUnshards().run(gm, FULL)
    assert check_merged(gm, FULL) == []


def test_tagged_finds_an_untagged_gather():
    gm, ctx = parameter_graph([ParameterSpec((4, 2))], 2)
    assert check_tagged(gm, ctx) == ["unshard_default (p0) has no recompute tag"]
    TagRecompute().run(gm, ctx)
    assert check_tagged(gm, ctx) == []


def test_lowered_finds_shard_ops():
    gm, ctx = parameter_graph([ParameterSpec((4, 2))], 2)
    assert check_lowered(gm, ctx) == [
        "unshard_default is still graphshard.unshard.default",
        "reduce_grad_default is still graphshard.reduce_grad.default",
    ]
    LOWERING.run(gm, ctx)
    assert check_lowered(gm, ctx) == []


def test_bucketed_finds_two_collectives_of_a_unit():
    gm, ctx = _lowered()
    problems = check_bucketed(gm, ctx)
    assert len(problems) == 2  # the gathers and the reductions
    assert problems[0].endswith("are both gather root shard_group")


def test_bucketed_accepts_what_cannot_be_merged():
    gm, ctx = _lowered(ParameterSpec((4, 2)), ParameterSpec((3,), unit="other"))
    assert check_bucketed(gm, ctx) == []
    gm, ctx = _lowered(ParameterSpec((4, 2)), ParameterSpec((3,), dtype=torch.float32))
    (problem,) = check_bucketed(gm, ctx)
    assert " are both gather " in problem  # as bytes; reductions are of one dtype


def _wait_then(*, reads_first):
    build = GraphBuilder()
    shard, x = build.input("primals_1", 2, 4), build.input("primals_2", 4, 4)
    started = build(ALL_GATHER, shard, 2, "g")
    if reads_first:
        other = build(aten.relu.default, x)
        turned = build(aten.t.default, build(WAIT, started))
    else:
        turned = build(aten.t.default, build(WAIT, started))
        other = build(aten.relu.default, x)
    return build.finish(build(aten.mm.default, other, turned))


def _of_shards(group):
    """A context in which primals_1 is a shard that this group gathers."""
    binding = ParameterBinding(
        placeholder="primals_1", position=0, gradient=-1, name="w", unit="root", shape=(4, 4), dim=0, axis="shard",
        group_size=2, reshard=2, group_names=(group,),
    )  # fmt: skip
    return replace(FULL, parameters=(binding,))


def test_scheduled_finds_a_wait_that_is_too_early():
    assert check_scheduled(_wait_then(reads_first=True), _of_shards("g")) == []
    assert check_scheduled(_wait_then(reads_first=False), _of_shards("g")) == [
        "wait_tensor_default waits before relu_default, which does not need it"
    ]


def test_scheduled_knows_that_another_gather_needs_what_was_gathered():
    """A piece of tensor parallelism that is gathered from shards, and then whole."""
    build = GraphBuilder()
    shard, x = build.input("primals_1", 2, 4), build.input("primals_2", 8, 8)
    piece = build(WAIT, build(ALL_GATHER, shard, 2, "g"))
    whole = build(WAIT, build(ALL_GATHER, piece, 2, "other"))
    other = build(aten.relu.default, x)
    gm = build.finish(build(aten.mm.default, other, whole))
    assert check_scheduled(gm, _of_shards("g")) == []


def test_scheduled_ignores_other_collectives():
    """A gather of tensor parallelism is none of shards, even if it gathers a parameter's piece."""
    assert check_scheduled(_wait_then(reads_first=False), FULL) == []
    assert check_scheduled(_wait_then(reads_first=False), _of_shards("other")) == []
    build = GraphBuilder()
    x = build.input("primals_1", 4)
    total = build(WAIT, build(ALL_REDUCE, x, "sum", "g"))
    other = build(aten.relu.default, x)
    assert check_scheduled(build.finish(build(aten.add.Tensor, total, other)), FULL) == []
