"""The usual gather of an uncompiled unit in few steps of the host: whole rows of plain tensors, through one bucket.

It does what :class:`~graphshard.fsdp.state.eager_collectives.PendingGather` does, which serves all other cases. What
can be known before the shards are read is kept from one gather to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir import UnshardCall
from .eager_collectives import FlatGather, PendingGather
from .parameter_slot import ParameterSlot
from .tree import TreeUnit

Members = list[tuple[ParameterSlot, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBucket:
    """The parameters of one gather and what it does with them.

    Attributes:
        slots: the parameters.
        arguments: what their gathers are traced with, for all that a user may set.
        shapes: shapes of their shards, which the ranks cut evenly along dim 0.
        shard_dtypes: dtypes of these; :attr:`dtype` is that of the gather and of the full parameters.
        fulls: shapes of the full parameters.
        sizes: elements of their shards.
        first: a call of one of them, without its shard.
    """

    slots: list[ParameterSlot]
    arguments: list[tuple[Any, ...]]
    shapes: list[torch.Size]
    shard_dtypes: list[torch.dtype]
    dtype: torch.dtype
    fulls: list[torch.Size]
    sizes: list[int]
    first: UnshardCall

    @staticmethod
    def of(members: Members) -> PlainBucket | None:
        """The bucket of parameters with their shards, if this is the usual case."""
        calls = [UnshardCall(shard, None, *slot.arguments) for slot, shard in members]
        first = calls[0]
        dtypes = {call.shard.dtype if call.dtype is None else call.dtype for call in calls}
        dtype = dtypes.pop()
        is_usual = all(
            slot.is_plain
            and type(shard) is Tensor
            and shard.is_contiguous()
            and call.dim == 0
            and shard.shape[0] * call.group_size == call.shape[0]
            and (call.group_name, call.custom) == (first.group_name, "")
            for (slot, shard), call in zip(members, calls, strict=True)
        )
        if not is_usual or dtypes or first.group_size == 1 or dtype.itemsize == 1:
            return None
        return PlainBucket(
            slots=[slot for slot, _ in members],
            arguments=[slot.arguments for slot, _ in members],
            shapes=[shard.shape for _, shard in members],
            shard_dtypes=[shard.dtype for _, shard in members],
            dtype=dtype,
            fulls=[slot.shape for slot, _ in members],
            sizes=[shard.numel() for _, shard in members],
            first=first._replace(shard=None),
        )

    def is_of(self, members: Members) -> bool:
        """Whether the bucket is that of parameters with their shards."""
        if len(members) != len(self.slots):
            return False
        for (slot, shard), own, arguments, shape, dtype in zip(
            members, self.slots, self.arguments, self.shapes, self.shard_dtypes, strict=True
        ):
            if slot is not own or slot.arguments is not arguments or type(shard) is not Tensor:
                return False
            if shard.shape != shape or shard.dtype != dtype or not shard.is_contiguous():
                return False
        return True


def start_gather(unit: TreeUnit, members: Members) -> Pending:
    """Starts a gather of parameters with their shards, after the ranks have met."""
    if not members:
        return PendingGather(unit, members)
    first = members[0][0]
    bucket = first.bucket
    if not isinstance(bucket, PlainBucket) or not bucket.is_of(members):
        bucket = first.bucket = PlainBucket.of(members)
    return PendingGather(unit, members) if bucket is None else PlainGather(unit, members, bucket)


class PlainGather:
    """A gather of the parameters of a bucket that has started and was not waited for."""

    def __init__(self, unit: TreeUnit, members: Members, bucket: PlainBucket) -> None:
        call, shard = bucket.first, members[0][1]
        unit.meet_for_gather([slot.name for slot in bucket.slots], call, can_skip=shard.device.type == "cpu")
        flats = [piece.view(-1) for _, piece in members]
        self._flight: FlatGather | None = FlatGather.of(flats, sum(bucket.sizes), bucket.dtype, call)
        self._bucket = bucket

    def take(self) -> dict[str, Tensor]:
        """Waits. Returns the full parameters by name; none if they were taken before."""
        flight, self._flight = self._flight, None
        if flight is None:
            return {}
        flight.wait()
        bucket = self._bucket
        pieces = torch.split_with_sizes_copy(
            flight.gathered.view(bucket.first.group_size, -1), bucket.sizes, 1
        )
        return {
            slot.name: piece.view(full)
            for slot, piece, full in zip(bucket.slots, pieces, bucket.fulls, strict=True)
        }


#: A gather that has started; its ``take`` waits.
Pending = PlainGather | PendingGather
