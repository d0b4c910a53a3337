"""The code of an earlier process for models with tensor parallelism."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.meshes_parity import Arrangement, FullyShard, named_mesh, train_on_mesh
from support.new_process import as_new_process
from support.torch_versions import NEEDS_KEPT_DTENSORS
from support.toy_models import Batch, Forward, Workload
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional


class FeedForward(nn.Module):
    """Norm, expand, contract, with a residual. Takes DTensors of a mesh where it has one."""

    takes_on: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expand, self.contract = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(functional.gelu(self.expand(self.norm(x))))


PLANS = {
    "plain": {"expand": ColwiseParallel(use_local_output=False), "contract": RowwiseParallel()},
    "DTensors": {
        "norm": SequenceParallel(),
        "expand": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "contract": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


def mean_square(forward: Forward, batch: Batch) -> Tensor:
    (x,) = batch
    if forward.takes_on is not None:
        x = distribute_tensor(x, forward.takes_on, [Replicate()])
    result = forward(x)
    return (result.full_tensor() if isinstance(result, DTensor) else result).square().mean()


def start_twice(folder: str, plan: str) -> list[tuple[int, int]]:
    """Trainings like the unsharded model's and FSDP2's; all ranks have one folder."""
    mesh = named_mesh((2, 2), ("dp", "tp"))
    tp = mesh["tp"]  # one object: where results of DTensors are of an equal one, torch cannot cut the graph (2.13)

    def shard(fully_shard: FullyShard, model: FeedForward) -> None:
        parallelize_module(model, tp, PLANS[plan])
        model.takes_on = tp if plan == "DTensors" else None
        fully_shard(model, mesh=mesh["dp"])

    workload = Workload(
        build=FeedForward,
        list_units=lambda model: [],
        draw_batch=lambda generator, size: (torch.randn(size, 4, 4, generator=generator),),
        loss=mean_square,
    )
    arrangement = Arrangement(shard=shard, num_batches=2, batch_index=dist.get_rank() // 2)
    counts = []
    for _ in range(2):
        with as_new_process(folder) as start:
            train_on_mesh(workload, "compiled", arrangement)
        counts.append(start.counts)
        dist.barrier()
    return counts


@NEEDS_KEPT_DTENSORS
@pytest.mark.inductor
@pytest.mark.parametrize("plan", PLANS)
def test_tensor_parallelism(run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path, plan: str) -> None:
    for counts in run_on_gloo_ranks(4, start_twice, str(tmp_path), plan):
        assert counts == [(0, 2), (1, 0)]
