"""Four ranks as threads on a 2-D mesh, and an all-gather extension patched onto a class: run by a test in a process."""

import copy
from typing import Any

import torch
from support.threads_as_ranks import run_on_threads
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import graphshard

NUM_RANKS = 4


def pre_all_gather(
    self: TwoTensor,
    mesh: DeviceMesh,
    size: torch.Size,
    stride: tuple[int, ...],
    module: nn.Module,
    policy: Any,
) -> tuple[tuple[Tensor, ...], int]:
    assert mesh.ndim == 1 and mesh.size() == NUM_RANKS // 2, mesh
    assert size == (6, 4) and isinstance(module, nn.Linear)
    return (self.a, self.b), 7


def post_all_gather(
    self: TwoTensor,
    gathered: tuple[Tensor, ...],
    metadata: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    assert metadata == 7
    return TwoTensor(*gathered), gathered


TwoTensor.fsdp_pre_all_gather = pre_all_gather
TwoTensor.fsdp_post_all_gather = post_all_gather


def build() -> nn.Module:
    """Not drawn: threads share the random generator."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    weight = model[0].weight
    model[0].weight = nn.Parameter(TwoTensor(weight.detach(), weight.detach().clone()))
    return model


def train(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("replicate", "shard"))
    reference = build()
    model = copy.deepcopy(reference)
    for module in (model[0], model):
        graphshard.fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    batch = torch.linspace(-1, 2, 12).view(3, 4)
    for _ in range(2):
        losses = [each(batch).square().sum() for each in (reference, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(losses[1], losses[0])
    shard = model[0].weight.to_local()
    assert type(shard) is TwoTensor
    rows = slice(3 * (rank % 2), 3 * (rank % 2) + 3)
    assert_close(shard.a, reference[0].weight.a[rows])
    assert_close(shard.b, reference[0].weight.b[rows])


if __name__ == "__main__":
    print("trained:", run_on_threads(NUM_RANKS, train))
