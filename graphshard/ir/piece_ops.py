"""Ops that cut one rank's piece out of a full tensor and ask for the rank only when they run.

A slice at the rank's offset would make the graph differ from rank to rank. The op at level 1 is ``keep_piece``, which
also returns the full tensor. What the forward computes with that tensor then depends on the op, so a partitioner puts
the op in the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._compat import group_by_name
from .params import padded_rows, padded_shape

torch.library.define("graphshard::spread", "(Tensor full, int dim, int group_size, str group_name) -> Tensor")


@torch.library.impl("graphshard::spread", "CompositeExplicitAutograd")
def spread(full: Tensor, dim: int, group_size: int, group_name: str) -> Tensor:
    """This rank's padded piece of ``full``, cut along ``dim`` over the ranks of a group.

    Args:
        full: the whole tensor, equal on all ranks of the group.
        dim: the dim that is cut.
        group_size: number of ranks of the group.
        group_name: name of the group; the rank in it selects the piece.

    Returns:
        A contiguous tensor with ``ceil(full.shape[dim] / group_size)`` rows; missing rows are zeros.
    """
    return piece_of(full, dim, group_size, group_by_name(group_name).rank())


def piece_of(full: Tensor, dim: int, group_size: int, rank: int) -> Tensor:
    """What :func:`spread` returns on ``rank`` of the group."""
    rows = padded_rows(full.shape[dim], group_size)
    start = min(rank * rows, full.shape[dim])
    here = min(rows, full.shape[dim] - start)
    if here == rows:
        return full.narrow(dim, start, rows).clone(memory_format=torch.contiguous_format)
    piece = full.new_zeros(padded_shape(full.shape, dim, group_size))
    piece.narrow(dim, 0, here).copy_(full.narrow(dim, start, here))
    return piece


@torch.library.register_fake("graphshard::spread")
def _(full: Tensor, dim: int, group_size: int, group_name: str) -> Tensor:
    return full.new_empty(padded_shape(full.shape, dim, group_size))


torch.library.define(
    "graphshard::keep_piece", "(Tensor full, int dim, int group_size, str group_name) -> (Tensor, Tensor)"
)


@torch.library.impl("graphshard::keep_piece", "CompositeExplicitAutograd")
def keep_piece(full: Tensor, dim: int, group_size: int, group_name: str) -> tuple[Tensor, Tensor]:
    """A copy of ``full``, and this rank's piece of it as in :func:`spread`."""
    return full.clone(), spread(full, dim, group_size, group_name)


@torch.library.register_fake("graphshard::keep_piece")
def _(full: Tensor, dim: int, group_size: int, group_name: str) -> tuple[Tensor, Tensor]:
    return full.new_empty(full.shape), full.new_empty(padded_shape(full.shape, dim, group_size))


KEEP_PIECE = torch.ops.graphshard.keep_piece.default
SPREAD = torch.ops.graphshard.spread.default
