"""Tensor memory of one training step on the CPU, from the allocator's own events.

Compiled code, eager code and collectives' buffers all allocate through torch's CPU allocator, so its events
give a peak that does not depend on who runs the step. Scratch space inside gloo is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

NUM_TRACED_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes on one rank: the peak above the start of the step, and what the step did not free."""

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


def _trace_step(step: Callable[[], object]) -> StepMemory:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    pending, events = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    if not events:
        raise RuntimeError("the profiler recorded no allocation: the memory figures would be wrong")
    held: dict[int, int] = {}
    live = peak = 0
    for _, address, num_bytes in sorted(events, key=lambda event: event[0]):
        # An address handed out again was freed in between, by a thread the profiler does not watch.
        live -= held.pop(address, 0)
        if num_bytes > 0:
            held[address] = num_bytes
            live += num_bytes
        peak = max(peak, live)
    return StepMemory(peak_bytes=peak, left_bytes=live)


def measure_step_memory(step: Callable[[], object]) -> StepMemory:
    """Run `step` a few times under the profiler, add up allocations and frees, and return the lowest peak.

    Gloo's threads sometimes let go of a collective's buffer last, which the profiler does not see: that can
    only raise a peak, hence the lowest of several steps. Frees of memory allocated before the step are not
    recorded either, so a step has to start without gradients (the one before ends with
    `zero_grad(set_to_none=True)`).
    """
    return min(
        (_trace_step(step) for _ in range(NUM_TRACED_STEPS)), key=lambda m: (m.peak_bytes, m.left_bytes)
    )
