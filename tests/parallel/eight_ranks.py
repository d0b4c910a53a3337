"""Eight ranks as threads, on a mesh of 2 copies x 2 shards x 2 ranks of tensor parallelism: run by test_eight_ranks.

Arguments: the name of a model, and the number of steps.
"""

import copy
import sys
import threading
from unittest import mock

import torch
from support.interpreted_halves import InterpretedHalf, interpreted_halves
from support.parallel_models import PARALLEL_MODELS
from support.threads_as_ranks import run_on_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import graphshard

NUM_RANKS = 8
#: How long all steps may take, in seconds.
LIMIT_S = 500
GIVEN = PARALLEL_MODELS[sys.argv[1]]
BATCHES = [
    [GIVEN.draw(torch.Generator().manual_seed(10 * step + index)) for index in range(4)]
    for step in range(int(sys.argv[2]))
]

#: No rank runs while another one compiles: torch's tracing is not made for that.
COMPILED = threading.Barrier(NUM_RANKS, timeout=LIMIT_S)
RUN = InterpretedHalf.__call__


def run_half(half: InterpretedHalf, inputs: list) -> object:
    """The first run of each half waits for that of all ranks."""
    if not hasattr(half, "has_met"):
        half.has_met = True
        COMPILED.wait()
    return RUN(half, inputs)


def steps(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Parameters of the unsharded model after each step."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    for batches in BATCHES:
        torch.stack([model(*batch) for batch in batches]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return found


def train(rank: int, model: nn.Module, expected: list[dict[str, torch.Tensor]]) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    graphshard.parallelize(model, mesh["tp"], GIVEN.placements, **GIVEN.held)
    for unit in [*GIVEN.units(model), model]:
        graphshard.fully_shard(unit, mesh=mesh["replicate", "shard"])
    COMPILED.wait()
    forward = torch.compile(model, backend="graphshard", options={"hardware": None}, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for batches, after in zip(BATCHES, expected, strict=True):
        forward(*batches[rank // 2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) and param.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")
            assert_close(param.full_tensor().detach(), after[name], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    reference = GIVEN.build()
    models = [copy.deepcopy(reference) for _ in range(NUM_RANKS)]
    expected = steps(reference)
    with interpreted_halves(), mock.patch.object(InterpretedHalf, "__call__", run_half):
        print("trained:", run_on_threads(NUM_RANKS, lambda rank: train(rank, models[rank], expected), LIMIT_S))
