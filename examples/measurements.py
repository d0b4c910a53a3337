"""What a training step really holds and sends, measured from its tensors and from the profiler."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

# c10d operator name -> kind. Each collective a rank starts is one such operator, compiled or not.
_KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "c10d::broadcast_": "broadcast",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes this process holds for training, padding included."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer


def held_bytes(model: nn.Module, optimizer: Optimizer) -> HeldBytes:
    """Measure between backward and `zero_grad`, after at least one optimizer step."""
    parameters = list(model.parameters())
    states = (value for state in optimizer.state.values() for value in state.values())
    return HeldBytes(
        parameters=_storage_bytes(parameters),
        gradients=_storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=_storage_bytes(value for value in states if isinstance(value, Tensor)),
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the local storages behind the tensors, each storage once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def collectives_per_step(run_step: Callable[[], object]) -> dict[str, int]:
    """Number of collectives by kind that one call of `run_step` starts on this rank."""
    # Kineto reads this when it first runs; below 6 it prints its own start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run_step()
    counts = Counter(_KINDS[event.name] for event in profiled.events() if event.name in _KINDS)
    return dict(sorted(counts.items()))


def memory_bytes(device: torch.device) -> int:
    """Peak allocated GPU memory of this rank, or the process's resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
