"""``FSDPModule``: the methods a module has once it was given to ``fully_shard``.

Names, arguments and meaning are those of ``torch.distributed.fsdp.FSDPModule``. The setters take
effect at once: between a forward and its backward, and between two micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .copying import copy_sharded
from .errors import OptionError, ParameterStateError
from .unit import UNIT, PendingGather, Unit, slots_of


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns: :meth:`wait` before the parameters are used."""

    def __init__(self, pending: PendingGather) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Waits for the gather; the module's parameters are the full ones from then on."""
        self._pending.wait()


class FSDPModule:
    """Mixed into the class of each module given to :func:`graphshard.fully_shard`.

    The class of ``module`` becomes ``FSDP<Class>``, a subclass of both; the object stays the same.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A model of its own: own shards, units and forward; as with any module, without gradients."""
        return copy_sharded(self, memo, has_own=hasattr(super(), "__deepcopy__"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """nn.Module's, on the way through which every ``load_state_dict`` passes; wants shards."""
        _refuse_unsharded_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters (not those of units below) and keeps them until :meth:`reshard`.

        ``module.parameters()`` shows the full parameters meanwhile; writes to them are lost.

        Args:
            async_op: return a handle at once and gather in the background.
        """
        pending = _unit(self).start_unshard()
        if async_op:
            return UnshardHandle(pending)
        pending.wait()
        return None

    def reshard(self) -> None:
        """Frees this unit's gathered parameters; ``module.parameters()`` shows the shards again."""
        _unit(self).reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients; False adds them up unreduced, in the reduction's dtype.

        The next backward that reduces includes what was added up.
        """
        for unit in _units(self, recurse):
            unit.reduce_grads = unit.all_reduce_grads = _flag(
                requires_gradient_sync, "requires_gradient_sync"
            )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards sum gradients over the replicate axis; False keeps each group's sum."""
        for unit in _units(self, recurse):
            unit.all_reduce_grads = _flag(requires_all_reduce, "requires_all_reduce")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after the forward; compiled graphs are traced again."""
        value = _flag(reshard_after_forward, "reshard_after_forward")
        for unit in _units(self, recurse):
            unit.reshard_after_forward = value
            unit.refresh()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters kept from the forward are freed by the backward; False keeps them on."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = _flag(reshard_after_backward, "reshard_after_backward")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False leaves what a backward did not reduce for a later one; for the whole model."""
        _unit(self).tree.is_last_backward = _flag(is_last_backward, "is_last_backward")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What this unit's summed gradients are divided by, in place of the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            raise OptionError(f"set_gradient_divide_factor: {factor!r} must be a positive number")
        unit = _unit(self)
        unit.divide_factor = float(factor)
        unit.refresh()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether this unit's gradients are summed and divided, never averaged by the process group."""
        unit = _unit(self)
        unit.force_sum = _flag(enable, "enable")
        unit.refresh()


def _refuse_unsharded_state(module: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """A plain tensor cannot be copied into a shard, and assigned it would silently stay unsharded."""
    plain = []
    for path, owner in module.named_modules(prefix=prefix.removesuffix(".")):
        for name, _ in slots_of(owner):
            key = f"{path}.{name}" if path else name
            value = state_dict.get(key)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                plain.append(f"{key} {tuple(value.shape)}")
    if plain:
        shown = ", ".join(plain[:5]) + (f" and {len(plain) - 5} more" if len(plain) > 5 else "")
        raise ParameterStateError(
            f"load_state_dict: {len(plain)} value(s) of an unsharded model: {shown}; load them with "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, "
            "options=StateDictOptions(full_state_dict=True)), or cut each with distribute_tensor() first"
        )


def _unit(module: Any) -> Unit:
    return module.__dict__[UNIT]


def _units(module: Any, recurse: bool) -> Iterator[Unit]:
    assert isinstance(module, nn.Module)
    seen: set[int] = set()
    for each in module.modules() if recurse else (module,):
        unit = each.__dict__.get(UNIT)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be True or False")
    return value
