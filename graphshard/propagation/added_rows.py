"""Rows that are added into a table: the backward of an embedding, as Inductor decomposes it.

DTensor has no rule for the op, or one that never cuts the rows of the table. Torch 2.11 calls an op without a mask,
whose values are zero where there is nothing to add. If the program cuts the result along the rows of the table (the
vocabulary), each rank adds only what belongs to its own rows. If it cuts the result along a later dim, each rank adds
its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ..ir import RESHARD, ReshardCall, aten, cut_dim, is_elementwise, shard_shape
from .values import PlacedValue

_ADD_MASKED = aten._unsafe_masked_index_put_accumulate.default
#: Those without a mask add if they are told to.
_ADD_ALL = (aten.index_put.default, aten._unsafe_index_put.default)
_FILLED = (aten.full.default, aten.new_zeros.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRows:
    """A call of the op, and how its result is cut.

    Attributes:
        mask, indices, values: its arguments; row ``indices[i]`` of the table gets ``values[i]`` where ``mask[i]``.
            ``mask`` is None for an op without one, which adds all values.
        dim: of the table, along which the program cuts it.
        values_dim: the dim of ``values`` that is cut with it; None for the rows.
    """

    mask: fx.Node | None
    indices: fx.Node
    values: fx.Node
    dim: int
    values_dim: int | None


def added_rows(node: fx.Node, values: Mapping[fx.Node, PlacedValue], num_ranks: int) -> AddedRows | None:
    """Reads a call that can be cut; None for another one.

    Args:
        node: any call.
        values: those of its inputs that are tensors.
        num_ranks: of the axis. Without a mask a rank must have a row, to which it adds zeros.
    """
    if (call := _parts(node)) is None or (dim := _wanted_dim(node)) is None:
        return None
    table, mask, indices, added = call
    read = (*indices, added) if mask is None else (*indices, added, mask)
    if table.target not in _FILLED or len(indices) != 1 or not all(each in values for each in read):
        return None
    shape, num_dims = values[table].whole.shape, values[indices[0]].whole.ndim
    if not isinstance(shape[dim], int) or values[added].whole.ndim != num_dims + len(shape) - 1:
        return None
    if mask is None and dim == 0 and shard_shape(shape, 0, num_ranks, num_ranks - 1)[0] == 0:
        return None
    values_dim = None if dim == 0 else num_dims + dim - 1
    if mask is not None and values_dim is not None:
        masked = values[mask].whole.shape
        if len(masked) != values[added].whole.ndim or masked[values_dim] != 1:
            return None
    return AddedRows(mask=mask, indices=indices[0], values=added, dim=dim, values_dim=values_dim)


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node | None, list[fx.Node], fx.Node] | None:
    """Table, mask, indices and values of a call that adds; None for another call."""
    if node.target is _ADD_MASKED:
        return node.args
    if node.target in _ADD_ALL and len(node.args) == 4 and node.args[3] is True:
        return node.args[0], None, node.args[1], node.args[2]
    return None


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
