"""Rows that are added into a table: the backward of an embedding, as Inductor decomposes it.

DTensor has no rule for the op. If the program cuts the result along the rows of the table (the vocabulary), each rank
adds only what belongs to its own rows. If it cuts the result along a later dim, each rank adds its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ..ir import RESHARD, ReshardCall, aten, cut_dim, is_elementwise
from .values import PlacedValue

_ADD_ROWS = aten._unsafe_masked_index_put_accumulate.default
_FILLED = (aten.full.default, aten.new_zeros.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRows:
    """A call of the op, and how its result is cut.

    Attributes:
        mask, indices, values: its arguments; row ``indices[i]`` of the table gets ``values[i]`` where ``mask[i]``.
        dim: of the table, along which the program cuts it.
        values_dim: the dim of ``values`` that is cut with it; None for the rows.
    """

    mask: fx.Node
    indices: fx.Node
    values: fx.Node
    dim: int
    values_dim: int | None


def added_rows(node: fx.Node, values: Mapping[fx.Node, PlacedValue]) -> AddedRows | None:
    """Reads a call that can be cut; None for another one.

    Args:
        node: any call.
        values: those of its inputs that are tensors.
    """
    if node.target is not _ADD_ROWS or (dim := _wanted_dim(node)) is None:
        return None
    table, mask, indices, added = node.args
    if table.target not in _FILLED or len(indices) != 1 or not all(each in values for each in (mask, added)):
        return None
    shape, num_dims = values[table].whole.shape, values[indices[0]].whole.ndim
    if not isinstance(shape[dim], int):
        return None
    values_dim = None if dim == 0 else num_dims + dim - 1
    masked = values[mask].whole.shape
    if values_dim is not None and (len(masked) != values[added].whole.ndim or masked[values_dim] != 1):
        return None
    return AddedRows(mask=mask, indices=indices[0], values=added, dim=dim, values_dim=values_dim)


def _wanted_dim(node: fx.Node) -> int | None:
    """The dim along which the program cuts a value, perhaps behind pointwise ops; None if it reads the whole."""
    shape = node.meta["val"].shape
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is RESHARD:
            return cut_dim(ReshardCall(*user.args).dst)
        if not is_elementwise(user) or user.meta["val"].shape != shape:
            return None
        node = user
    return None
