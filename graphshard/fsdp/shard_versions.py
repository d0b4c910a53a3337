"""Has a shard changed in place? Asked where a backward gathers again what its forward gathered.

An in-place op on a DTensor moves the version counter of the DTensor alone, one on its local tensor
that of the local tensor alone, and a foreach or fused optimizer neither (torch 2.13): so both are
read, and every optimizer step on DTensors moves the second.
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
    """Differs from an earlier result if the parameter was changed in place since."""
    return param._version, param._local_tensor._version


@functools.cache
def watch_optimizers() -> None:
    """From the first call on, a step of any optimizer moves the version of the DTensors it holds."""
    register_optimizer_step_post_hook(_move_versions)


def _move_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    increment_version([param._local_tensor for param in params if isinstance(param, DTensor)])
