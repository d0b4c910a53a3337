"""move_reshards: pointwise ops run on pieces where the ranks then send fewer bytes.

A value between reshards can be whole on every rank, or cut along a dim. ``propagate_sharding`` decides that op by op.
This pass decides it for whole regions of pointwise ops and views, and takes the choice with the fewest bytes, where a
collective counts as 64 KiB besides (:mod:`graphshard.propagation.cut_region`). So reshards move past the ops:

- an all-reduce whose readers take pieces becomes a reduce-scatter;
- a large one whose readers need less than it gives becomes a reduce-scatter, and an all-gather of the smaller value;
- two gathers of the operands of an op become one of its result; a gather moves behind a cast to a smaller dtype.

Before::

    %reshard_0: f64[4, 6] = reshard(%mm_0, Partial(sum) -> Replicate, shape=[4, 6], axis=tp=2, sends=192 bytes, placed)
    %mul_0: f64[4, 6] = mul(%reshard_0, %primals_2)
    %reshard_1: f64[2, 6] = reshard(%mul_0, Replicate -> Shard(0), shape=[4, 6], axis=tp=2, sends=0 bytes, placed)

After (``primals_2`` is f64[6])::

    %reshard_0: f64[2, 6] = reshard(%mm_0, Partial(sum) -> Shard(0), shape=[4, 6], axis=tp=2, sends=96 bytes, placed)
    %mul_0: f64[2, 6] = mul(%reshard_0, %primals_2)

Numerics: a reduce-scatter may sum in another order than an all-reduce. All else is bitwise.

Does not handle:

- a dim that the ranks do not divide, or whose size is symbolic: such a value stays whole;
- values that are not contiguous;
- ops that are neither pointwise nor a view: they stay as ``propagate_sharding`` has placed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphshard.ir import (
    REPLICATE,
    RESHARD,
    GraphEmitter,
    ReshardCall,
    aten,
    cut_dim,
    is_contiguous,
    recompute_tags,
)
from graphshard.pipeline import Fact, PassContext, PassReport
from graphshard.propagation import Region, RegionFinder, cut_inputs, is_slice, placed_call


@dataclass(frozen=True, kw_only=True)
class MoveReshards:
    """See the module docstring.

    Attributes:
        collective_bytes: a collective costs as much as these bytes on its link, beside those that it sends. 10 to 60
            microseconds pass before the first byte moves, in which a link of 1 to 5 GB/s sends so much.
    """

    collective_bytes: int = 64 * 1024

    name: ClassVar[str] = "move_reshards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "regions" changed, and the "bytes" and "collectives" that a rank sends less; these may be negative."""
        counts = {"regions": 0, "bytes": 0, "collectives": 0}
        calls = [ReshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
        for axis in {call.group_name: call for call in calls if call.placed}.values():
            known: set[tuple[fx.Node, int]] = set()
            while (region := _next_region(gm.graph, axis, known, self.collective_bytes)) is not None:
                _Rewriter(gm.graph, axis, region.dims).write()
                counts["regions"] += 1
                counts["bytes"] += region.saved_bytes
                counts["collectives"] += region.saved_collectives
        return PassReport(changed=counts["regions"] > 0, counts=counts)


def _next_region(
    graph: fx.Graph, axis: ReshardCall, known: set[tuple[fx.Node, int]], collective_bytes: int
) -> Region | None:
    """A region with a cheaper choice; ``known`` are values of regions without one."""
    finder = RegionFinder(graph, axis, collective_bytes)
    for seed, dim in _seeds(graph, axis):
        if (seed, dim) in known:
            continue
        values, region = finder.cheapest(seed, dim)
        if region.is_cheaper:
            return region
        known.update(values.items())
    return None


def _seeds(graph: fx.Graph, axis: ReshardCall) -> list[tuple[fx.Node, int]]:
    """Values that a reshard makes whole or takes pieces of, with the dims that they may be cut along."""
    found = []
    for node in graph.find_nodes(op="call_function", target=RESHARD):
        call = placed_call(node, axis)
        if call is not None and call.src != REPLICATE and call.dst == REPLICATE:
            found += [(node, dim) for dim in range(node.meta["val"].ndim)]
    return found


class _Rewriter:
    """Cuts the chosen values of one region."""

    def __init__(self, graph: fx.Graph, axis: ReshardCall, dims: dict[fx.Node, int]) -> None:
        self._graph, self._axis, self._dims = graph, axis, dims
        self._pieces: dict[tuple[fx.Node, int], fx.Node] = {}
        self._sizes = {
            node.meta["val"].node.expr: node
            for node in graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("val"), torch.SymInt)
        }

    def write(self) -> None:
        old = [node for node in self._graph.nodes if node in self._dims]
        for node in old:
            with self._graph.inserting_before(node):
                self._pieces[node, self._dims[node]] = self._cut(node, self._dims[node])
        for node in old:
            self._lead_readers(node, self._dims[node])
        for node in reversed(old):
            if not node.users:
                self._graph.erase_node(node)

    def _cut(self, node: fx.Node, dim: int) -> fx.Node:
        """The piece of a value, computed from pieces; written at the insertion point."""
        emit = self._emitter(node)
        call = placed_call(node, self._axis)
        if call is not None:
            dst = f"Shard({dim})"
            if call.src == dst:
                return call.value if is_contiguous(call.value.meta["val"]) else _copied(emit, call.value)
            return emit(RESHARD, *call._replace(dst=dst))
        read = cut_inputs(node, dim)
        assert read is not None, "only ops that run on pieces are in a region"
        moved = {source: self._piece(source, place) for source, place in read.items() if place is not None}
        args = list(fx.node.map_arg(tuple(node.args), lambda each: moved.get(each, each)))
        kwargs = fx.node.map_arg(dict(node.kwargs), lambda each: moved.get(each, each))
        if node.target in (aten.view.default, aten._unsafe_view.default):
            sizes = list(node.meta["val"].shape)
            sizes[dim] //= self._axis.group_size
            args[1] = sizes
        return emit(node.target, *args, **kwargs)

    def _piece(self, source: fx.Node, dim: int) -> fx.Node:
        if (source, dim) not in self._pieces:
            call = self._call(source, REPLICATE, f"Shard({dim})")
            self._pieces[source, dim] = self._emitter(source)(RESHARD, *call)
        return self._pieces[source, dim]

    def _call(self, node: fx.Node, src: str, dst: str) -> ReshardCall:
        value = node.meta["val"]
        shape = [size if isinstance(size, int) else self._sizes[size.node.expr] for size in value.shape]
        return self._axis._replace(value=node, src=src, dst=dst, shape=shape)

    def _lead_readers(self, node: fx.Node, dim: int) -> None:
        """Gives the readers of a whole value its piece, or the piece gathered."""
        piece = self._pieces[node, dim]
        readers = [user for user in node.users if user not in self._dims]
        whole = None
        for reader in readers:
            call = placed_call(reader, self._axis)
            if call is not None and is_slice(reader, self._axis) and cut_dim(call.dst) == dim:
                reader.replace_all_uses_with(piece)
                self._graph.erase_node(reader)
                continue
            if whole is None:
                with self._graph.inserting_before(node):
                    call = self._call(node, f"Shard({dim})", REPLICATE)
                    whole = self._emitter(node)(RESHARD, *call._replace(value=piece))
            reader.replace_input_with(node, whole)

    def _emitter(self, origin: fx.Node) -> GraphEmitter:
        return GraphEmitter(self._graph, origin=origin, extra_meta=recompute_tags(origin))


def _copied(emit: GraphEmitter, value: fx.Node) -> Any:
    return emit(aten.clone.default, value, memory_format=torch.contiguous_format)
