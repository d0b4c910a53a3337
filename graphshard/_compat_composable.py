"""Private torch names of its composable APIs: what torch's ``fully_shard`` and ours know of each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY  # checked: 2.13
from torch.distributed.fsdp import FSDPModule, fully_shard


class _AppliedStates(dict[Any, Any]):
    """States of composable APIs by API, with that of ``fully_shard``; it is asked before an API is applied."""

    def __contains__(self, api: object) -> bool:
        if api is fully_shard.__wrapped__:
            self[api].refuse()
        return super().__contains__(api)


def set_state_for_torch(module: nn.Module, state: Any) -> None:
    """Makes ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state`` (checked: 2.13).

    ``torch.distributed.fsdp.fully_shard(module)`` calls ``state.refuse()``.
    """
    states = _AppliedStates(module.__dict__.get(STATE_KEY, {}))
    states[fully_shard.__wrapped__] = state
    module.__dict__[STATE_KEY] = states


def watch_torch_sharding(refuse: Callable[[nn.Module], Any]) -> tuple[str, property]:
    """Name and value of an attribute of a class; it calls ``refuse`` where torch would shard a module (checked: 2.13).

    Torch's ``fully_shard`` and ``replicate`` ask each module below the one that they are given for the APIs that were
    applied to it. State-dict helpers ask the same from another function, and get what was applied.
    """

    def applied(module: nn.Module) -> Any:
        if sys._getframe(2).f_code.co_name in ("_is_composable_with_fsdp", "is_composable_with_replicate"):
            refuse(module)
        return module.__dict__.get(REGISTRY_KEY)

    return REGISTRY_KEY, property(applied)


def is_sharded_by_torch(module: nn.Module) -> bool:
    """Whether FSDP1, FSDP2 or ``replicate`` of torch manages the module's parameters (checked: 2.13)."""
    return isinstance(module, FSDPModule) or getattr(module, "_is_fsdp_managed_module", False)
