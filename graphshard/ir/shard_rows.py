"""Rows: the shards of a unit lie one after the other in memory, so that gathering several needs no copy.

What a rank sends when it gathers a bucket is its shards, one after the other. Where these are neighbours in memory,
it is sent as it lies. The place of a shard is part of how the parameter is gathered
(``UnshardCall.row_offset``), and equal on all ranks: only parameters that are cut evenly along their
first dim have one. Whether a shard really lies there is asked when a graph runs (the op ``graphshard::join``):
a user may have put another in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Generated code reads parameters in vectors of so many bytes, and expects that they begin at a multiple of it.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a shard lies: its row, its first element there, and how many it has."""

    row: str
    first: int
    numel: int


class ShardedShape(NamedTuple):
    """A parameter, and how it is cut; ``dtype`` is that of the shards.

    Parameters of one ``row`` lie in one. They must be of one unit and process group: with tensor or expert parallelism
    ranks of different groups may hold shards of different sizes.
    """

    row: str
    shape: Sequence[int]
    dim: int
    num_ranks: int
    dtype: torch.dtype

    @property
    def has_place(self) -> bool:
        """Only shards that are alike, cut along dim 0, and as long as keeps the next one aligned have one."""
        is_even = self.dim == 0 and self.shape[0] % self.num_ranks == 0
        num_bytes = math.prod(self.shape) // self.num_ranks * self.dtype.itemsize
        return self.num_ranks > 1 and is_even and num_bytes > 0 and num_bytes % ALIGNMENT == 0


def row_offsets(parameters: Mapping[str, ShardedShape]) -> dict[str, int]:
    """Where the shards of parameters begin in their rows, in elements, by name; -1 for one without a place.

    Those of one dtype follow each other, in the order given and biases last: few backwards gather biases again, and
    what they gather is to be neighbours.
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
    """Whether ``places``, in any order, make up a part of one row, with nothing in between."""
    known = sorted((place for place in places if place is not None), key=lambda place: place.first)
    return (
        len(known) == len(places)
        and len({place.row for place in known}) == 1
        and all(one.first + one.numel == other.first for one, other in itertools.pairwise(known))
    )


def lie_in_a_row(pieces: Sequence[Tensor]) -> bool:
    """Whether tensors of one dtype lie one after the other."""
    address = pieces[0].data_ptr()
    for piece in pieces:
        if piece.data_ptr() != address or not piece.is_contiguous():
            return False
        address += piece.nbytes
    return True


def moved_to_row(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Copies of contiguous tensors of one dtype and device, one after the other in one piece of memory.

    Each has a storage of its own: a DTensor whose local tensor has a storage offset cannot be copied (torch 2.13), and
    what saves or counts storages sees the tensor alone.
    """
    row = torch.cat([piece.reshape(-1) for piece in pieces])
    own = row.view(torch.uint8).split([piece.nbytes for piece in pieces])
    return [
        torch.from_dlpack(part).view(row.dtype).view(piece.shape).data
        for part, piece in zip(own, pieces, strict=True)
    ]
