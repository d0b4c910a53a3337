"""How a unit runs without a compiler: it is gathered as a whole and reduced as a whole.

The first parameter that a forward of the unit reads gathers all of them, in one autograd node. The backward of that
node reduces all gradients that the unit got. So one collective serves the unit each way, and ranks that read different
parameters still gather the same. Code that Dynamo traces reads parameters one by one
(:func:`graphshard.fsdp.sharded_class.read_parameter`) and does not come here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ir import UnshardCall, gradient_call
from .parameter_slot import ParameterSlot, local_shard
from .tensor_trees import tensors_in
from .tree import Tree
from .unit import Unit, owner_of


class _GatherUnit(torch.autograd.Function):
    """From the shards of a unit to its full parameters; backward: from their gradients to those of the shards."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, slots: list[ParameterSlot], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        fulls = unit.gather(slots)
        ctx.unit = unit
        ctx.calls = [
            gradient_call(
                UnshardCall(None, unit.handle, *slot.arguments), None, shard.shape, shard.dtype, shard.device
            )
            for slot, shard in zip(slots, shards, strict=True)
        ]
        frozen = [full for slot, full in zip(slots, fulls, strict=True) if not slot.param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(fulls)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [index for index, grad in enumerate(grads) if grad is not None]
        reduced = ctx.unit.reduce([ctx.calls[index]._replace(grad=grads[index]) for index in given])
        result: list[Tensor | None] = [None] * len(grads)
        for index, grad in zip(given, reduced, strict=True):
            result[index] = grad
        return (None, None, *result)


def full_parameter(slot: ParameterSlot) -> Tensor:
    """The full parameter; the first one read in a forward of its unit gathers the unit.

    A parameter that another unit reads, or a checkpointed region that runs again, is gathered alone.
    """
    unit = owner_of(slot)
    in_use = unit.in_use
    if in_use is None:
        in_use = {}
        _gather(unit, [slot], in_use)
    elif slot.name not in in_use:
        _gather_all(unit, in_use)
    return in_use[slot.name]


def take_part_unused(unit: Unit) -> None:
    """Gathers a unit that reduces zeros for unused parameters, also if this rank reads none of them."""
    if torch.is_grad_enabled():
        unit.mark_run()
    if unit.in_use is not None and any(slot.needs_op for slot in unit.slots):
        _gather_all(unit, unit.in_use)


def watch_outputs(tree: Tree, outputs: Any) -> None:
    """Makes a backward of the outputs run the end of the backward, also if it reaches no parameter on this rank."""
    if not torch.is_grad_enabled() or not any(unit.reduces_unused for unit in tree.units()):
        return
    for output in tensors_in(outputs):
        if output.requires_grad:
            output.register_hook(lambda _: tree.queue_end_of_backward())


def drop_prefetched(tree: Tree) -> None:
    """Frees the results of gathers that were started for units which did not run."""
    for unit in tree.units():
        unit.drop_prefetched()


def _gather_all(unit: Unit, in_use: dict[str, Tensor]) -> None:
    _gather(unit, [slot for slot in unit.slots if slot.needs_op], in_use)
    for other in unit.forward_prefetch:
        other.prefetch()


def _gather(unit: Unit, slots: list[ParameterSlot], in_use: dict[str, Tensor]) -> None:
    # Also under no_grad: a parameter first read there may be read again where gradients are needed.
    with torch.enable_grad():
        fulls = _GatherUnit.apply(unit, slots, *map(local_shard, slots))
    in_use.update(zip((slot.name for slot in slots), fulls, strict=True))
