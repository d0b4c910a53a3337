"""What a later process finds of a step that reads its mesh: what this rank has compiled with these groups, alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.new_process import as_new_process
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard._compat_groups import fake_world

pytestmark = pytest.mark.inductor


def start(
    folder: Path, rank: int, *, takes_dtensor: bool = False, hash_of_mesh: int = 1, other_group: bool = False
) -> tuple[int, int]:
    """A step of one rank of a new process: graphs found in AOTAutograd's cache, halves that were compiled."""
    with fake_world(rank, 4), as_new_process(str(folder)) as start:
        if other_group:
            dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp = mesh["tp"]
        mesh._hash = tp._hash = hash_of_mesh  # each process has another
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        layouts = [Shard(0)] if takes_dtensor else [Replicate()]
        parallelize_module(
            model, tp, {"0": ColwiseParallel(input_layouts=layouts[0]), "1": RowwiseParallel()}
        )
        graphshard.fully_shard(model, mesh=mesh["dp"])
        step = torch.compile(model, backend="graphshard", options={"hardware": None})
        batch = torch.ones(4, 4)
        step(distribute_tensor(batch, tp, layouts) if takes_dtensor else batch).sum().backward()
    return start.counts


ANEW, KEPT = (0, 2), (1, 0)


@pytest.mark.parametrize("takes_dtensor", [False, True], ids=["plain", "DTensor"])
def test_each_rank_has_its_own(tmp_path, takes_dtensor):
    assert start(tmp_path, 0, takes_dtensor=takes_dtensor) == ANEW
    assert start(tmp_path, 0, takes_dtensor=takes_dtensor, hash_of_mesh=2) == KEPT
    assert start(tmp_path, 1, takes_dtensor=takes_dtensor) == ANEW, "the other half of the features"
    assert start(tmp_path, 2, takes_dtensor=takes_dtensor) == ANEW, "the same half, with other groups"
    assert start(tmp_path, 2, takes_dtensor=takes_dtensor, hash_of_mesh=2) == KEPT


def test_groups_of_other_names_count(tmp_path):
    assert start(tmp_path, 0) == ANEW
    assert start(tmp_path, 0, other_group=True) == ANEW
    assert start(tmp_path, 0, hash_of_mesh=2) == KEPT
