"""Ops that copy into and out of a bucket, and that sum the rows of one.

A bucket is rank-major: it has a row for each rank, which holds that rank's piece of every member, one after the other.
A bucket of pieces of several dtypes holds their bytes (``uint8``).
Because these are ops, the copies are visible in the graph, Inductor does not fuse them with compute that waits for
another bucket, and no kernel is generated for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._compat import over_memory
from .shard_rows import lie_in_a_row

# Plain dispatcher kernels: these ops run dozens of times a step in compiled graphs, below autograd. The Python layers
# of torch.library.custom_op would cost more than the copies of small units.
torch.library.define("graphshard::pack", "(Tensor[] pieces, SymInt num_rows) -> Tensor")
torch.library.define("graphshard::join", "(Tensor(a)[] pieces) -> Tensor(a)")
torch.library.define("graphshard::join_parts", "(Tensor[] parts, SymInt num_rows) -> Tensor")
torch.library.define(
    "graphshard::unpack", '(Tensor bucket, SymInt num_rows, SymInt[] sizes, str dtypes="") -> Tensor[]'
)
torch.library.define("graphshard::add_rows", "(Tensor bucket, SymInt num_rows, bool is_mean) -> Tensor")


@torch.library.impl("graphshard::pack", "CompositeExplicitAutograd")
def pack(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    """Concatenates ``pieces``, each split into ``num_rows`` equal parts, row by row.

    Args:
        pieces: tensors of any shapes and dtypes; ``num_rows`` divides the numel of each.
        num_rows: 1 before a gather, the group's size before a reduce-scatter.

    Returns:
        A 1-D tensor with the elements of all pieces; if these are of several dtypes, with their bytes, ``uint8``.
    """
    if len({piece.dtype for piece in pieces}) > 1:
        pieces = [piece.reshape(-1).view(torch.uint8) for piece in pieces]
    if num_rows == 1:
        return torch.cat([piece.reshape(-1) for piece in pieces])
    return torch.cat([piece.reshape(num_rows, -1) for piece in pieces], 1).view(-1)


@torch.library.impl("graphshard::join", "CompositeExplicitAutograd")
def join(pieces: Sequence[Tensor]) -> Tensor:
    """The part of a row that ``pieces`` fill (:mod:`graphshard.ir.shard_rows`), without a copy.

    Args:
        pieces: contiguous tensors of one dtype, in the order of their places.

    Returns:
        A 1-D view of the elements of all pieces, which keeps them alive. If the pieces are not neighbours, because a
        user replaced one, a copy.
    """
    if not lie_in_a_row(pieces):
        return torch.cat([piece.reshape(-1) for piece in pieces])
    joined = over_memory(pieces[0], sum(piece.numel() for piece in pieces))
    joined.__dict__["pieces"] = tuple(pieces)
    return joined


@torch.library.impl("graphshard::join_parts", "CompositeExplicitAutograd")
def join_parts(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Joins the results of the parts of a split collective into the result of the whole; computes as ``pack``.

    Args:
        parts: results of the parts, of one dtype, in order.
        num_rows: the group's size after a gather, whose parts hold a row of each rank; 1 after a reduction.

    Returns:
        A 1-D tensor with the elements of all parts.
    """
    return PACK(parts, num_rows)


@torch.library.impl("graphshard::unpack", "CompositeExplicitAutograd")
def unpack(bucket: Tensor, num_rows: int, sizes: Sequence[int], dtypes: str = "") -> list[Tensor]:
    """The inverse of ``pack``: one contiguous 1-D tensor for each member.

    Args:
        bucket: 1-D tensor of ``num_rows * sum(sizes)`` elements.
        num_rows: rows of the bucket: the group's size after a gather.
        sizes: elements of the bucket that each member fills in one row.
        dtypes: those of the members (:func:`dtypes_text`), if the bucket holds bytes; "" for the bucket's own.
    """
    if num_rows == 1:
        pieces = list(torch.split_with_sizes_copy(bucket, sizes))
    else:
        pieces = [
            piece.view(-1) for piece in torch.split_with_sizes_copy(bucket.view(num_rows, -1), sizes, 1)
        ]
    if not dtypes:
        return pieces
    # Each copy has a storage of its own, so bytes of any dtype are aligned.
    return [
        piece.view(dtype)
        for piece, dtype in zip(pieces, _dtypes_of(bucket, dtypes, len(pieces)), strict=True)
    ]


def dtypes_text(dtypes: Sequence[torch.dtype]) -> str:
    """What ``unpack`` takes for pieces of these dtypes: "float32,bfloat16"; "" if all are equal."""
    return ",".join(str(dtype).removeprefix("torch.") for dtype in dtypes) if len(set(dtypes)) > 1 else ""


def _dtypes_of(bucket: Tensor, dtypes: str, num_pieces: int) -> list[torch.dtype]:
    return [getattr(torch, name) for name in dtypes.split(",")] if dtypes else [bucket.dtype] * num_pieces


@torch.library.impl("graphshard::add_rows", "CompositeExplicitAutograd")
def add_rows(bucket: Tensor, num_rows: int, is_mean: bool) -> Tensor:
    """The sum or the mean of the rows of a bucket, added in order; 16-bit rows, if three or more, in 32 bits.

    Args:
        bucket: ``num_rows`` equal rows one after the other along dim 0, floating-point.
        num_rows: number of ranks whose pieces are added.
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
    # rows.mean() would hold a 32-bit copy of 16-bit rows.
    return total.div_(num_rows) if is_mean else total


@torch.library.register_fake("graphshard::pack")
def _(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    if len({piece.dtype for piece in pieces}) > 1:
        num_bytes = sum(piece.numel() * piece.dtype.itemsize for piece in pieces)
        return pieces[0].new_empty(num_bytes, dtype=torch.uint8)
    return pieces[0].new_empty(sum(piece.numel() for piece in pieces))


@torch.library.register_fake("graphshard::join")
def _(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0].new_empty(sum(piece.numel() for piece in pieces))


@torch.library.register_fake("graphshard::join_parts")
def _(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts))


@torch.library.register_fake("graphshard::unpack")
def _(bucket: Tensor, num_rows: int, sizes: Sequence[int], dtypes: str = "") -> list[Tensor]:
    return [
        bucket.new_empty(num_rows * size // (dtype.itemsize // bucket.dtype.itemsize), dtype=dtype)
        for size, dtype in zip(sizes, _dtypes_of(bucket, dtypes, len(sizes)), strict=True)
    ]


@torch.library.register_fake("graphshard::add_rows")
def _(bucket: Tensor, num_rows: int, is_mean: bool) -> Tensor:
    return bucket.new_empty(bucket.shape[0] // num_rows, *bucket.shape[1:])


PACK = torch.ops.graphshard.pack.default
JOIN = torch.ops.graphshard.join.default
JOIN_PARTS = torch.ops.graphshard.join_parts.default
UNPACK = torch.ops.graphshard.unpack.default
ADD_ROWS = torch.ops.graphshard.add_rows.default
