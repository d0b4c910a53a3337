"""Which values of a graph are cut over an axis instead of whole, so that the ranks send the fewest bytes.

A *region* is a set of values that are whole, linked by ops that work on pieces as they do on whole tensors: pointwise
ops and views. Each value of a region can be whole or cut along one dim. A whole value gives its piece for nothing. A
piece becomes whole by an all-gather. A pending sum costs half as much if its result is cut. Each collective has a fixed
price in bytes besides. So the cheapest choice is a minimum cut of a flow network (computed by networkx): what is cut is
on the side of the source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import torch
from torch import fx

from ..ir import (
    REPLICATE,
    RESHARD,
    ReshardCall,
    aten,
    cut_dim,
    expected_bytes_sent,
    is_collective,
    is_contiguous,
    is_elementwise,
    is_wait,
    tensors_of,
)

#: Ops beside pointwise ones whose result has the elements of the input at the same place.
_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A choice for one region.

    Attributes:
        dims: the values that are cut, with the dim.
        saved_bytes: what each rank sends less.
        saved_collectives: as many fewer; negative if there are more.
        is_cheaper: these two together are worth the change.
    """

    dims: dict[fx.Node, int]
    saved_bytes: int = 0
    saved_collectives: int = 0
    is_cheaper: bool = False


def is_slice(node: fx.Node, axis: ReshardCall) -> bool:
    """Whether a node takes the piece of a whole value."""
    call = placed_call(node, axis)
    return call is not None and call.src == REPLICATE and cut_dim(call.dst) is not None


def placed_call(node: fx.Node, axis: ReshardCall) -> ReshardCall | None:
    """The reshard of a node, if ``propagate_sharding`` has written it and it is of the axis of ``axis``."""
    if node.target is not RESHARD:
        return None
    call = ReshardCall(*node.args)
    return call if call.placed and call.group_name == axis.group_name else None


def cut_inputs(node: fx.Node, dim: int) -> dict[fx.Node, int | None] | None:
    """For a node that is cut along ``dim``, the dim of each tensor that it reads; None for one it reads whole.

    Returns None for an op that cannot run on pieces.
    """
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    shape = node.meta["val"].shape
    sources = [each for each in node.all_input_nodes if tensors_of(each.meta.get("val"))]
    if node.target in _VIEWS:
        source = sources[0]
        before = _same_dim(shape, dim, source.meta["val"].shape)
        return None if before is None or len(node.all_input_nodes) > 1 else {source: before}
    if not (is_elementwise(node) or node.target in _COPIES) or not _is_function(node):
        return None
    found: dict[fx.Node, int | None] = {}
    for source in sources:
        given = source.meta["val"]
        if not isinstance(given, torch.Tensor):
            return None
        place = dim - (len(shape) - given.ndim)
        is_cut = place >= 0 and _is_number(given.shape[place]) and given.shape[place] == shape[dim]
        if not is_cut and place >= 0 and not (_is_number(given.shape[place]) and given.shape[place] == 1):
            return None
        found[source] = place if is_cut else None
    return found


def _same_dim(shape: torch.Size, dim: int, other: torch.Size) -> int | None:
    """The dim of a view of ``other`` sizes that has the rows of ``dim``."""
    if not all(map(_is_number, (*shape, *other))):
        return None
    for place, size in enumerate(other):
        if size == shape[dim] and math.prod(other[:place]) == math.prod(shape[:dim]):
            return place
    return None


