"""Rows: the shards of a unit lie one after the other in memory, so that gathering several needs no copy.

What a rank sends when it gathers a bucket is its shards, one after the other. Where these are neighbours in one
storage, the storage itself is sent. The place of a shard is part of how the parameter is gathered
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


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a shard lies: its row, its first element there, and how many it has."""

    row: str
    first: int
    numel: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a row: its first element, and how many it has."""

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
        """Only shards that are alike, and cut along dim 0, have one."""
        is_even = self.dim == 0 and self.shape[0] % self.num_ranks == 0
        return self.num_ranks > 1 and is_even and 0 not in self.shape


def row_offsets(parameters: Sequence[ShardedShape]) -> list[int]:
    """Where the shards of ``parameters`` begin in their rows, in elements; -1 for one without a place.

    Those of one dtype follow each other in the order given.
    """
    offsets, ends = [-1] * len(parameters), dict.fromkeys((each.row for each in parameters), 0)
    for index, each in sorted(enumerate(parameters), key=lambda item: str(item[1].dtype)):
        if each.has_place:
            offsets[index] = ends[each.row]
            ends[each.row] += math.prod(each.shape) // each.num_ranks
    return offsets


def stretch_of(places: Sequence[RowPlace | None]) -> Stretch | None:
    """The part of a row that holds all ``places`` and nothing else; None if there is none."""
    known = [place for place in places if place is not None]
    if len(known) < len(places) or len({place.row for place in known}) != 1:
        return None
    known.sort(key=lambda place: place.first)
    if any(one.first + one.numel != other.first for one, other in itertools.pairwise(known)):
        return None
    return Stretch(known[0].first, sum(place.numel for place in known))


def is_row(pieces: Sequence[Tensor], offsets: Sequence[int]) -> bool:
    """Whether tensors of one dtype lie so far apart, in elements, and the storage of the first reaches them all."""
    first, start = pieces[0], pieces[0].data_ptr() - offsets[0] * pieces[0].element_size()
    storage = first.untyped_storage()
    end = start + first.element_size() * max(
        offset + piece.numel() for offset, piece in zip(offsets, pieces, strict=True)
    )
    return storage.data_ptr() + storage.nbytes() >= end and all(
        piece.data_ptr() == start + offset * piece.element_size() and piece.is_contiguous()
        for piece, offset in zip(pieces, offsets, strict=True)
    )


def moved_to_row(pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copies of contiguous tensors of one dtype and device in one piece of memory, by their offsets in it.

    Each begins its own storage, which reaches to the end of the row: a DTensor whose local tensor has a storage offset
    cannot be copied (torch 2.13).
    """
    first = next(iter(pieces.values()))
    start = min(pieces)
    row = first.new_zeros(max(offset + piece.numel() for offset, piece in pieces.items()) - start)
    moved = {}
    for offset, piece in pieces.items():
        rest = torch.from_dlpack(row[offset - start :].view(torch.uint8)).view(row.dtype)
        moved[offset] = rest[: piece.numel()].view(piece.shape).data
        moved[offset].copy_(piece)
    return moved
