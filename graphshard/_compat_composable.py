"""Private torch names of its composable APIs: what torch's ``fully_shard`` and ours know of each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY  # checked: 2.13
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForTorch:
    """What ``torch.distributed.fsdp.fully_shard.state(module)`` returns for a unit's module (checked: 2.13).

    Torch's pipeline schedules finish a step through it. Any other attribute of FSDP2's state is refused.

    Attributes:
        unit: the unit.
        refuse_access: called with the unit and the name of an attribute.
        refuse_sharding: called with the unit where torch's ``fully_shard`` is called on the module.
    """

    unit: Any
    refuse_access: Callable[[Any, str], Any]
    refuse_sharding: Callable[[Any], Any]

    def _root_post_backward_final_callback(self) -> None:
        self.unit.tree.finish_backward()

    @property
    def _state_ctx(self) -> StateForTorch:
        return self

    @property
    def all_states(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse_access(self.unit, name)


class _AppliedStates(dict[Any, Any]):
    """States of composable APIs by API, with that of ``fully_shard``; it is asked before an API is applied."""

    def __contains__(self, api: object) -> bool:
        if api is fully_shard.__wrapped__:
            self[api].refuse_sharding(self[api].unit)
        return super().__contains__(api)


def set_state_for_torch(module: nn.Module, state: StateForTorch) -> None:
    """Makes ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state`` (checked: 2.13).

    ``torch.distributed.fsdp.fully_shard(module)`` calls ``state.refuse_sharding``.
    """
    states = _AppliedStates(module.__dict__.get(STATE_KEY, {}))
    states[fully_shard.__wrapped__] = state
    module.__dict__[STATE_KEY] = states


def state_for_torch_of(module: nn.Module) -> StateForTorch | None:
    """What :func:`set_state_for_torch` has set for a module, or None (checked: 2.13)."""
    state: StateForTorch | None = module.__dict__.get(STATE_KEY, {}).get(fully_shard.__wrapped__)
    return state


#: Functions of torch that ask a module for the APIs that were applied to it, before they shard or replicate it.
_ASKING_TO_SHARD = ("_is_composable_with_fsdp", "is_composable_with_replicate", "_is_fully_sharded")


def watch_torch_sharding(refuse: Callable[[nn.Module], Any]) -> tuple[str, property]:
    """Name and value of an attribute of a class; it calls ``refuse`` where torch would shard a module (checked: 2.13).

    Torch's ``fully_shard`` and ``replicate`` ask each module below the one that they are given for the APIs that were
    applied to it. State-dict helpers ask the same from another function, and get what was applied.
    """

    def applied(module: nn.Module) -> Any:
        if sys._getframe(2).f_code.co_name in _ASKING_TO_SHARD:
            refuse(module)
        return module.__dict__.get(REGISTRY_KEY)

    return REGISTRY_KEY, property(applied)


def is_sharded_by_torch(module: nn.Module) -> bool:
    """Whether FSDP1, FSDP2 or ``replicate`` of torch manages the module's parameters (checked: 2.13)."""
    return isinstance(module, FSDPModule) or getattr(module, "_is_fsdp_managed_module", False)


def is_replicated_by_torch(module: nn.Module) -> bool:
    """Whether ``DistributedDataParallel``, or a ``replicate`` made of it, holds the module (checked: 2.13)."""
    return isinstance(module, DistributedDataParallel) or "replicate" in module.__dict__.get(REGISTRY_KEY, {})
