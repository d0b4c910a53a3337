"""What CUDA's allocator holds at the peak of a step, and which line of the compiled code asked for it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch

#: Allocations that are listed, the largest first.
_NUM_LISTED = 80


def live_at_peak(step: Callable[[], object]) -> list[tuple[float, str]]:
    """MiB and origin of what a step has allocated and not freed at its peak; its own alone, in order of size."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)
    try:
        step()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, dict[str, Any]] = {}
    size, peak, at_peak = 0, 0, []
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            size += event["size"]
        elif event["action"] == "free_completed" and (freed := live.pop(event["addr"], None)) is not None:
            size -= freed["size"]
        if size > peak:
            peak, at_peak = size, list(live.values())
    at_peak.sort(key=lambda event: -event["size"])
    return [(event["size"] / 2**20, _origin(event["frames"])) for event in at_peak[:_NUM_LISTED]]


def _origin(frames: list[dict[str, Any]]) -> str:
    """The innermost line of generated code, or the innermost line of any."""
    of_python = [frame for frame in frames if frame["filename"].endswith(".py")]
    generated = [frame for frame in of_python if frame["name"] == "call"]
    for frame in [*generated, *of_python][:1]:
        line = linecache.getline(frame["filename"], frame["line"]).strip()
        return f"{frame['name']}:{frame['line']} {line}"[:160]
    return "?"
