"""Private torch names of FSDP1: its auto-wrap policies, and what torch's checkpoint helpers ask of a wrapper."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor  # checked: 2.13
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper  # checked: 2.13
from torch.distributed.fsdp import (
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import _Policy  # checked: 2.13

#: The attribute by which FSDP1 holds the module that it wraps; parameter names carry it.
WRAPPED = "_fsdp_wrapped_module"

#: SHARD_GRAD_OP inside a node, copies across nodes.
HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2

_CHECKPOINT_HELPERS = "torch.distributed.checkpoint.state_dict"

#: Modules whose frames may lie between a helper and a wrapper.
_PASSED = (
    "torch.nn.",
    "torch.utils.",
    "torch._dynamo.",
    "torch.distributed.algorithms.",
    "graphshard.",
    "contextlib",
)


def is_policy_object(policy: Any) -> bool:
    """Whether an auto-wrap policy looks at the whole model at once; the others are functions of one module."""
    return isinstance(policy, _Policy)


def run_policy(
    policy: Any, root: nn.Module, ignored: set[nn.Module], kwargs: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """The modules that a policy object chooses, with the arguments of their wrappers."""
    return policy._run_policy(root, ignored, kwargs)


def classes_in_full_precision(mixed_precision: MixedPrecision) -> tuple[type[nn.Module], ...]:
    """The classes that an auto-wrap policy leaves out of mixed precision: normalisations of batches, by default."""
    return tuple(mixed_precision._module_classes_to_ignore)


def is_sharded_tensor(value: Any) -> bool:
    """Whether a value is the kind of sharded tensor that FSDP1 writes if it was given no mesh."""
    return isinstance(value, ShardedTensor)


def of_dtensors(config: Any) -> Any:
    """A config of state dicts; one of sharded ones says that values are DTensors, as FSDP1's does with a mesh."""
    is_sharded = isinstance(config, (ShardedStateDictConfig, ShardedOptimStateDictConfig))
    return replace(config, _use_dtensor=True) if is_sharded else config


def local_rows(value: Any, like: Tensor) -> Tensor:
    """This rank's rows of a ``ShardedTensor``; an empty tensor like ``like`` if it has none."""
    shards = value.local_shards()
    return shards[0].tensor if shards else like.new_empty((0, *like.shape[1:]))


def without_checkpoint_names(path: str) -> str:
    """A path without the attribute of ``checkpoint_wrapper``, which takes it out of the keys of state dicts."""
    return ".".join(part for part in path.split(".") if part != "_checkpoint_wrapped_module")


def without_activation_wrapper(module: nn.Module) -> nn.Module:
    """The module inside ``checkpoint_wrapper`` and the like."""
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    return module


def is_asked_by_checkpoint_helpers(depth: int = 2) -> bool:
    """Whether a function of ``torch.distributed.checkpoint.state_dict`` has called the one that asks (checked: 2.13).

    These helpers ask FSDP1 for shards under clean names. They know FSDP1 by its class only.

    Args:
        depth: frames of this room between the helper and this function, at least.
    """
    frame: Any = sys._getframe(depth)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == _CHECKPOINT_HELPERS:
            return True
        if not name.startswith(_PASSED):
            return False
        frame = frame.f_back
    return False
