"""Private torch names, in one place, each with the versions it was checked on.

The Inductor hand-over (:mod:`graphshard.inductor`) has its own private imports; nothing else in the
project may import a private torch name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode  # checked: 2.13
from torch.distributed.constants import default_pg_timeout

__all__ = [
    "detect_fake_mode",
    "group_by_name",
    "group_store",
    "group_timeout_seconds",
    "in_recomputation",
    "queue_after_backward",
]


def in_recomputation() -> bool:
    """True where a checkpointed region runs again: in a backward, with gradients enabled (checked: 2.13).

    A hook in a backward with ``create_graph=True`` looks the same.
    """
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store a process group was made with (checked: 2.13)."""
    from torch.distributed.distributed_c10d import _world

    return _world.pg_map[group][1]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Has ``callback`` run when the backward that is running has ended (checked: 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def group_by_name(name: str) -> dist.ProcessGroup:
    """The process group a functional collective's group name stands for (checked: 2.13)."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def group_timeout_seconds(group: dist.ProcessGroup) -> float:
    """The time limit the user gave for operations on this group (checked: 2.13)."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout.total_seconds()
    return default_pg_timeout.total_seconds()
