"""merge_reshards: one reshard in place of several."""

import pytest
import torch
from support.small_graphs import GraphBuilder, aten, reshard, run_pass, run_twice, tensor_axis, text_of
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ir import RESHARD, ReshardCall, copy_graph, local_shape
from graphshard.passes import MergeReshards
from graphshard.pipeline import PassContext
from graphshard.testing import run_on_all_ranks

CONTEXT = PassContext(mesh=tensor_axis(2))
SHAPE = (4, 6)

#: Placements of an input, and those that it is moved to one after the other; a tuple is a family of one value.
CHAINS = [
    ("Shard(0)", "Replicate", "Shard(1)"),
    ("Shard(0)", "Replicate", "Shard(0)"),
    ("Partial(sum)", "Replicate", "Shard(0)"),
    ("Partial(sum)", "Shard(0)", "Replicate"),
    ("Replicate", "Shard(1)", "Replicate"),
    ("Replicate", "Partial(sum)", "Shard(0)"),
]
FAMILIES = [
    ("Partial(sum)", "Shard(0)", "Replicate"),
    ("Partial(sum)", "Shard(0)", "Shard(1)"),
    ("Shard(0)", "Replicate", "Shard(1)"),
    ("Partial(max)", "Shard(0)", "Replicate"),
]


def _move(build, value, src, dst, num_ranks=2, rank=0, placed=True):
    return reshard(build, value, src, dst, SHAPE, num_ranks, rank, placed=placed)


def _input(build, place, src, num_ranks=2, rank=0):
    value = build.input(f"primals_{place}", *local_shape(SHAPE, src, num_ranks, rank))
    return build(aten.sin.default, value)


def _chains(num_ranks=2, rank=0):
    build, outputs = GraphBuilder(), []
    for place, (src, *stops) in enumerate(CHAINS):
        value = _input(build, place, src, num_ranks, rank)
        for before, after in zip([src, *stops], stops, strict=False):
            value = _move(build, value, before, after, num_ranks, rank)
        outputs.append(build(aten.relu.default, value))
    return build.finish(*outputs)


def _families(num_ranks=2, rank=0):
    build, outputs = GraphBuilder(), []
    for place, (src, *readers) in enumerate(FAMILIES):
        value = _input(build, place, src, num_ranks, rank)
        for dst in [*readers, readers[0]]:
            outputs.append(build(aten.relu.default, _move(build, value, src, dst, num_ranks, rank)))
    return build.finish(*outputs)


GRAPHS = {"chains": _chains, "families": _families}


