"""Collectives split into parts: the same values, joined where they are read."""

import pytest
import torch
from support.small_graphs import GROUP, GraphBuilder, aten, num_targets, one_axis
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.inspection.memory_categories import categorized_memory
from graphshard.ir.bucket_ops import JOIN_PARTS
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT, is_collective
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import check_typed, check_waited
from graphshard.planner.split_collectives import num_rows, split_collective, split_graph
from graphshard.report.data import CATEGORIES
from graphshard.testing import run_on_all_ranks

CAST = torch.ops.prims.convert_element_type.default


def _gathered(build, x):
    return build(aten.mm.default, build.gather(x, 2), build.input("primals_2", 3, 4))


def _cast_and_viewed(build, x):
    """A cast in front of it; a view and a cast between its wait and its reader, another op before them."""
    whole = build.gather(build(CAST, x, torch.float32), 2)
    other = build(aten.relu.default, x)
    wide = build(CAST, build(aten.view.default, whole, [2, 5, 3]), torch.float64)
    other = build(aten.mul.Tensor, other, 2.0)
    return build(aten.add.Tensor, build(aten.sum.default, other), wide)


def _returned(build, x):
    return build.gather(x, 2)


def _reduced(build, x):
    return build(aten.mul.Tensor, build.reduction(build(aten.cat.default, [x, build(aten.relu.default, x)]), 2), 0.5)


def _summed(build, x):
    return build(aten.relu.default, build(WAIT, build(ALL_REDUCE, build(aten.mul.Tensor, x, 3.0), "sum", GROUP)))


def _gathered_again(build, x):
    """Another collective reads the result."""
    return build(WAIT, build(ALL_REDUCE, build(aten.view.default, build.gather(x, 2), [6, 5]), "sum", GROUP))


CASES = (_gathered, _cast_and_viewed, _returned, _reduced, _summed, _gathered_again)


def _graph(case):
    build = GraphBuilder()
    return build.finish(case(build, build.input("primals_1", 5, 3)))


def _values(gm):
    generator = torch.Generator().manual_seed(3)
    inputs = gm.graph.find_nodes(op="placeholder")
    return [
        [torch.randn(node.meta["val"].shape, generator=generator, dtype=torch.float64) for node in inputs] for _ in "ab"
    ]


