"""What a sharded model communicates and saves: the counts of FSDP, read from its graphs."""

import math

import pytest
import torch
from support.small_graphs import num_targets, run_pass
from support.small_models import MODELS, example_batch, shard_units
from torch import fx

from graphshard.errors import CaptureError
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER, is_collective
from graphshard.ir.graph_text import collective_sequence
from graphshard.ir.rewrite import output_values
from graphshard.ir.shard_ops import UNSHARD
from graphshard.passes import BucketCollectives, LowerShards
from graphshard.pipeline.facts import Fact
from graphshard.testing import capture_graphs

HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)
BLOCKS = {"blocks_2": 2, "blocks_3": 3}


@pytest.mark.parametrize(
    ("name", "reshard"), [("blocks_2", True), ("blocks_2", False), ("blocks_2", None), ("blocks_3", None)]
)
def test_collectives_per_step(captured, name, reshard):
    """One gather a unit forward, one reduction a unit backward; reshard says how many gathers backward."""
    graphs, num_blocks = captured(name, 2, reshard=reshard), BLOCKS[name]
    run_pass(BucketCollectives(), graphs.forward, graphs.context.for_forward(), *HELD)
    run_pass(BucketCollectives(), graphs.backward, graphs.context.for_backward(), *HELD)
    assert num_targets(graphs.forward, ALL_GATHER) == num_blocks + 1
    assert num_targets(graphs.forward, REDUCE_SCATTER) == 0
    assert num_targets(graphs.backward, REDUCE_SCATTER) == num_blocks + 1
    expected = {True: num_blocks + 1, False: 0, None: num_blocks}[reshard]
    assert num_targets(graphs.backward, ALL_GATHER) == expected


def _saved(graphs) -> list[fx.Node]:
    placeholders = graphs.backward.graph.find_nodes(op="placeholder")
    num_saved = sum(not node.name.startswith("tangents_") for node in placeholders)
    return output_values(graphs.forward.graph)[-num_saved:]


@pytest.mark.parametrize("name", ["blocks_2", "two_linears", "called_thrice", "tied_embedding"])
def test_no_full_parameter_is_saved_when_resharding(captured, name):
    graphs = captured(name, 2, reshard=True)
    full = {math.prod(binding.shape) for binding in graphs.context.parameters if len(binding.shape) > 1}
    activations = {node.meta["val"].numel() for node in _saved(graphs)}
    assert not full & activations


def test_full_parameters_are_saved_when_not_resharding(captured):
    graphs = captured("two_linears", 2, reshard=False)
    saved = {tuple(node.meta["val"].shape) for node in _saved(graphs)}
    assert (3, 5) in saved or (5, 3) in saved


def test_the_root_alone_is_saved_by_default(captured):
    graphs = captured("blocks_2", 2)
    parameters = [binding for binding in graphs.context.parameters if len(binding.shape) > 1]
    # A transpose of a parameter would hold it just as well.
    full = {tuple(sorted(binding.shape)): binding.unit for binding in parameters}
    kept = {full.get(tuple(sorted(node.meta["val"].shape))) for node in _saved(graphs)}
    assert "root" in kept and not {"blocks.0", "blocks.1"} & kept


@pytest.mark.parametrize(("name", "num_ranks"), [("two_linears", 4), ("tied_embedding", 4)])
def test_every_rank_issues_the_same_collectives(captured, name, num_ranks):
    """5 rows over 4 ranks: two, two, one and none."""
    sequences = []
    for rank in range(num_ranks):
        graphs = captured(name, num_ranks, rank)
        run_pass(BucketCollectives(), graphs.forward, graphs.context.for_forward(), *HELD)
        run_pass(BucketCollectives(), graphs.backward, graphs.context.for_backward(), *HELD)
        mesh = graphs.context.mesh
        sequences.append([collective_sequence(gm, mesh) for gm in (graphs.forward, graphs.backward)])
    assert all(half for half in sequences[0])
    assert sequences == [sequences[0]] * num_ranks


def test_one_rank_communicates_nothing(fake_group):
    mesh = fake_group(1)
    model = shard_units(MODELS["two_linears"](), mesh)
    graphs = capture_graphs(model, example_batch("two_linears"))
    for gm in (graphs.captured, graphs.joint, graphs.forward, graphs.backward):
        assert not any(is_collective(node) for node in gm.graph.nodes)
    assert graphs.context.parameters == ()


def test_inference_gathers_every_unit_once(captured):
    graphs = captured("blocks_2", 2, grad=False)
    assert graphs.forward is None and graphs.backward is None
    assert num_targets(graphs.joint, UNSHARD) == len(graphs.context.parameters)  # still at level 1
    run_pass(LowerShards(), graphs.joint, graphs.context.for_forward())
    run_pass(BucketCollectives(), graphs.joint, graphs.context.for_forward(), *HELD)
    assert num_targets(graphs.joint, ALL_GATHER) == 3
    assert num_targets(graphs.joint, REDUCE_SCATTER) == 0


def test_a_frozen_unit_is_gathered_and_not_reduced(captured):
    graphs = captured("frozen_first", 2)
    run_pass(BucketCollectives(), graphs.forward, graphs.context.for_forward(), *HELD)
    run_pass(BucketCollectives(), graphs.backward, graphs.context.for_backward(), *HELD)
    assert num_targets(graphs.forward, ALL_GATHER) == 2
    assert num_targets(graphs.backward, REDUCE_SCATTER) == 1


def test_only_what_trains_is_reduced(fake_group):
    """Biases alone: the reductions hold their padded elements and no others."""
    model = MODELS["blocks_2"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    padded = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            unit = name.rpartition(".")[0].partition("blocks.")[2][:1]
            padded[unit] = padded.get(unit, 0) + 2 * -(-parameter.numel() // 2)
    graphs = capture_graphs(shard_units(model, fake_group(2)), example_batch("blocks_2"))
    run_pass(BucketCollectives(), graphs.backward, graphs.context.for_backward(), *HELD)
    reductions = graphs.backward.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    assert sorted(node.args[0].meta["val"].numel() for node in reductions) == sorted(padded.values())


@pytest.mark.parametrize(
    ("value", "recurse", "gathers"), [(True, True, 3), (True, False, 1), (False, True, 0), (False, False, 2)]
)
def test_reshard_set_with_and_without_the_units_below(fake_group, value, recurse, gathers):
    model = shard_units(MODELS["blocks_2"](), fake_group(2), reshard_after_forward=not value)
    model.set_reshard_after_forward(value, recurse=recurse)
    graphs = capture_graphs(model, example_batch("blocks_2"))
    run_pass(BucketCollectives(), graphs.backward, graphs.context.for_backward(), *HELD)
    assert num_targets(graphs.backward, ALL_GATHER) == gathers
    assert num_targets(graphs.backward, REDUCE_SCATTER) == 3


def test_capturing_nothing_is_an_error(fake_group):
    fake_group(2)
    with pytest.raises(CaptureError, match="nothing was captured"):
        capture_graphs(lambda x: x.dim(), torch.ones(1))
