"""Copies into and out of a bucket, and the sum of its rows, as ops of their own.

A bucket is rank-major: for each rank a row that holds every member's piece for that rank, one after
the other. Writing them as ops keeps them visible in the graph (no hidden ones), keeps Inductor
from fusing them with compute that waits for another bucket, and needs no kernel to be generated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._compat import over_memory
from .shard_rows import lie_in_a_row

# Plain dispatcher kernels: these ops run in compiled graphs, after autograd, dozens of times a step,
# where the Python layers of torch.library.custom_op cost more than the copies of small units.
torch.library.define("graphshard::pack", "(Tensor[] pieces, SymInt num_rows) -> Tensor")
torch.library.define("graphshard::join", "(Tensor(a)[] pieces) -> Tensor(a)")
torch.library.define("graphshard::join_parts", "(Tensor[] parts, SymInt num_rows) -> Tensor")
torch.library.define("graphshard::unpack", "(Tensor bucket, SymInt num_rows, SymInt[] sizes) -> Tensor[]")
torch.library.define("graphshard::add_rows", "(Tensor bucket, SymInt num_rows, bool is_mean) -> Tensor")


@torch.library.impl("graphshard::pack", "CompositeExplicitAutograd")
def pack(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    """Concatenates ``pieces``, each split into ``num_rows`` equal parts, row by row.

    Args:
        pieces: tensors of one dtype, any shapes; each numel divisible by ``num_rows``.
        num_rows: 1 before a gather, the group's size before a reduce-scatter.

    Returns:
        A 1-D tensor with the elements of all pieces.
    """
    if num_rows == 1:
        return torch.cat([piece.reshape(-1) for piece in pieces])
    return torch.cat([piece.reshape(num_rows, -1) for piece in pieces], 1).view(-1)


@torch.library.impl("graphshard::join", "CompositeExplicitAutograd")
def join(pieces: Sequence[Tensor]) -> Tensor:
    """The part of a row that ``pieces`` make up (:mod:`graphshard.ir.shard_rows`): a view, with no copy.

    Args:
        pieces: contiguous tensors of one dtype, in the order of their places.

    Returns:
        A 1-D tensor with the elements of all pieces, which keeps them alive. Where these are no neighbours, because a
        user put another tensor in the place of one, it is made of copies.
    """
    if not lie_in_a_row(pieces):
        return torch.cat([piece.reshape(-1) for piece in pieces])
    joined = over_memory(pieces[0], sum(piece.numel() for piece in pieces))
    joined.__dict__["pieces"] = tuple(pieces)
    return joined


@torch.library.impl("graphshard::join_parts", "CompositeExplicitAutograd")
def join_parts(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """What a collective that was split would have given: as ``pack``, of results in place of inputs.

    Args:
        parts: results of the parts, of one dtype, in their order.
        num_rows: the group's size behind a gather, whose parts hold a row of each rank; 1 behind a reduction.

    Returns:
        A 1-D tensor with the elements of all parts.
    """
    return PACK(parts, num_rows)


@torch.library.impl("graphshard::unpack", "CompositeExplicitAutograd")
def unpack(bucket: Tensor, num_rows: int, sizes: Sequence[int]) -> list[Tensor]:
    """The inverse of ``pack``: one contiguous 1-D tensor per member.

    Args:
        bucket: 1-D tensor of ``num_rows * sum(sizes)`` elements.
        num_rows: rows of the bucket (the group's size after a gather).
        sizes: elements of each member in one row.
    """
    if num_rows == 1:
        return list(torch.split_with_sizes_copy(bucket, sizes))
    pieces = torch.split_with_sizes_copy(bucket.view(num_rows, -1), sizes, 1)
    return [piece.view(-1) for piece in pieces]


@torch.library.impl("graphshard::add_rows", "CompositeExplicitAutograd")
def add_rows(bucket: Tensor, num_rows: int, is_mean: bool) -> Tensor:
    """The sum or the mean of the rows, added in their order; three 16-bit floats or more are added in 32 bits.

    Args:
        bucket: ``num_rows`` equal rows one after the other along dim 0, floating-point.
        num_rows: what a reduction got from as many ranks.
        is_mean: divide by ``num_rows``.

    Returns:
        A tensor like one row.
    """
    rows = bucket.view(num_rows, bucket.shape[0] // num_rows, *bucket.shape[1:])
    if num_rows > 2 and bucket.dtype.itemsize < 4:
        total = rows.sum(0)
    else:
        total = rows[0] + rows[1] if num_rows > 1 else rows[0].clone()
        for row in rows[2:]:
            total += row
    # Not rows.mean(): of 16-bit rows it holds a copy in 32 bits.
    return total.div_(num_rows) if is_mean else total


@torch.library.register_fake("graphshard::pack")
def _(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    return pieces[0].new_empty(sum(piece.numel() for piece in pieces))


@torch.library.register_fake("graphshard::join")
def _(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0].new_empty(sum(piece.numel() for piece in pieces))


@torch.library.register_fake("graphshard::join_parts")
def _(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts))


@torch.library.register_fake("graphshard::unpack")
def _(bucket: Tensor, num_rows: int, sizes: Sequence[int]) -> list[Tensor]:
    return [bucket.new_empty(num_rows * size) for size in sizes]


@torch.library.register_fake("graphshard::add_rows")
def _(bucket: Tensor, num_rows: int, is_mean: bool) -> Tensor:
    return bucket.new_empty(bucket.shape[0] // num_rows, *bucket.shape[1:])


PACK = torch.ops.graphshard.pack.default
JOIN = torch.ops.graphshard.join.default
JOIN_PARTS = torch.ops.graphshard.join_parts.default
UNPACK = torch.ops.graphshard.unpack.default
ADD_ROWS = torch.ops.graphshard.add_rows.default
