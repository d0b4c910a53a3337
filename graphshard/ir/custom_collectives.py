"""Ops that call the collectives a user set in place of those of the process group.

``FSDPModule.set_custom_all_gather`` and its relatives take Python objects, and a graph cannot hold an object. So these
ops take the unit's handle and find the object through it when they run. They have the form of the collectives that they
replace: a result that is waited for, and the name of a process group among the arguments. So passes bucket and schedule
them alike, and an object is called once per unit and group (a reduction: of each dtype), with one flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import group_by_name
from .handles import attribute_of

#: The attribute by which a unit's handle holds its :class:`UserComms`.
COMMS = "_graphshard_comms"

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}

torch.library.define(
    "graphshard::custom_all_gather", "(Tensor shard, int group_size, str group_name, Tensor handle) -> Tensor"
)
torch.library.define(
    "graphshard::custom_reduce_scatter",
    "(Tensor full, str reduce_op, int group_size, str group_name, Tensor handle) -> Tensor",
)
torch.library.define(
    "graphshard::all_reduce_hook", "(Tensor reduced, str reduce_op, str group_name, Tensor handle) -> Tensor"
)


@dataclass(eq=False, kw_only=True)
class UserComms:
    """The objects that the user set for a unit; None for the collective of the process group.

    Attributes:
        all_gather, reduce_scatter: objects with the interface of ``AllGather`` and ``ReduceScatter`` in
            ``torch.distributed.fsdp``: ``allocate(size, dtype=, device=)`` makes a buffer, a call communicates from one
            buffer to another.
        all_reduce_hook: changes the flat sum in place before it is divided and cast.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    all_reduce_hook: Callable[[Tensor], Any] | None = None

    def names(self) -> str:
        """The names of those that are set, joined by ","; the argument ``custom`` of the shard ops."""
        return ",".join(name for name, value in vars(self).items() if value is not None)


@torch.library.impl("graphshard::custom_all_gather", "CompositeExplicitAutograd")
def custom_all_gather(shard: Tensor, group_size: int, group_name: str, handle: Tensor) -> Tensor:
    """All-gather by the unit's object: ``[n, ...]`` on each rank to ``[ranks * n, ...]``.

    As in FSDP2, the input is this rank's slice of the output buffer. The result is a copy, because the object may
    return the same buffer each time.
    """
    comm = attribute_of(handle, COMMS).all_gather
    group = group_by_name(group_name)
    numel = shard.numel()
    whole = comm.allocate((numel * group_size,), dtype=shard.dtype, device=shard.device)
    mine = whole.narrow(0, numel * group.rank(), numel)
    mine.copy_(shard.reshape(-1))
    _finish(comm(output_tensor=whole, input_tensor=mine, group=group, async_op=False))
    return whole.clone().view(group_size * shard.shape[0], *shard.shape[1:])


@torch.library.impl("graphshard::custom_reduce_scatter", "CompositeExplicitAutograd")
def custom_reduce_scatter(
    full: Tensor, reduce_op: str, group_size: int, group_name: str, handle: Tensor
) -> Tensor:
    """Reduce-scatter by the unit's object: ``[ranks * n, ...]`` to ``[n, ...]``."""
    comm = attribute_of(handle, COMMS).reduce_scatter
    source = comm.allocate((full.numel(),), dtype=full.dtype, device=full.device)
    source.copy_(full.reshape(-1))
    piece = comm.allocate((full.numel() // group_size,), dtype=full.dtype, device=full.device)
    group, op = group_by_name(group_name), _REDUCE_OPS[reduce_op]
    _finish(comm(output_tensor=piece, input_tensor=source, group=group, op=op, async_op=False))
    return piece.clone().view(full.shape[0] // group_size, *full.shape[1:])


@torch.library.impl("graphshard::all_reduce_hook", "CompositeExplicitAutograd")
def all_reduce_hook(reduced: Tensor, reduce_op: str, group_name: str, handle: Tensor) -> Tensor:
    """A copy of ``reduced``, of any shape, after the unit's hook has changed it in place."""
    result = reduced.clone()
    attribute_of(handle, COMMS).all_reduce_hook(result.view(-1))
    return result


@torch.library.register_fake("graphshard::custom_all_gather")
def _(shard: Tensor, group_size: int, group_name: str, handle: Tensor) -> Tensor:
    return shard.new_empty([group_size * shard.shape[0], *shard.shape[1:]])


@torch.library.register_fake("graphshard::custom_reduce_scatter")
def _(full: Tensor, reduce_op: str, group_size: int, group_name: str, handle: Tensor) -> Tensor:
    return full.new_empty([full.shape[0] // group_size, *full.shape[1:]])


@torch.library.register_fake("graphshard::all_reduce_hook")
def _(reduced: Tensor, reduce_op: str, group_name: str, handle: Tensor) -> Tensor:
    return torch.empty_like(reduced)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


CUSTOM_ALL_GATHER = torch.ops.graphshard.custom_all_gather.default
CUSTOM_REDUCE_SCATTER = torch.ops.graphshard.custom_reduce_scatter.default
ALL_REDUCE_HOOK = torch.ops.graphshard.all_reduce_hook.default
