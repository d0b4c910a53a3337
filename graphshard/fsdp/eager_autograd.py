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
from .parameter_slot import ParameterSlot, even_offset, local_shard
from .shard_versions import FullRead, version_of
from .tensor_trees import tensors_in
from .tree import Tree
from .unit import Unit, owner_of


class _GatherUnit(torch.autograd.Function):
    """From the shards of a unit to its full parameters; backward: from their gradients to those of the shards."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, slots: list[ParameterSlot], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # What a gather returns are views, to which autograd lets nobody write in place.
        held = [slot.as_held(full) for slot, full in zip(slots, unit.gather(slots), strict=True)]
        fulls = tuple(full.data if type(full) is Tensor else full for full in held)
        ctx.unit = unit
        ctx.is_complex = [slot.is_complex for slot in slots]
        ctx.calls = [
            gradient_call(
                UnshardCall(None, unit.handle, *slot.arguments), None, shard.shape, shard.dtype, shard.device
            )
            for slot, shard in zip(slots, shards, strict=True)
        ]
        frozen = [full for slot, full in zip(slots, fulls, strict=True) if not slot.param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return fulls

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = {index: grad for index, grad in enumerate(grads) if grad is not None}
        sent = [
            torch.view_as_real(grad.resolve_conj()) if ctx.is_complex[index] else grad
            for index, grad in given.items()
        ]
        calls = [ctx.calls[index]._replace(grad=grad) for index, grad in zip(given, sent, strict=True)]
        reduced = ctx.unit.reduce(calls)
        result: list[Tensor | None] = [None] * len(grads)
        for index, grad in zip(given, reduced, strict=True):
            # The backward of view_as_real makes complex numbers of it.
            result[index] = even_offset(grad) if ctx.is_complex[index] and grad is not None else grad
        return (None, None, *result)


class _ReadShard(torch.autograd.Function):
    """The shard itself as the full parameter, where one rank holds it: no view, so a forward may write to it."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return shard.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def full_parameter(slot: ParameterSlot) -> Tensor:
    """The full parameter, as a forward reads it; the first one read in a forward of its unit gathers the unit.

    A parameter that another unit reads, or a checkpointed region that runs again, is gathered alone.
    """
    unit = owner_of(slot)
    if unit.in_use is not None:
        if slot.name not in unit.in_use and slot.needs_op:
            _gather_all(unit, unit.in_use)
        elif slot.name not in unit.in_use:
            _gather(unit, [slot], unit.in_use)
        return unit.in_use[slot.name].shown
    tree = unit.tree
    if tree.running and slot.name in tree.read_alone:
        return tree.read_alone[slot.name][1].shown
    unit.write_back()
    alone: dict[str, FullRead] = {}
    _gather(unit, [slot], alone)
    if tree.in_forward:
        tree.read_alone[slot.name] = (unit, alone[slot.name])
    return alone[slot.name].shown


def take_part_unused(unit: Unit) -> None:
    """Gathers a unit that reduces zeros for unused parameters, also if this rank reads none of them."""
    if torch.is_grad_enabled():
        unit.mark_run()
    if unit.in_use is not None and any(slot.needs_op for slot in unit.slots):
        _gather_all(unit, unit.in_use)


def finish_reads(unit: Unit) -> None:
    """Writes what a forward of the unit has changed in place back to the shards, at its end."""
    unit.write_back()
    if unit.tree.running == [unit]:
        unit.tree.write_back()


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


def _gather_all(unit: Unit, in_use: dict[str, FullRead]) -> None:
    _gather(unit, [slot for slot in unit.slots if slot.needs_op and slot.name not in in_use], in_use)
    for other in unit.forward_prefetch:
        other.prefetch()


def _gather(unit: Unit, slots: list[ParameterSlot], in_use: dict[str, FullRead]) -> None:
    # Also under no_grad: a parameter first read there may be read again where gradients are needed. A tensor of
    # inference mode has no version, so a write to it would go unnoticed.
    with torch.inference_mode(False), torch.enable_grad():
        if slots and not slots[0].needs_op:
            fulls = tuple(_ReadShard.apply(local_shard(slot)) for slot in slots)
        else:
            fulls = _GatherUnit.apply(unit, slots, *(slot.as_sent(local_shard(slot)) for slot in slots))
        for slot, full in zip(slots, fulls, strict=True):
            in_use[slot.name] = FullRead.of(full, slot.as_read(full), version_of(slot.param))
