"""Whether a shard has changed in place: asked when a backward gathers again what its forward gathered.

An in-place op on a DTensor moves the version counter of the DTensor only. One on its local tensor moves that of the
local tensor only. A foreach or fused optimizer moves neither (torch 2.13). So both counters are read, and a hook moves
the second one after every optimizer step on DTensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

Version = tuple[int, int]


def version_of(param: DTensor) -> Version:
    """A value that differs from an earlier one if the parameter was changed in place in between."""
    return param._version, param._local_tensor._version


@functools.cache
def watch_optimizers() -> None:
    """From the first call on, each step of an optimizer moves the version of the DTensors that it holds."""
    register_optimizer_step_post_hook(_move_versions)


def _move_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    increment_version([param._local_tensor for param in params if isinstance(param, DTensor)])
