"""The words for sharded parameters: what a shard op carries, and how a padded shard is laid out.

Shards follow ``torch.chunk``: with ``n`` rows over ``w`` ranks each rank holds at most
``ceil(n / w)`` rows and the last ranks hold fewer, possibly none. Every decision is made from the
padded size ``ceil(n / w)``, which is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def padded_rows(num_rows: int, num_ranks: int) -> int:
    """Rows of one padded shard: ``ceil(num_rows / num_ranks)``."""
    return -(-num_rows // num_ranks)


def padded_shape(shape: Sequence[int], dim: int, num_ranks: int) -> list[int]:
    """Shape of the padded shard of a parameter of ``shape`` cut along ``dim``."""
    result = list(shape)
    result[dim] = padded_rows(result[dim], num_ranks)
    return result


def shard_shape(shape: Sequence[int], dim: int, num_ranks: int, rank: int) -> list[int]:
    """Shape of the unpadded piece that ``rank`` holds (``torch.chunk`` semantics)."""
    rows = padded_rows(shape[dim], num_ranks)
    start = min(rank * rows, shape[dim])
    result = list(shape)
    result[dim] = min(start + rows, shape[dim]) - start
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBinding:
    """One sharded parameter of one captured graph.

    ``placeholder`` is the name of the graph input that holds its shard, ``position`` the index of
    that input among the forward's inputs, and so of its gradient among the backward's outputs.
    """

    placeholder: str
    position: int
    name: str
    unit: str
    shape: tuple[int, ...]
    dim: int
    axis: str
    group_size: int
    reshard: bool

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)