@pytest.mark.parametrize("num_parts", [2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_parts_give_what_the_whole_gives(case, num_parts):
    gm = _graph(case)
    whole = next(filter(is_collective, gm.graph.nodes))
    parts, twin = split_graph(gm, {whole: num_parts})
    parts.recompile()
    assert num_targets(parts, whole.target) == num_targets(gm, whole.target) - 1 + num_parts
    assert num_targets(parts, JOIN_PARTS) == 1 and num_targets(gm, JOIN_PARTS) == 0
    assert whole not in twin and set(twin.values()) <= set(parts.graph.nodes)
    context = PassContext(mesh=one_axis(2), full_checks=True)
    assert not check_typed(parts, context) and not check_waited(parts, context)
    inputs = _values(gm)
    for mine, theirs in zip(
        run_on_all_ranks(parts, inputs, one_axis(2)), run_on_all_ranks(gm, inputs, one_axis(2)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_parts_start_where_the_whole_did_and_are_joined_where_they_are_read():
    gm = _graph(_cast_and_viewed)
    (whole,) = filter(is_collective, gm.graph.nodes)
    started = split_collective(gm.graph, whole, 2)
    assert [list(part.meta["val"].shape) for part in started] == [[4, 3], [6, 3]]
    names = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert names == [
        aten.slice.Tensor, CAST, ALL_GATHER, aten.slice.Tensor, CAST, ALL_GATHER, WAIT, WAIT, aten.relu.default,
        aten.mul.Tensor, aten.sum.default, JOIN_PARTS, aten.view.default, aten.view.default, CAST, aten.add.Tensor,
    ]  # fmt: skip


def test_parts_keep_what_says_whether_they_are_computed_again():
    gm = _graph(_gathered)
    (whole,) = filter(is_collective, gm.graph.nodes)
    whole.meta.update(recompute="must", ac_graph_id=3)
    started = split_collective(gm.graph, whole, 2)
    assert all(part.meta["recompute"] == "must" and part.meta["ac_graph_id"] == 3 for part in started)


def _live(gm):
    """Bytes of each category by name of the node, zeros left out."""
    memory = categorized_memory(gm, PassContext(mesh=one_axis(2)), device_type=None)
    return {
        node.name: {name: size for name, size in zip(CATEGORIES, row, strict=True) if size}
        for node, row in zip(memory.nodes, memory.live, strict=True)
    }


def test_parts_of_a_gather_are_buckets_until_they_are_the_parameter():
    gm = _graph(_gathered)
    (whole,) = filter(is_collective, gm.graph.nodes)
    live = _live(split_graph(gm, {whole: 2})[0])
    kept, parameter = {"parameters": 5 * 3 * 8, "inputs": 3 * 4 * 8}, 10 * 3 * 8
    assert live["join_parts_default"] == kept | {"gathered": parameter, "buckets": parameter}
    last = kept | {"gathered": parameter, "temporaries": 10 * 4 * 8}
    assert live["mm_default"] == _live(gm)["mm_default"] == last


def test_parts_of_a_reduction_are_buckets_until_they_are_the_gradient():
    build = GraphBuilder()
    x, y = build.input("primals_1", 10, 3), build.input("primals_2", 10, 3)
    gm = build.finish(build.reduction(build(aten.mul.Tensor, x, y), 2))
    (whole,) = filter(is_collective, gm.graph.nodes)
    live = _live(split_graph(gm, {whole: 2})[0])
    inputs, gradient = 2 * 10 * 3 * 8, 5 * 3 * 8
    assert live["mul_tensor"] == {"inputs": inputs, "unreduced": 2 * gradient}
    assert live["join_parts_default"] == {"inputs": inputs, "gradients": gradient, "buckets": gradient}
    assert live["output"] == _live(gm)["output"] == {"inputs": inputs, "gradients": gradient}


def test_what_can_be_split():
    """One of a kind with rows of known number, which one wait alone reads."""
    build = GraphBuilder()
    x, row, scalar = build.input("primals_1", 6, 2), build.input("primals_2", 1, 2), build.input("primals_3")
    none = build.input("primals_4", 0, 2)
    gather, reduction = build(ALL_GATHER, x, 2, GROUP), build(REDUCE_SCATTER, x, "sum", 2, GROUP)
    total, of_scalar = build(ALL_REDUCE, x, "sum", GROUP), build(ALL_REDUCE, scalar, "sum", GROUP)
    of_row, of_none = build(ALL_GATHER, row, 2, GROUP), build(ALL_GATHER, none, 2, GROUP)
    exchange = build(ALL_TO_ALL, x, [3, 3], [3, 3], GROUP)
    twice, unread = build(ALL_GATHER, x, 2, GROUP), build(ALL_GATHER, x, 2, GROUP)
    for node in (gather, reduction, total, of_scalar, of_row, of_none, exchange, twice, twice):
        build(WAIT, node)
    rows = {gather: 6, reduction: 3, total: 6, of_scalar: 1, of_row: 1, of_none: 1, exchange: 1, twice: 1, unread: 1}
    assert {node: num_rows(node) for node in rows} == rows
    symbolic = build.input("primals_5", 4, 2)
    with symbolic.meta["val"].fake_mode as mode:
        mode.shape_env = ShapeEnv()
        size = mode.shape_env.create_unbacked_symint()
        symbolic.meta["val"] = torch.empty(size, 2)
    started = build(ALL_GATHER, symbolic, 2, GROUP)
    build(WAIT, started)
    assert num_rows(started) == 1
