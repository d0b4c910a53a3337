"""lower_shards: shard ops become collectives with the pads, views and scales around them.

It is the first pass on a half. Until then the half stays at level 1, from which the state of its units is read
(:mod:`graphshard.backend.half`). It drops the recompute tags of the shard ops: the partitioner has used them.

Before::

    %unshard_0: f32[5, 4] = unshard(%primals_1, %primals_2, 'w', unit='root', shape=[5, 4], dim=0, ...)

After::

    %all_gather_into_tensor_0: f32[6, 4] = all_gather_into_tensor(%primals_1, 2, axis=shard)
    %wait_tensor_0: f32[6, 4] = wait_tensor(%all_gather_into_tensor_0)
    %slice_0: f32[5, 4] = slice(%wait_tensor_0, 0, 0, 5)

Numerics: bitwise equal to the eager shard ops; the same emitters write both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.ir import (
    KEEP_PIECE,
    REDUCE_GRAD,
    SPREAD,
    UNSHARD,
    GraphEmitter,
    ReduceGradCall,
    UnshardCall,
    emit_reduce_grad,
    emit_unshard,
)
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class LowerShards:
    """See the module docstring; no options."""

    name: ClassVar[str] = "lower_shards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.MERGED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED, Fact.WAITED, Fact.GATHERED})
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gathers" and "reductions" lowered, and kept "pieces" written."""
        counts = {"gathers": 0, "reductions": 0, "pieces": 0}
        for node in list(gm.graph.nodes):
            if node.target is KEEP_PIECE:
                _lower_keep_piece(gm.graph, node)
                counts["pieces"] += 1
            if node.target not in (UNSHARD, REDUCE_GRAD):
                continue
            node.replace_all_uses_with(_lower(gm.graph, node))
            gm.graph.erase_node(node)
            counts["gathers" if node.target is UNSHARD else "reductions"] += 1
        return PassReport(changed=any(counts.values()), counts=counts)


def _lower(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_before(node):
        emit = GraphEmitter(graph, origin=node)
        if node.target is UNSHARD:
            return emit_unshard(emit, UnshardCall(*node.args))
        return emit_reduce_grad(emit, ReduceGradCall(*node.args))


def _lower_keep_piece(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        piece = GraphEmitter(graph, origin=node)(SPREAD, *node.args)
    for item in list(node.users):
        item.replace_all_uses_with(piece if item.args[1] == 1 else node.args[0])
        graph.erase_node(item)
    graph.erase_node(node)
    if not piece.users:
        graph.erase_node(piece)
