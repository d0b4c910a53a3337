"""Modules that a user copies, ties or adds after ``fully_shard``: their parameters enter units anew, or are told.

``copy.deepcopy`` of a sharded model is a separate model with its own shards, units and forward. A sharded parameter
that is put in the place of another is gathered as one with it. Parameters that no unit shards would train to other
values on each rank.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import AlreadyShardedError
from ..ir import UNIT, padded_shape
from .compiled_block import wrap_compiled_forward
from .read_parameter import traced_read
from .shard_parameter import lay_out
from .state import (
    SLOTS,
    WRAPPERS,
    ParameterSlot,
    Tree,
    Unit,
    copy_extended,
    owner_of,
    relabel,
    slot_of_shard,
    slots_of,
    stored_parameters,
    unit_of,
)

#: Where the module of a unit keeps the names of the parameters below it that were left whole when it was sharded.
_WHOLE = "_graphshard_whole"

#: Where an optimizer keeps how many parameters it had when it was looked at.
_LOOKED_AT = "_graphshard_looked_at"


def copy_sharded(module: Any, memo: dict[int, Any], has_own: bool) -> nn.Module:
    """The copy of a unit's module; without gradients, as for any module.

    A unit that is copied without its outer module becomes a root.

    Args:
        memo: the argument of ``__deepcopy__``.
        has_own: the module's plain class has its own ``__deepcopy__``.

    Raises:
        AlreadyShardedError: (an AssertionError) ``has_own``: nobody knows what such a method copies.
    """
    if has_own:
        raise AlreadyShardedError(
            f"a sharded {type(module).__name__} cannot be deep-copied: its class has a __deepcopy__ of its own; "
            "build a second model, shard it like the first and load_state_dict()"
        )
    module.__dict__[UNIT].reshard()
    for owner in module.modules():
        for name, slot in slots_of(owner):
            param = stored_parameters(owner)[name]
            if isinstance(param, DTensor) and id(param) not in memo:
                memo[id(param)] = _copy_parameter(param, slot)
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    copied.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    _regroup_copies(copied)
    return copied


def _copy_parameter(param: DTensor, slot: ParameterSlot) -> nn.Parameter:
    """A copy of a shard in its own storage, with room for the padding."""
    local = param.to_local().detach()
    if slot.is_extended:
        copied = copy_extended(local, slot.name, local.device)
        return nn.Parameter(
            DTensor(copied, param._spec, requires_grad=False), requires_grad=param.requires_grad
        )
    padded = local.new_zeros(padded_shape(slot.shape, slot.dim, slot.axis.size))
    copied = padded.narrow(slot.dim, 0, local.shape[slot.dim]).contiguous()
    copied.copy_(local)
    return nn.Parameter(DTensor(copied, param._spec, requires_grad=False), requires_grad=param.requires_grad)


def _regroup_copies(copied: nn.Module) -> None:
    """Enters copied modules and slots into their units, as ``fully_shard`` does; the outermost module comes last."""
    unit: Unit = copied.__dict__[UNIT]
    if copied not in unit.modules:
        unit.modules.append(copied)
    for owner in copied.modules():
        if UNIT not in owner.__dict__:
            wrap_compiled_forward(owner)
        for name, slot in slots_of(owner):
            slot.traced_read = traced_read(slot) if slot.is_extended else None
            if (owner, name) not in slot.owners:
                slot.owners.append((owner, name))
            owner_unit = owner_of(slot)
            if slot not in owner_unit.slots:
                owner_unit.slots.append(slot)
            if not owner_unit.modules:  # a tied parameter whose unit was not copied
                owner_unit.tree = unit.tree
    lay_out(unit)
    relabel(unit.modules)


def slot_of_param(tree: Tree, param: Any) -> ParameterSlot | None:
    """The slot of a sharded parameter of the model, also where ``unshard()`` shows it gathered."""
    if param is None:
        return None
    for root in tree.roots:
        for owner in root.modules():
            for name, slot in slots_of(owner):
                if slot.param is param or stored_parameters(owner).get(name) is param:
                    return slot
    return None


def tie(module: nn.Module, name: str, slot: ParameterSlot, other: ParameterSlot) -> None:
    """Makes ``module.<name>`` another sharded parameter of the model: from now on both are gathered as one."""
    unit, tree = owner_of(slot), owner_of(other).tree
    unit.reshard()
    other.unit.reshard()
    shard = other.param
    slot.owners.remove((module, name))
    if not slot.owners:
        unit.slots.remove(slot)
    other.owners.append((module, name))
    module.__dict__[SLOTS][name] = other
    stored_parameters(module)[name] = shard
    relabel(tree.roots)


@torch.compiler.assume_constant_result
def find_ties_while_tracing(marker: torch.Tensor) -> None:
    """:func:`find_ties` in the model of a unit's marker; Dynamo calls it as it traces.

    The argument is a tensor. Dynamo would guard the identity of another object, so that models of one class could not
    share a graph; and that of torch 2.11 passes no other object.
    """
    unit = unit_of(marker)
    if unit is not None:
        _tie_found(unit.tree)


def find_ties(tree: Tree) -> None:
    """Ties parameters that were written into the ``_parameters`` of other modules."""
    if tree.may_be_tied:
        _tie_found(tree)


def _tie_found(tree: Tree) -> None:
    tree.may_be_tied = False
    first: dict[int, ParameterSlot] = {}
    for unit in tree.units():
        for slot in list(unit.slots):
            assert isinstance(slot, ParameterSlot)
            for module, name in list(slot.owners):
                param = stored_parameters(module).get(name)
                other = first.setdefault(id(param), slot) if param is not None else slot
                if other is not slot:
                    tie(module, name, slot, other)


def note_whole_parameters(modules: Iterable[nn.Module]) -> None:
    """Notes which parameters ``fully_shard`` has left whole, as ``ignored_params`` says."""
    for module in modules:
        module.__dict__[_WHOLE] = frozenset(path for path, _ in _whole_parameters(module))


def _whole_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for wrapped_path, module in root.named_modules():
        path = [part for part in wrapped_path.split(".") if part not in WRAPPERS and part]
        slots = module.__dict__.get(SLOTS, {})
        for name, param in (stored_parameters(module) if slots else module._parameters).items():
            if param is not None and name not in slots and not isinstance(param, DTensor):
                yield ".".join([*path, name]), param


def tell_added(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A hook before each step of an optimizer: its first one with parameters that nobody shards warns of them.

    A new head, a further layer, adapters. FSDP2 trains them in silence, to other values on each rank.
    """
    if torch.compiler.is_compiling():
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if vars(optimizer).get(_LOOKED_AT) == len(params):
        return
    vars(optimizer)[_LOOKED_AT] = len(params)
    names = _added(params)
    if names:
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"graphshard: {some} came into the model after fully_shard, so no unit shards them or averages their "
            "gradients, and each rank trains values of its own: call fully_shard on the modules that were added, then "
            "make the optimizer; or average the gradients yourself",
            stacklevel=3,
        )


def _added(params: Sequence[Any]) -> list[str]:
    """The names of trained parameters that belong to the model of others, and were not there when it was sharded."""
    whole = {id(param) for param in params if not isinstance(param, DTensor) and param.requires_grad}
    if not whole:
        return []
    slots = [slot_of_shard(param) for param in params if isinstance(param, DTensor)]
    trees: dict[int, Tree] = {id(slot.unit.tree): slot.unit.tree for slot in slots if slot is not None}
    roots = [root for tree in trees.values() if tree.groups() for root in tree.roots]
    found = {
        id(param): path for root in roots for path, param in _whole_parameters(root) if id(param) in whole
    }
    for module in (module for root in roots if found for module in root.modules()):
        if noted := module.__dict__.get(_WHOLE):
            for path, param in _whole_parameters(module):
                if path in noted:
                    found.pop(id(param), None)
    return list(found.values())
