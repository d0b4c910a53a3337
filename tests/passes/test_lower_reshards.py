"""lower_reshards: reshards become collectives and local slices."""

import itertools

import pytest
import torch
from support.small_graphs import GraphBuilder, aten, reshard, run_pass, run_twice, tensor_axis, text_of
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.errors import UnsupportedShardingError
from graphshard.ir import RESHARD, copy_graph, local_shape
from graphshard.passes import LowerReshards
from graphshard.pipeline import PassContext
from graphshard.testing import run_on_all_ranks

CONTEXT = PassContext(mesh=tensor_axis(2))
SHAPE = (4, 5)
PLACEMENTS = ("Replicate", "Shard(0)", "Shard(1)", "Partial(sum)", "Partial(max)")


def _pair(src, dst, num_ranks=2, rank=0, shape=SHAPE):
    build = GraphBuilder()
    value = build.input("primals_1", *local_shape(shape, src, num_ranks, rank))
    return build.finish(reshard(build, build(aten.sin.default, value), src, dst, shape, num_ranks, rank))


def _all_kinds():
    build = GraphBuilder()
    rows, whole = build.input("primals_1", 2, 5), build.input("primals_2", 4, 5)
    moves = [("Shard(0)", "Replicate"), ("Shard(0)", "Shard(1)"), ("Replicate", "Shard(1)")]
    moves += [("Partial(sum)", "Replicate"), ("Partial(sum)", "Shard(1)"), ("Replicate", "Partial(sum)")]
    return build.finish(
        *(reshard(build, rows if src == "Shard(0)" else whole, src, dst, SHAPE) for src, dst in moves)
    )


def test_golden(golden):
    gm = _all_kinds()
    golden(text_of(gm, CONTEXT), "lower_reshards.before")
    record = run_pass(LowerReshards(), gm, CONTEXT)
    golden(text_of(gm, CONTEXT), "lower_reshards.after")
    assert record.report.counts == {"collectives": 4, "local": 2}


def test_nothing_to_lower():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2, 2)))
    assert not run_pass(LowerReshards(), gm, CONTEXT).report.changed


def test_second_run_changes_nothing():
    first, second = run_twice(LowerReshards(), _all_kinds(), CONTEXT)
    assert first.report.changed and not second.report.changed


def test_refuses_terms_of_another_reduction():
    gm = _pair("Partial(sum)", "Partial(max)")
    with pytest.raises(UnsupportedShardingError, match="reduce to Replicate first"):
        run_pass(LowerReshards(), gm, CONTEXT)


def test_what_is_recomputed_stays_so():
    gm = _pair("Partial(sum)", "Replicate")
    gm.graph.find_nodes(op="call_function", target=RESHARD)[0].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    run_pass(LowerReshards(), gm, CONTEXT)
    assert text_of(gm, CONTEXT).count("!recompute") == 2  # the all-reduce and its wait


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_lowered_gives_what_the_op_gives(num_ranks):
    """Even and uneven dims, every pair that exists, all ranks in one process, bit by bit."""
    mesh = tensor_axis(num_ranks)
    context = PassContext(mesh=mesh)
    for src, dst in itertools.product(PLACEMENTS, PLACEMENTS):
        if dst.startswith("Partial") and src != dst and not (src == "Replicate" and dst == "Partial(sum)"):
            continue
        graphs = [_pair(src, dst, num_ranks, rank) for rank in range(num_ranks)]
        lowered = [copy_graph(gm) for gm in graphs]
        for gm in lowered:
            run_pass(LowerReshards(), gm, context)
            assert not gm.graph.find_nodes(op="call_function", target=RESHARD)
        shapes = [local_shape(SHAPE, src, num_ranks, rank) for rank in range(num_ranks)]
        values = [[torch.randn(shape, dtype=torch.float64)] for shape in shapes]
        expected, found = (run_on_all_ranks(each, values, mesh) for each in (graphs, lowered))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
