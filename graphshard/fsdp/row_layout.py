"""Puts the shards of a unit one after the other in memory (:mod:`graphshard.ir.shard_rows`), and keeps them so."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..ir import ShardedShape, lie_in_a_row, moved_to_row, row_offsets
from .parameter_slot import stored_parameters
from .unit import Unit


def give_places(unit: Unit) -> None:
    """Gives each shard a place in a row of its unit, and moves it there; each process group has its own row."""
    slots = {slot.name: slot for slot in unit.slots if not (slot.is_extended or unit.settings.compute_device)}
    shapes = {
        name: ShardedShape(
            slot.axis.group_name, slot.shape, slot.dim, slot.axis.size, slot.param.dtype
        )
        for name, slot in slots.items()
    }  # fmt: skip
    for name, offset in row_offsets(shapes).items():
        slots[name].row_offset = offset
    lay_out(unit)


def lay_out(unit: Unit) -> None:
    """Moves shards that have a place in a row there, unless they are there."""
    rows: dict[tuple[str, torch.dtype, torch.device], list[DTensor]] = {}
    for slot in sorted(unit.slots, key=lambda slot: slot.row_offset):
        param = stored_parameters(slot.owners[0][0]).get(slot.owners[0][1]) if slot.owners else None
        if slot.row_offset < 0 or not isinstance(param, DTensor) or param.is_meta:
            continue
        local = param._local_tensor
        if type(local) is Tensor and local.is_contiguous():  # a fake tensor has no address
            rows.setdefault((slot.axis.group_name, local.dtype, local.device), []).append(param)
    for members in rows.values():
        pieces = [param._local_tensor for param in members]
        if not lie_in_a_row(pieces):
            for param, moved in zip(members, moved_to_row(pieces), strict=True):
                _replace_shard(param, moved)


def _replace_shard(param: DTensor, local: Tensor) -> None:
    """Gives a parameter another local tensor; the parameter object, its gradient and its attributes stay.

    An assignment would not do: torch 2.13 can trace a DTensor only if its storage offset is that of its local tensor.
    """
    fresh = nn.Parameter(DTensor(local, param._spec, requires_grad=False), requires_grad=param.requires_grad)
    fresh.grad = param.grad
    vars(fresh).update(vars(param))
    with suppress(RuntimeError):  # a compiled graph, for instance, holds the old one: it stays where it is
        torch.utils.swap_tensors(param, fresh)
