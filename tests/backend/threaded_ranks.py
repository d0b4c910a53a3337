"""Two ranks as threads of one process, which compile at the same moment: run by test_threaded_ranks in a process."""

import threading
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

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


def train(rank: int, store: dist.Store, start: threading.Barrier, done: list[int]) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=NUM_RANKS, store=store)
    try:
        reference = build()
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        batch = torch.linspace(-1, 2, 12).view(3, 4)
        for _ in range(2):
            reference(batch).square().sum().backward()
        for reshards in (True, False):
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
        done.append(rank)
    except BaseException as error:
        traceback.print_exc()
        ProcessLocalGroup.exception_handle(error)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    world = _install_threaded_pg()
    store, start, done = dist.HashStore(), threading.Barrier(NUM_RANKS), []
    threads = [
        threading.Thread(target=train, args=(rank, store, start, done), daemon=True) for rank in range(NUM_RANKS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    _uninstall_threaded_pg()
    print("trained:", sorted(done))
