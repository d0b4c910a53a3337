"""What a later process finds of a step that reads its mesh: what this rank has compiled with these groups, alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.new_process import as_new_process
from support.torch_versions import NEEDS_KEPT_DTENSORS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphshard
from graphshard._compat_groups import fake_world

pytestmark = [pytest.mark.inductor, NEEDS_KEPT_DTENSORS]


class OwnRows(nn.Module):
    """Of a DTensor with all rows, those of this rank."""

    def forward(self, x: DTensor) -> Tensor:
        return x.redistribute(placements=[Shard(0)]).to_local()


def tensor_parallel(tp: DeviceMesh) -> tuple[nn.Module, Tensor]:
    """A model with tensor parallelism and its batch."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(model, tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model, torch.ones(4, 4)


def takes_dtensor(tp: DeviceMesh) -> tuple[nn.Module, Tensor]:
    """A model without a mesh of its own, and a batch with one."""
    return nn.Sequential(OwnRows(), nn.Linear(4, 4)), distribute_tensor(torch.ones(4, 4), tp, [Replicate()])


def start(
    folder: Path,
    rank: int,
    build: Callable[[DeviceMesh], tuple[nn.Module, Tensor]] = tensor_parallel,
    *,
    hash_of_mesh: int = 1,
    other_group: bool = False,
) -> tuple[int, int]:
    """A step of one rank of a new process: graphs found in AOTAutograd's cache, halves that were compiled."""
    with fake_world(rank, 4), as_new_process(str(folder)) as start:
        if other_group:
            dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp = mesh["tp"]
        mesh._hash = tp._hash = hash_of_mesh  # each process has another
        model, batch = build(tp)
        graphshard.fully_shard(model, mesh=mesh["dp"])
        step = torch.compile(model, backend="graphshard", options={"hardware": None})
        step(batch).sum().backward()
    return start.counts


ANEW, KEPT = (0, 2), (1, 0)


@pytest.mark.parametrize("build", [tensor_parallel, takes_dtensor])
def test_each_rank_has_its_own(tmp_path, build):
    assert start(tmp_path, 0, build) == ANEW
    assert start(tmp_path, 0, build, hash_of_mesh=2) == KEPT
    assert start(tmp_path, 1, build) == ANEW, "the other half of a tensor"
    assert start(tmp_path, 2, build) == ANEW, "the same half, with other groups"
    assert start(tmp_path, 2, build, hash_of_mesh=2) == KEPT


@pytest.mark.parametrize("build", [tensor_parallel, takes_dtensor])
def test_groups_of_other_names_count(tmp_path, build):
    assert start(tmp_path, 0, build) == ANEW
    assert start(tmp_path, 0, build, other_group=True) == ANEW
    assert start(tmp_path, 0, build, hash_of_mesh=2) == KEPT
