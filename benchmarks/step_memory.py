"""Tensor memory of one training step on the CPU, from the allocator's own events.

Compiled code, eager code and collectives' buffers all allocate through torch's CPU allocator, so its events give
a peak that does not depend on who runs the step. Scratch space inside gloo is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes on one rank. `peak_bytes` is above the start of the step; `left_bytes` is what the step did not free."""

    peak_bytes: int
    left_bytes: int


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes this rank holds of `tensors`: a DTensor counts its local shard."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total += local.numel() * local.element_size()
    return total


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Local bytes of every tensor in the optimizer's state."""
    states = optimizer.state.values()
    return local_bytes(value for state in states for value in state.values() if isinstance(value, Tensor))


def measure_step_memory(step: Callable[[], object]) -> StepMemory:
    """Run `step` once under the profiler and integrate its allocations and frees in time order.

    Frees of memory that was allocated before the step are not recorded, so a step has to start with no gradients
    (`zero_grad(set_to_none=True)` at the end of the step before), as training loops do.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    if not events:
        raise RuntimeError("the profiler recorded no allocation: the memory figures would be wrong")
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return StepMemory(peak_bytes=peak, left_bytes=live)
