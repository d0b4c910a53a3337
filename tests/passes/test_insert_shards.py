"""insert_shards: full parameters become shards with a gather, their gradients get a reduction."""

import pytest
import torch
from support.small_graphs import GraphBuilder, ParameterSpec, aten, num_targets, run_pass, run_twice, text_of

from graphshard.errors import ShardingError
from graphshard.ir.params import PlainParameter
from graphshard.ir.rewrite import output_values
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.passes import InsertShards
from graphshard.pipeline.context import PassContext, context_from_shard_ops

NUM_RANKS = 2


def _plain_graph(shape=(5, 4)):
    """y = x w^T with the gradients of w and x: w is a parameter, x is not."""
    build = GraphBuilder()
    weight = build.input("primals_1", *shape)
    batch = build.input("primals_2", 3, 4)
    tangent = build.input("tangents_1", 3, 5)
    turned = build(aten.permute.default, weight, [1, 0])
    product = build(aten.mm.default, batch, turned)
    by_row = build(aten.permute.default, tangent, [1, 0])
    grad = build(aten.mm.default, by_row, batch)
    back = build(aten.mm.default, tangent, build(aten.permute.default, turned, [1, 0]))
    return build.finish(product, grad, back)


def _context(*names, shape=(5, 4), dtype=torch.float64):
    spec = ParameterSpec(shape)
    plain = [
        PlainParameter(placeholder=name, call=spec.call(None, None, "w", NUM_RANKS), dtype=dtype)
        for name in names
    ]
    return PassContext(plain=tuple(plain))


def test_golden(golden):
    gm = _plain_graph()
    golden(text_of(gm, PassContext()), "insert_shards.before")
    run_pass(InsertShards(), gm, _context("primals_1"))
    golden(text_of(gm, context_from_shard_ops(gm)), "insert_shards.after")


def test_gradients_stay_beside_their_inputs():
    gm = _plain_graph()
    record = run_pass(InsertShards(), gm, _context("primals_1"))
    assert record.report.counts == {"parameters": 1, "gradients": 1}
    product, reduced, of_handle, of_batch = output_values(gm.graph)
    assert reduced.target is REDUCE_GRAD and reduced.meta["val"].shape == (3, 4)
    assert of_handle is None and product.target is of_batch.target is aten.mm.default
    assert context_from_shard_ops(gm).first_gradient == 1


@pytest.mark.parametrize("sequence", [None, True])
def test_reductions_stand_behind_the_function_that_made_the_gradient(sequence):
    """Autograd adds up what a function gave before it calls the next one; where it is not known, nothing is assumed."""
    build = GraphBuilder()
    weight, batch = build.input("primals_1", 5, 4), build.input("primals_2", 3, 4)
    tangent = build.input("tangents_1", 3, 5)
    residual = build(aten.mm.default, tangent, build.input("tangents_2", 5, 4))
    turned = build(aten.permute.default, tangent, [1, 0])
    back = build(aten.mm.default, tangent, weight)
    grad = build(aten.mm.default, turned, batch)
    other = build(aten.mm.default, tangent, weight) if sequence else grad
    total = build(aten.add.Tensor, residual, back)
    last = build(aten.mm.default, total, build(aten.permute.default, weight, [1, 0]))
    for node, number in ((grad, 7), (other, 7), (total, 9), (last, 5)):
        node.meta["seq_nr"] = sequence and number
    gm = build.finish(residual, other, grad, last)
    run_pass(InsertShards(), gm, _context("primals_1"))
    (reduced,) = gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    assert reduced.prev.name == (grad.name if sequence is None else total.name)


def test_shards_keep_their_own_dtype():
    gm = _plain_graph()
    run_pass(InsertShards(), gm, _context("primals_1", dtype=torch.float32))
    shard, *_ = gm.graph.find_nodes(op="placeholder")
    assert shard.meta["val"].dtype == torch.float32 and shard.meta["val"].shape == (3, 4)


def test_nothing_to_insert():
    gm = _plain_graph()
    record = run_pass(InsertShards(), gm, PassContext())
    assert not record.report.changed and num_targets(gm, UNSHARD) == 0


def test_second_run_changes_nothing():
    first, second = run_twice(InsertShards(), _plain_graph(), _context("primals_1"))
    assert first.report.changed and not second.report.changed
    assert first.text == second.text


def test_misfits_are_listed_and_nothing_changes():
    gm = _plain_graph(shape=(5, 4))
    before = text_of(gm, PassContext())
    with pytest.raises(
        ShardingError, match=r"w: the graph has no input weight; w: input primals_1 has shape \[5, 4\]"
    ):
        InsertShards().run(gm, _context("weight", "primals_1", shape=(4, 4)))
    assert text_of(gm, PassContext()) == before
