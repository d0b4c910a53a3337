"""What an answer of DTensor's rule makes a rank send: for inputs that move, and for terms that are summed later.

DTensor counts the inputs of one call. Where it exchanges one cut for another, what the call gives are often terms, and
their sum costs more than a gather of an input, which other calls read too.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .._compat import tree_leaves
from .._compat_dtensor import OpPlacements
from ..ir import is_view, size_hint, tensors_of
from .values import PlacedValue


def exchanges_cuts(node: fx.Node, values: Mapping[fx.Node, PlacedValue], found: OpPlacements) -> bool:
    """Whether an input that is cut along one dim is wanted cut along another."""
    return any(
        isinstance(values[source].placement, Shard)
        and isinstance(wanted, Shard)
        and wanted != values[source].placement
        for source, wanted in _wanted(node, values, found).items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a graph has been placed.

    Attributes:
        placed: its calls that have been.
        whole: values that are cut, and that have been gathered for one of these.
    """

    placed: Container[fx.Node] = ()
    whole: Container[fx.Node] = ()


def sent_bytes(
    node: fx.Node,
    values: Mapping[fx.Node, PlacedValue],
    found: OpPlacements,
    num_ranks: int,
    progress: Progress,
) -> int:
    """Bytes that a rank sends for the inputs, and at least for the sum of what are terms then; no padding.

    A gather counts in equal parts for all calls of the op that are to read the value: they share it.
    """
    total = 0
    for source, wanted in _wanted(node, values, found).items():
        moved = _moved_bytes(values[source], wanted, num_ranks)
        if isinstance(wanted, Replicate):
            num_readers = _num_readers(source, node.target, progress.placed)
            moved = 0 if source in progress.whole else moved // num_readers
        total += moved
    outputs = tree_leaves(found.outputs)
    for result, placement in zip(tensors_of(node.meta["val"]), outputs, strict=False):
        if isinstance(placement, Partial):
            total += _num_bytes(result) * (num_ranks - 1) // num_ranks
    return total


def _wanted(
    node: fx.Node, values: Mapping[fx.Node, PlacedValue], found: OpPlacements
) -> dict[fx.Node, Placement]:
    """The placement that the answer wants each input in; nothing if it reads one twice."""
    given = [each for each in node.all_input_nodes if each in values]
    placements = [each for each in tree_leaves(found.args) if isinstance(each, Placement)]
    return dict(zip(given, placements, strict=True)) if len(given) == len(placements) else {}


def _num_readers(source: fx.Node, target: object, placed: Container[fx.Node]) -> int:
    """How many further calls of an op read a value, or views of it, or of what it is a view of."""
    while is_view(source):
        source = source.all_input_nodes[0]
    values = [source]
    for value in values:  # grows on the way
        values += [user for user in value.users if is_view(user)]
    readers = {
        user for value in values for user in value.users if user.target is target and user not in placed
    }
    return max(1, len(readers))


def _moved_bytes(value: PlacedValue, wanted: Placement, num_ranks: int) -> int:
    if value.placement == wanted or value.is_replicated:
        return 0
    whole = _num_bytes(value.whole) * (num_ranks - 1) // num_ranks
    if isinstance(value.placement, Partial):
        return whole if isinstance(wanted, Shard) else 2 * whole
    return whole // num_ranks if isinstance(wanted, Shard) else whole


def _num_bytes(value: torch.Tensor) -> int:
    return math.prod(map(size_hint, value.shape)) * value.dtype.itemsize
