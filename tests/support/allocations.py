"""What a function allocates, as torch's CPU allocator reports it to the profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def allocations(step: Callable[[], object]) -> list[tuple[int, int]]:
    """Address and bytes (negative: freed) of the allocator's events, in time order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = step()
    del result  # lives until nothing is recorded any more
    pending, events = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, num_bytes) for _, address, num_bytes in sorted(events)]


def peak_bytes(step: Callable[[], object]) -> int:
    """Largest live bytes above the start; gloo's threads free some unseen, which can only raise it."""
    held: dict[int, int] = {}
    peak = 0
    for address, num_bytes in allocations(step):
        held.pop(address, None)
        if num_bytes > 0:
            held[address] = num_bytes
        peak = max(peak, sum(held.values()))
    return peak
