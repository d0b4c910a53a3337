"""The unit of a wrapper: the wrapped module, or the children of a container that has no forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShardingError
from ..fsdp import FSDPModule, fully_shard
from ..ir import UNIT
from .materialize import own_states
from .options import Options
from .wrapper_state import WrapperState, state_of

#: Attribute of a wrapped module that holds the state of its first wrapper.
_FIRST = "_graphshard_fsdp1_first"


def shard_module(module: nn.Module, state: WrapperState, mesh: DeviceMesh) -> None:
    """Makes the module a unit, for ``state.unit``.

    A container without a forward, a ``ModuleList`` for instance, becomes a unit of its children: the first of them
    that runs gathers the parameters of all.

    Raises:
        ShardingError: (a ValueError) a module without a forward has parameters of its own, or a parameter cannot be
            sharded.
    """
    options = state.options
    members = _members(module, state)
    if not members:
        return
    fully_shard(
        members,
        mesh=mesh,
        reshard_after_forward=False if options.keeps_gathered else None,
        mp_policy=options.mp_policy,
        offload_policy=options.offload_policy,
        ignored_params=state.ignored_params,
    )
    state.unit = cast(FSDPModule, members[0])
    unit = members[0].__dict__[UNIT]
    unit.steps_optimizers = True
    unit.settings.forward_order = options.forward_order
    unit.settings.backward_order = options.backward_order
    module.__dict__[_FIRST] = state


def earlier_state(module: nn.Module, options: Options) -> WrapperState | None:
    """The state of the first wrapper of a module that is wrapped again; None for one that no wrapper has held.

    Raises:
        ShardingError: (a ValueError) the first wrapper had other arguments.
    """
    earlier: WrapperState | None = module.__dict__.get(_FIRST)
    if earlier is None or options == earlier.options:
        return earlier
    different = [
        name
        for name in Options.__dataclass_fields__
        if getattr(options, name) != getattr(earlier.options, name)
    ]
    raise ShardingError(
        f"FullyShardedDataParallel: this {type(module).__name__} is wrapped already, with another "
        f"{', '.join(different)}: what is sharded stays as it is; pass the same arguments, or wrap a new model"
    )


def _members(module: nn.Module, state: WrapperState) -> list[nn.Module]:
    if _has_forward(module):
        return [module]
    text = f"FullyShardedDataParallel: {type(module).__name__} has no forward"
    members = list(_below(module, state))
    if members:
        warnings.warn(
            f"{text}; its children form one unit, and the first of them that runs gathers all of their parameters",
            stacklevel=5,
        )
    else:
        warnings.warn(f"{text}; its children are sharded, and the wrapper itself does nothing", stacklevel=5)
    return members


def _below(module: nn.Module, state: WrapperState) -> Iterator[nn.Module]:
    """The outermost modules below ``module`` that have a forward and parameters which are not sharded yet."""
    own = [name for name, param in module._parameters.items() if param is not None]
    if left := [name for name in own if module._parameters[name] not in state.ignored_params]:
        raise ShardingError(
            f"FullyShardedDataParallel: {type(module).__name__} has no forward, so nothing can gather the parameters "
            f"that it holds itself ({', '.join(left[:5])}); wrap a module around it, or list them in ignored_states"
        )
    for child in module.children():
        if state_of(child) is not None or child in state.ignored_modules:
            continue
        if not _has_forward(child):
            yield from _below(child, state)
        elif any(
            isinstance(value, nn.Parameter)
            for _, value in own_states(child, state.ignored_modules, state.ignored_params)
        ):
            yield child


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
