"""Rows: the shards of a unit lie one after the other in memory, so a gather of several needs no copy.

A rank that gathers a bucket sends its shards one after the other. If they are neighbours in memory, they are sent from
where they are. The place of a shard is part of how its parameter is gathered (``UnshardCall.row_offset``) and equal on
all ranks, so only parameters that are cut evenly along dim 0 have one. The op ``graphshard::join`` checks when a graph
runs that a shard lies at its place: a user may have replaced it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Alignment in bytes that generated code expects of a parameter: it reads vectors of this size.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of a shard: its row, its first element in the row, and its number of elements."""

    row: str
    first: int
    numel: int


class ShardedShape(NamedTuple):
    """A parameter, and how it is cut; ``dtype`` is that of the shards.

    Parameters with the same ``row`` share one. They must belong to one unit and one process group, because with tensor
    or expert parallelism ranks of different groups may hold shards of different sizes.
    """

    row: str
    shape: Sequence[int]
    dim: int
    num_ranks: int
    dtype: torch.dtype

    @property
    def has_place(self) -> bool:
        """Whether shards are of one size, cut along dim 0, and keep the next one aligned.

        Complex shards have none: they travel as reals.
        """
        is_even = self.dim == 0 and self.shape[0] % self.num_ranks == 0
        num_bytes = math.prod(self.shape) // self.num_ranks * self.dtype.itemsize
        is_aligned = num_bytes > 0 and num_bytes % ALIGNMENT == 0
        return self.num_ranks > 1 and is_even and is_aligned and not self.dtype.is_complex


def row_offsets(parameters: Mapping[str, ShardedShape]) -> dict[str, int]:
    """The first element of each shard in its row, by name; -1 for a parameter without a place.

    Shards of one dtype are neighbours, in the given order but biases last. Most backwards do not gather biases again,
    so the shards that they do gather stay neighbours.
    """
    offsets = dict.fromkeys(parameters, -1)
    ends = dict.fromkeys((each.row for each in parameters.values()), 0)
    for name in sorted(parameters, key=lambda name: (str(parameters[name].dtype), name.endswith("bias"))):
        each = parameters[name]
        if each.has_place:
            offsets[name] = ends[each.row]
            ends[each.row] += math.prod(each.shape) // each.num_ranks
    return offsets


def are_neighbours(places: Sequence[RowPlace | None]) -> bool:
    """Whether ``places``, in any order, fill a part of one row without gaps."""
    known = sorted((place for place in places if place is not None), key=lambda place: place.first)
    return (
        len(known) == len(places)
        and len({place.row for place in known}) == 1
        and all(one.first + one.numel == other.first for one, other in itertools.pairwise(known))
    )


def lie_in_a_row(pieces: Sequence[Tensor]) -> bool:
    """Whether tensors of one dtype are contiguous and lie one after the other in memory."""
    address = pieces[0].data_ptr()
    for piece in pieces:
        if piece.data_ptr() != address or not piece.is_contiguous():
            return False
        address += piece.nbytes
    return True


def moved_to_row(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Copies of contiguous tensors of one dtype and device, one after the other in one block of memory.

    Each copy has its own storage: a DTensor whose local tensor has a storage offset cannot be copied (torch 2.13), and
    code that saves or counts storages must see one tensor in each.
    """
    row = torch.cat([piece.reshape(-1) for piece in pieces])
    own = row.view(torch.uint8).split([piece.nbytes for piece in pieces])
    return [
        torch.from_dlpack(part).view(row.dtype).view(piece.shape).data
        for part, piece in zip(own, pieces, strict=True)
    ]
