"""Recovers the plain model from a sharded one, without data, and the arguments of ``fully_shard`` as rules.

The capture of a plain model does the rest. The rules describe parameters by the ``unshard`` calls of training.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedShardingError
from ..fsdp import PLAIN_CLASS, uncompiled_forward
from ..fsdp.state import SLOTS, ParameterSlot, TreeUnit, slots_of
from ..ir import UNIT, UnshardCall
from .extended_parameters import ExtendedShard
from .rules import ShardingRules

#: Entries of a module that ``fully_shard`` made, or that only loading and saving use.
_LEFT_OUT = (UNIT, SLOTS, "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRules(ShardingRules):
    """Rules read from a sharded model.

    Attributes:
        calls: the ``unshard`` call of each parameter, by its path.
        extended: the shards of parameters with gather extensions, by path.
        casting: the paths of the modules given to ``fully_shard``; "" is the root.
    """

    calls: Mapping[str, UnshardCall]
    casting: frozenset[str]
    extended: Mapping[str, ExtendedShard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks nothing: axes have the names of the model's own mesh."""

    def casts_at(self, path: str) -> bool:
        """Whether the module of this path was given to ``fully_shard``."""
        return path in self.casting

    def call_of(self, path: str, shape: torch.Size, is_float: bool) -> UnshardCall:
        """The ``unshard`` call that training makes for the parameter."""
        return self.calls[path]


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has been called on the model or on a part of it."""
    return any(UNIT in part.__dict__ for part in model.modules())


def plain_copy(model: nn.Module) -> tuple[nn.Module, FoundRules]:
    """The plain model on the meta device, with its plain classes, and its rules.

    Raises:
        UnsupportedShardingError: the model has what a capture without ranks cannot follow: offloading, tensor
            parallelism, ignored parameters, gather extensions that cannot be traced, custom collectives, or policies
            that differ between units. Lists all of them.
    """
    slots = {id(slot): slot for owner in model.modules() for _, slot in slots_of(owner)}
    units = {id(slot.unit): slot.unit for slot in slots.values()}
    problems = list(dict.fromkeys(_problems(model, list(slots.values()), list(units.values()))))
    if problems:
        raise UnsupportedShardingError(
            f"inspect cannot follow this sharded model: {'; '.join(problems)}; give it the model as it was before "
            "fully_shard, with mesh=..., units=... and the policies"
        )
    first = next(iter(slots.values()))
    replicate, shard = first.replicate, first.axis
    mesh = {axis.label: axis.size for axis in (replicate, shard) if axis is shard or axis.size > 1}
    rules = FoundRules(
        mesh=mesh,
        units=[unit.label for unit in units.values() if unit.label != "root"],
        mp_policy=first.unit.settings.mp_policy,
        calls={slot.name: UnshardCall(None, None, *slot.arguments) for slot in slots.values()},
        casting=frozenset(path for path, part in model.named_modules() if UNIT in part.__dict__),
        extended={slot.name: ExtendedShard.of(slot) for slot in slots.values() if slot.is_extended},
    )
    return _copied(model), rules


def _problems(model: nn.Module, slots: list[ParameterSlot], units: list[TreeUnit]) -> Iterator[str]:
    known = {id(slot.param) for slot in slots}
    for path, param in model.named_parameters():
        if id(param) not in known:
            yield f"parameter {path} is not sharded"
    for slot in slots:
        if slot.outer is not None:
            yield f"parameter {slot.name} is a DTensor of another kind of parallelism"
        if slot.untraceable:
            yield f"parameter {slot.name} has a gather extension that cannot be captured: {slot.untraceable}"
        if slot.hidden is not None:
            yield f"parameter {slot.name} is gathered now (call reshard())"
        if (slot.axis, slot.replicate) != (slots[0].axis, slots[0].replicate):
            yield "parameters are on different meshes"
    for unit in units:
        if unit.settings.mp_policy != units[0].settings.mp_policy:
            yield "units have different mixed-precision policies"
        if unit.compute_device is not None:
            yield f"unit {unit.label} is offloaded"
        if unit.settings.comms.names():
            yield f"unit {unit.label} has communication of its own"


def _copied(model: nn.Module) -> nn.Module:
    """Copies of modules with their plain classes, and full parameters without data.

    What ``torch.compile`` has wrapped has the place of the wrapper, which names of parameters leave out.
    """
    memo: dict[int, Any] = {}
    compiled = {
        id(module): inner
        for module in model.modules()
        if (inner := module._modules.get("_orig_mod")) is not None
    }
    modules = [module for module in model.modules() if id(module) not in compiled]
    for module in modules:
        memo[id(module)] = object.__new__(getattr(type(module), PLAIN_CLASS, type(module)))
        for _, slot in slots_of(module):
            full = torch.empty(slot.global_shape, dtype=slot.param.dtype, device="meta")
            memo.setdefault(id(slot.param), nn.Parameter(full, requires_grad=slot.param.requires_grad))
    memo.update({key: memo[id(inner)] for key, inner in compiled.items()})
    for module in modules:
        entries = {name: value for name, value in module.__dict__.items() if not _is_left_out(name, value)}
        if "forward" in entries:
            entries["forward"] = uncompiled_forward(entries["forward"])
        copied = memo[id(module)]
        copied.__dict__.update(copy.deepcopy(entries, memo))
        copied._state_dict_pre_hooks, copied._load_state_dict_pre_hooks = {}, {}
    return memo[id(model)]


def _is_left_out(name: str, value: Any) -> bool:
    """Whether an entry of a module is not copied; bound methods wrap plain ones (``register_fsdp_forward_method``)."""
    return name in _LEFT_OUT or isinstance(value, types.MethodType)
