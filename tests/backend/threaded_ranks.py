"""Two ranks as threads of one process, which compile at the same moment: run by test_threaded_ranks in a process."""

import contextlib
import sys
import threading

import torch
from support.threads_as_ranks import run_on_threads
from support.torch_versions import TORCH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import graphshard

NUM_RANKS = 2


def build() -> nn.Module:
    """Not drawn: threads share the random generator."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    return model


def check_that_shards_are_shown(model: nn.Module) -> None:
    """As torch's test_param_registration_after_backward does."""
    kinds = {name: type(param) for name, param in model.named_parameters()}
    assert len(kinds) == 4 and set(kinds.values()) == {DTensor}, kinds


def train(start: threading.Barrier, reshards: bool) -> None:
    reference = build()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    batch = torch.linspace(-1, 2, 12).view(3, 4)
    for _ in range(2):
        reference(batch).square().sum().backward()
    model = build()
    for module in (model[0], model):
        graphshard.fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    start.wait()
    forward = torch.compile(model, backend="graphshard")
    for _ in range(2):
        forward(batch).square().sum().backward()
        check_that_shards_are_shown(model)
    for name, param in model.named_parameters():
        assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad)


def train_on_threads(reshards: bool) -> list[int]:
    at_once = threading.Barrier(NUM_RANKS)
    return run_on_threads(NUM_RANKS, lambda rank: train(at_once, reshards))


if __name__ == "__main__":
    first = train_on_threads(True)
    if TORCH < (2, 12):  # there the first DTensor of a thread whose predecessors had some ends the process
        print("trained:", first)
        sys.exit()
    # Not at the top: it imports the backend, which is for the threads to do.
    from support.interpreted_halves import interpreted_halves

    with contextlib.nullcontext() if "thorough" in sys.argv else interpreted_halves():
        second = train_on_threads(False)
    print("trained:", [rank for rank in first if rank in second])