def _pairs(gm):
    calls = [ReshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
    return [(call.src, call.dst) for call in calls]


@pytest.mark.parametrize("name", GRAPHS)
def test_golden(golden, name):
    gm = GRAPHS[name]()
    golden(text_of(gm, CONTEXT), f"merge_reshards.{name}.before")
    record = run_pass(MergeReshards(), gm, CONTEXT)
    golden(text_of(gm, CONTEXT), f"merge_reshards.{name}.after")
    counts = {
        "chains": {"joined": 6, "shared": 0, "derived": 0},
        "families": {"joined": 0, "shared": 4, "derived": 4},
    }
    assert record.report.counts == counts[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_second_run_changes_nothing(name):
    first, second = run_twice(MergeReshards(), GRAPHS[name](), CONTEXT)
    assert first.report.changed and not second.report.changed


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_computes_what_it_computed(name, num_ranks):
    """Sizes that the ranks divide, and others."""
    mesh = tensor_axis(num_ranks)
    before = [GRAPHS[name](num_ranks, rank) for rank in range(num_ranks)]
    after = [copy_graph(gm) for gm in before]
    for gm in after:
        run_pass(MergeReshards(), gm, PassContext(mesh=mesh, full_checks=True))
    generator = torch.Generator().manual_seed(0)
    alike = torch.rand(SHAPE, generator=generator, dtype=torch.float64)
    rows = []
    for gm in before:
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        sources = [src for src, *_ in (CHAINS if name == "chains" else FAMILIES)]
        rows.append(
            [
                alike if src == "Replicate" else torch.rand(value.shape, generator=generator, dtype=torch.float64)
                for value, src in zip(values, sources, strict=True)
            ]
        )
    expected, found = (run_on_all_ranks(graphs, rows, mesh) for graphs in (before, after))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_keeps_a_piece_of_what_is_read_whole():
    """A slice sends nothing; the exchange that could replace it would."""
    build = GraphBuilder()
    whole = _move(build, _input(build, 1, "Shard(0)"), "Shard(0)", "Replicate")
    gm = build.finish(build(aten.relu.default, whole), _move(build, whole, "Replicate", "Shard(1)"))
    assert not run_pass(MergeReshards(), gm, CONTEXT).report.changed


def test_copies_a_value_that_lies_otherwise():
    """What reads the result of a reshard may rely on its strides."""
    build = GraphBuilder()
    turned = build(aten.t.default, build.input("primals_1", 6, 2))
    whole = _move(build, turned, "Shard(0)", "Replicate")
    gm = build.finish(build(aten.view.default, _move(build, whole, "Replicate", "Shard(0)"), [12]))
    run_pass(MergeReshards(), gm, PassContext(mesh=tensor_axis(2), full_checks=True))
    assert not _pairs(gm)
    assert "clone(%t_0, memory_format=torch.contiguous_format)" in text_of(gm, CONTEXT)


def test_the_forward_waits_for_nothing_of_the_backward():
    build = GraphBuilder()
    value = _input(build, 1, "Partial(sum)")
    piece = _move(build, value, "Partial(sum)", "Shard(0)")
    whole = _move(build, value, "Partial(sum)", "Replicate")
    piece.meta["partitioner_tag"], whole.meta["partitioner_tag"] = "is_forward", "is_backward"
    gm = build.finish(piece, whole)
    assert not run_pass(MergeReshards(), gm, CONTEXT).report.changed


def test_leaves_alone_what_no_single_reshard_does():
    """Maxima that become terms of a sum; equal reshards over two axes; exchanges, of which none is cheaper."""
    build = GraphBuilder()
    whole = _move(build, _input(build, 1, "Partial(max)"), "Partial(max)", "Replicate")
    outputs = [_move(build, whole, "Replicate", "Partial(sum)")]
    value = _input(build, 2, "Shard(0)")
    call = ReshardCall(value, "Shard(0)", "Shard(1)", SHAPE, "cp", 2, "other", 0, True)
    outputs += [_move(build, value, "Shard(0)", "Shard(1)"), build(RESHARD, *call)]
    cube = build.input("primals_3", 2, 4, 4)
    outputs += [reshard(build, cube, "Shard(0)", f"Shard({dim})", (4, 4, 4), placed=True) for dim in (1, 2)]
    gm = build.finish(*outputs)
    assert not run_pass(MergeReshards(), gm, CONTEXT).report.changed


def test_new_nodes_are_recomputed_as_those_they_replace():
    gm = _families()
    for node in gm.graph.find_nodes(op="call_function", target=RESHARD):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    run_pass(MergeReshards(), gm, CONTEXT)
    nodes = gm.graph.find_nodes(op="call_function", target=RESHARD)
    assert {node.meta.get("recompute") for node in nodes} == {CheckpointPolicy.MUST_RECOMPUTE}


def test_leaves_reshards_of_the_program_and_of_other_axes_alone():
    build = GraphBuilder()
    value = _input(build, 1, "Shard(0)")
    whole = _move(build, value, "Shard(0)", "Replicate", placed=False)
    declared = _move(build, whole, "Replicate", "Shard(1)", placed=False)
    call = ReshardCall(
        _move(build, value, "Shard(0)", "Replicate"), "Replicate", "Shard(0)", SHAPE, "cp", 2, "other", 0
    )
    gm = build.finish(declared, build(RESHARD, *call._replace(placed=True)))
    assert not run_pass(MergeReshards(), gm, CONTEXT).report.changed