def _is_function(node: fx.Node) -> bool:
    """Whether equal inputs give equal results and no input is written."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_number(size: object) -> bool:
    return isinstance(size, int)


def whole_values(graph: fx.Graph, axis: ReshardCall) -> set[fx.Node]:
    """The values known to be equal on all ranks of an axis: reshards say so, and functions of equal values are."""
    calls = [placed_call(node, axis) for node in graph.find_nodes(op="call_function", target=RESHARD)]
    found = {call.value for call in calls if call is not None and call.src == REPLICATE}
    for node in graph.nodes:
        call = placed_call(node, axis)
        if call is not None:
            if call.dst == REPLICATE:
                found.add(node)
        elif _is_function(node) and not _may_count_ranks(node) and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _may_count_ranks(node: fx.Node) -> bool:
    """Whether a call may depend on the rank: a collective; masked lookups subtract a first row (``LocalGraph``)."""
    if is_collective(node) or is_wait(node):
        return True
    return node.target is aten.sub.Tensor and not isinstance(node.args[1], fx.Node)


def values_to_cut(graph: fx.Graph, axis: ReshardCall, whole: set[fx.Node]) -> set[fx.Node]:
    """The values that a region may have: ``whole`` ones, and those that only pieces of whole values are computed from.

    Other values may be pieces or terms already. What a rank has of these is no whole tensor to take rows of.
    """
    found = set(whole)
    for node in reversed(graph.nodes):
        if node.users and all(is_slice(user, axis) or _keeps_place(user, found) for user in node.users):
            found.add(node)
    return found


def _keeps_place(node: fx.Node, found: set[fx.Node]) -> bool:
    return node in found and (node.target in (*_VIEWS, *_COPIES) or is_elementwise(node))


class RegionFinder:
    """Finds regions in a graph and the cheapest choice for each.

    Args:
        graph: a graph of local shapes, with reshards.
        axis: a reshard of the axis.
        fixed_bytes: a collective costs as much as these bytes, beside those that it sends.
    """

    def __init__(self, graph: fx.Graph, axis: ReshardCall, fixed_bytes: int) -> None:
        self._axis, self._fixed_bytes = axis, fixed_bytes
        self._whole = whole_values(graph, axis)
        self._to_cut = values_to_cut(graph, axis, self._whole)
        self._sizes = {
            node.meta["val"].node.expr
            for node in graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("val"), torch.SymInt)
        }

    def cheapest(self, seed: fx.Node, dim: int) -> tuple[dict[fx.Node, int], Region]:
        """The region around a value that may be cut along ``dim``, and its cheapest choice."""
        dims = self._grow(seed, dim)
        return dims, self._choose(dims)

    def _grow(self, seed: fx.Node, dim: int) -> dict[fx.Node, int]:
        fixed: set[fx.Node] = set()
        while True:  # a value that would be cut along two dims stays whole
            dims: dict[fx.Node, int] = {}
            waiting = [(seed, dim)]
            torn = None
            while waiting and torn is None:
                node, place = waiting.pop()
                if dims.get(node, place) != place:
                    torn = node
                elif node not in fixed and node not in dims and self._can_be_cut(node, place):
                    dims[node] = place
                    waiting += self._neighbours(node, place)
            if torn is None:
                return dims
            fixed.add(torn)

    def _neighbours(self, node: fx.Node, dim: int) -> Iterator[tuple[fx.Node, int]]:
        if placed_call(node, self._axis) is None:
            for source, place in (cut_inputs(node, dim) or {}).items():
                if place is not None:
                    yield source, place
        for user in node.users:
            value = user.meta.get("val")
            for place in range(value.ndim) if isinstance(value, torch.Tensor) else ():
                read = cut_inputs(user, place)
                if read is not None and read.get(node) == dim:
                    yield user, place

    def _can_be_cut(self, node: fx.Node, dim: int) -> bool:
        value = node.meta.get("val")
        if node not in self._to_cut or not isinstance(value, torch.Tensor) or not is_contiguous(value):
            return False
        size, ranks = value.shape[dim], self._axis.group_size
        if not isinstance(size, int) or size == 0 or size % ranks:
            return False
        if not all(_is_number(each) or each.node.expr in self._sizes for each in value.shape):
            return False
        call = placed_call(node, self._axis)
        return call.dst == REPLICATE if call is not None else cut_inputs(node, dim) is not None

    def _sent(self, node: fx.Node, src: str, dst: str) -> int:
        value = node.meta["val"]
        call = self._axis._replace(value=node, src=src, dst=dst, shape=list(value.shape))
        return expected_bytes_sent(call, value.dtype)

    def _priced(self, sent: int) -> int:
        return sent + self._fixed_bytes if sent else 0

    def _choose(self, dims: dict[fx.Node, int]) -> Region:
        gains = {node: self._gain(node, dim) for node, dim in dims.items()}
        now = sum(gain for gain in gains.values() if gain > 0)
        if now == 0:
            return Region(dims={})
        unit = 4 * sum(1 + len(node.users) + len(node.all_input_nodes) for node in dims)  # prices come first
        network = nx.DiGraph()
        network.add_nodes_from(("cut", "whole"))

        def link(source: object, target: object, capacity: int) -> None:
            known = network.get_edge_data(source, target, {"capacity": 0})["capacity"]
            network.add_edge(source, target, capacity=known + capacity)

        for node, dim in dims.items():
            gain = gains[node]
            link("cut", node, max(gain, 0) * unit)
            link(node, "whole", max(-gain, 0) * unit + 1)
            readers = [user for user in node.users if user in dims and placed_call(user, self._axis) is None]
            for reader in readers:
                link(reader, node, 1)  # a slice
                network.add_edge((node, "gathered"), reader)
            if self._has_whole_reader(node, dim, dims):
                network.add_edge((node, "gathered"), "whole")
            gathered = self._priced(self._sent(node, f"Shard({dim})", REPLICATE))
            link(node, (node, "gathered"), gathered * unit + 1)
        value, (cut, _) = nx.minimum_cut(network, "cut", "whole")
        chosen = {node: dim for node, dim in dims.items() if node in cut}
        return self._counted(chosen, is_cheaper=now - value // unit > 0)

    def _counted(self, chosen: dict[fx.Node, int], *, is_cheaper: bool) -> Region:
        before, after = [], []
        for node, dim in chosen.items():
            if (call := placed_call(node, self._axis)) is not None:
                before.append(self._sent(node, call.src, REPLICATE))
                after.append(self._sent(node, call.src, f"Shard({dim})"))
            if self._has_whole_reader(node, dim, chosen):
                after.append(self._sent(node, f"Shard({dim})", REPLICATE))
        return Region(
            dims=chosen,
            saved_bytes=sum(before) - sum(after),
            saved_collectives=sum(map(bool, before)) - sum(map(bool, after)),
            is_cheaper=is_cheaper,
        )

    def _gain(self, node: fx.Node, dim: int) -> int:
        """What a reshard costs less if its result is cut and no longer whole; 0 for another op."""
        call = placed_call(node, self._axis)
        if call is None:
            return 0
        whole, piece = (self._sent(node, call.src, dst) for dst in (REPLICATE, f"Shard({dim})"))
        return self._priced(whole) - self._priced(piece)

    def _has_whole_reader(self, node: fx.Node, dim: int, dims: dict[fx.Node, int]) -> bool:
        for user in node.users:
            call = placed_call(user, self._axis)
            is_cut = call.dst == f"Shard({dim})" if call is not None else user in dims
            if not is_cut:
                return True
        return False
