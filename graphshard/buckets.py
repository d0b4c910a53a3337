"""Copies into and out of a bucket, as two ops of their own.

A bucket is rank-major: for each rank a row that holds every member's piece for that rank, one after
the other. Writing the copies as ops keeps them visible in the graph (no hidden ones), keeps Inductor
from fusing them with compute that waits for another bucket, and needs no kernel to be generated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("graphshard::pack", mutates_args=())
def pack(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    """Concatenates ``pieces``, each split into ``num_rows`` equal parts, row by row.

    Args:
        pieces: tensors of one dtype, any shapes; each numel divisible by ``num_rows``.
        num_rows: 1 before a gather, the group's size before a reduce-scatter.

    Returns:
        A 1-D tensor with the elements of all pieces.
    """
    return torch.cat([piece.reshape(num_rows, -1) for piece in pieces], 1).view(-1)


@pack.register_fake
def _(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    return pieces[0].new_empty(sum(piece.numel() for piece in pieces))


@torch.library.custom_op("graphshard::unpack", mutates_args=())
def unpack(bucket: Tensor, num_rows: int, sizes: Sequence[int]) -> list[Tensor]:
    """The inverse of ``pack``: one contiguous 1-D tensor per member.

    Args:
        bucket: 1-D tensor of ``num_rows * sum(sizes)`` elements.
        num_rows: rows of the bucket (the group's size after a gather).
        sizes: elements of each member in one row.
    """
    pieces = bucket.view(num_rows, -1).split(list(sizes), 1)
    return [piece.reshape(-1) if num_rows > 1 else piece.flatten().clone() for piece in pieces]


@unpack.register_fake
def _(bucket: Tensor, num_rows: int, sizes: Sequence[int]) -> list[Tensor]:
    return [bucket.new_empty(num_rows * size) for size in sizes]


PACK = torch.ops.graphshard.pack.default
UNPACK = torch.ops.graphshard.unpack.default
