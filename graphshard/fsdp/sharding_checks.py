"""What ``fully_shard`` refuses of its arguments and modules before it changes anything."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from .._compat_composable import is_replicated_by_torch, is_sharded_by_torch
from ..errors import AlreadyShardedError, ShardingError, UnsupportedShardingError
from .fsdp_module import FSDPModule


def check_offload_policy(offload_policy: Any) -> None:
    if type(offload_policy) not in (OffloadPolicy, CPUOffloadPolicy):
        raise UnsupportedShardingError(
            f"fully_shard: offload_policy={type(offload_policy).__name__} is unknown; use OffloadPolicy() or "
            "CPUOffloadPolicy()"
        )


def checked_reshard(value: Any, num_ranks: int) -> bool | int | None:
    """The value of ``reshard_after_forward``; 1 becomes False, the number of ranks becomes True."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ShardingError(
            f"fully_shard: reshard_after_forward={value!r} must be True, False, None or a number of ranks"
        )
    if value < 1 or num_ranks % value != 0:
        raise ShardingError(
            f"fully_shard: reshard_after_forward={value} must divide the {num_ranks} ranks of the shard axis"
        )
    if value == 1:
        warnings.warn(
            "fully_shard: reshard_after_forward=1 keeps whole parameters; write False instead", stacklevel=3
        )
        return False
    return True if value == num_ranks else value


def check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ShardingError("fully_shard: the list of modules is empty")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ShardingError(f"fully_shard: expected an nn.Module, got {type(module).__name__}")
        if isinstance(module, FSDPModule):
            raise AlreadyShardedError(
                f"fully_shard was already called on this {type(module).__name__}; call it once per module"
            )
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise ShardingError(
                f"fully_shard: {type(module).__name__} has no forward, so nothing can gather its parameters; "
                "shard each of its children, or pass them as a list"
            )
        _refuse_torch_units(module)


def _refuse_torch_units(module: nn.Module) -> None:
    """Refuses modules that torch has sharded: their parameters look like those of tensor parallelism."""
    found = {
        path: type(each).__name__
        for path, each in module.named_modules()
        if not isinstance(each, FSDPModule) and is_sharded_by_torch(each)
    }
    if found:
        shown = ", ".join(f"{path or 'the module itself'} ({kind})" for path, kind in list(found.items())[:5])
        raise ShardingError(
            f"fully_shard: torch.distributed.fsdp has sharded {shown}; one model is sharded by one library. Import "
            "fully_shard from graphshard for all of its modules"
        )


def refuse_replicated(modules: list[nn.Module], ignored: set[int]) -> None:
    """Refuses modules whose gradients DistributedDataParallel reduces, too, unless all their parameters are ignored."""
    found = [
        f"{path or 'the module itself'} ({type(each).__name__})"
        for module in modules
        for path, each in module.named_modules()
        if is_replicated_by_torch(each) and any(id(param) not in ignored for param in each.parameters())
    ]
    if found:
        raise ShardingError(
            f"fully_shard: DistributedDataParallel, or torch's replicate, manages {', '.join(found[:5])}, and would "
            "reduce its gradients as well: shard the plain module (a 2-D mesh replicates and shards), or list its "
            "parameters in ignored_params"
        )
