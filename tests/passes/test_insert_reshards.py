"""insert_reshards: whole parameters become pieces behind reshards, their gradients are cut."""

import pytest
import torch
from support.small_graphs import (
    TENSOR_GROUP,
    GraphBuilder,
    aten,
    num_targets,
    run_pass,
    run_twice,
    tensor_axis,
    text_of,
)
from torch import Tensor

from graphshard.errors import ShardingError
from graphshard.ir import REPLICATE, RESHARD, PlacedParameter, ReshardCall, output_values
from graphshard.passes import InsertReshards, PropagateSharding
from graphshard.pipeline import PassContext
from graphshard.testing import run_on_all_ranks

NUM_RANKS = 2


def _plain_graph():
    """y = x w^T with the gradients of w and x: w is a parameter, x is not."""
    build = GraphBuilder()
    weight, batch = build.input("primals_1", 6, 4), build.input("primals_2", 3, 4)
    tangent = build.input("tangents_1", 3, 6)
    product = build(aten.mm.default, batch, build(aten.permute.default, weight, [1, 0]))
    grad = build(aten.mm.default, build(aten.permute.default, tangent, [1, 0]), batch)
    return build.finish(product, grad, build(aten.mm.default, tangent, weight))


def _context(placeholder="primals_1", dim=0, shape=(6, 4), num_ranks=NUM_RANKS) -> PassContext:
    call = ReshardCall(None, f"Shard({dim})", REPLICATE, list(shape), "tp", num_ranks, TENSOR_GROUP, 0)
    placed = (PlacedParameter(placeholder=placeholder, name="w", call=call),)
    return PassContext(mesh=tensor_axis(num_ranks), placed=placed)


def test_golden(golden):
    gm = _plain_graph()
    golden(text_of(gm, _context()), "insert_reshards.before")
    record = run_pass(InsertReshards(), gm, _context())
    golden(text_of(gm, _context()), "insert_reshards.after")
    assert record.report.counts == {"parameters": 1, "gradients": 1}
    _, grad, of_batch = output_values(gm.graph)
    assert grad.target is RESHARD and of_batch.target is aten.mm.default


@pytest.mark.parametrize("dim", [0, 1])
def test_propagated_it_computes_what_one_rank_computes(dim):
    gm = _plain_graph()
    weight, batch, tangent = (torch.randn(size, dtype=torch.float64) for size in ((6, 4), (3, 4), (3, 6)))
    product, grad, of_batch = gm(weight, batch, tangent)
    run_pass(InsertReshards(), gm, _context(dim=dim))
    run_pass(PropagateSharding(), gm, _context(dim=dim))
    pieces: list[list[Tensor]] = [[piece.contiguous(), batch, tangent] for piece in weight.chunk(NUM_RANKS, dim)]
    found = run_on_all_ranks([gm] * NUM_RANKS, pieces, tensor_axis(NUM_RANKS))
    expected = [(product, piece, of_batch) for piece in grad.chunk(NUM_RANKS, dim)]
    torch.testing.assert_close([tuple(each) for each in found], expected)


def test_nothing_to_insert():
    record = run_pass(InsertReshards(), _plain_graph(), PassContext())
    assert not record.report.changed


def test_a_second_run_changes_nothing():
    gm = _plain_graph()
    first, second = run_twice(InsertReshards(), gm, _context())
    assert first.report.changed and not second.report.changed and num_targets(gm, RESHARD) == 2


def test_a_parameter_that_only_the_output_reads():
    build = GraphBuilder()
    weight = build.input("primals_1", 6, 4)
    gm = build.finish(weight)
    run_pass(InsertReshards(), gm, _context())
    assert weight.meta["val"].shape == (3, 4) and num_targets(gm, RESHARD) == 0


def test_refuses_inputs_that_do_not_fit():
    gm = _plain_graph()
    with pytest.raises(ShardingError, match=r"insert_reshards: w: input primals_1 has shape \[6, 4\], not \[5, 4\]"):
        run_pass(InsertReshards(), gm, _context(shape=(5, 4)))
    with pytest.raises(ShardingError, match="w: the graph has no input primals_9"):
        run_pass(InsertReshards(), gm, _context(placeholder="primals_9"))
    assert num_targets(gm, RESHARD) == 0
