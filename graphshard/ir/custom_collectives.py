"""Collectives that a user put in place of the process group's own, as ops.

``FSDPModule.set_custom_all_gather`` and its relatives take Python objects. A graph cannot hold one,
so these ops take the unit's handle and find the object there when they run: opaque calls at a fixed
place of a fixed order, which is what a collective is. They look like the collectives they replace
(a result that is waited for, a process group among the arguments), so passes bucket and schedule
them alike: an object is called once per unit, dtype and group, with one flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import group_by_name

#: Where a unit's handle keeps its :class:`UserComms`.
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
    """The objects a unit's user gave; None where the process group does it.

    Attributes:
        all_gather, reduce_scatter: as ``torch.distributed.fsdp``'s ``AllGather`` and ``ReduceScatter``:
            ``allocate(size, dtype=, device=)`` makes a buffer, a call communicates from one to another.
        all_reduce_hook: changes the flat sum in place before it is divided and cast.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    all_reduce_hook: Callable[[Tensor], Any] | None = None

    def names(self) -> str:
        """Those that are set, joined by ","; the argument ``custom`` of the shard ops."""
        return ",".join(name for name, value in vars(self).items() if value is not None)


@torch.library.impl("graphshard::custom_all_gather", "CompositeExplicitAutograd")
def custom_all_gather(shard: Tensor, group_size: int, group_name: str, handle: Tensor) -> Tensor:
    """All-gather with the unit's own object: ``[n, ...]`` on each rank to ``[ranks * n, ...]``.

    As in FSDP2 the input is this rank's slice of the output buffer. The result is a copy: the object
    may hand out the same buffer each time.
    """
    comm = getattr(handle, COMMS).all_gather
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
    """Reduce-scatter with the unit's own object: ``[ranks * n, ...]`` to ``[n, ...]``."""
    comm = getattr(handle, COMMS).reduce_scatter
    source = comm.allocate((full.numel(),), dtype=full.dtype, device=full.device)
    source.copy_(full.reshape(-1))
    piece = comm.allocate((full.numel() // group_size,), dtype=full.dtype, device=full.device)
    group, op = group_by_name(group_name), _REDUCE_OPS[reduce_op]
    _finish(comm(output_tensor=piece, input_tensor=source, group=group, op=op, async_op=False))
    return piece.clone().view(full.shape[0] // group_size, *full.shape[1:])


@torch.library.impl("graphshard::all_reduce_hook", "CompositeExplicitAutograd")
def all_reduce_hook(reduced: Tensor, reduce_op: str, group_name: str, handle: Tensor) -> Tensor:
    """What the unit's hook makes of a copy of ``reduced``; any shape, unchanged."""
    result = reduced.clone()
    getattr(handle, COMMS).all_reduce_hook(result.view(-1))
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
