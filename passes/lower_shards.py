"""lower_shards: shard ops become collectives with the pads, views and scales around them.

Before::

    %unshard_0: f32[5, 4] = unshard(%primals_1, 'w', 'root', [5, 4], 0, 'shard', 2, ...)  !recompute

After::

    %all_gather_into_tensor_0: f32[6, 4] = all_gather_into_tensor(%primals_1, 2, axis=shard)  !recompute
    %wait_tensor_0: f32[6, 4] = wait_tensor(%all_gather_into_tensor_0)  !recompute
    %slice_0: f32[5, 4] = slice(%wait_tensor_0, 0, 0, 5)  !recompute

Numerics: bitwise equal to the eager shard ops (both are written with the same emitters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.collectives import emit_reduce_grad, emit_unshard
from graphshard.context import PassContext
from graphshard.facts import Fact
from graphshard.ops import REDUCE_GRAD, UNSHARD
from graphshard.pipeline import PassReport
from graphshard.rewrite import GraphEmitter


@dataclass(frozen=True, kw_only=True)
class LowerShards:
    """See the module docstring; no options."""

    name: ClassVar[str] = "lower_shards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.MERGED, Fact.TAGGED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED, Fact.WAITED, Fact.GATHERED})
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gathers" and "reductions" written."""
        counts = {"gathers": 0, "reductions": 0}
        for node in list(gm.graph.nodes):
            if node.target is UNSHARD:
                replacement = _lower_unshard(gm.graph, node)
                counts["gathers"] += 1
            elif node.target is REDUCE_GRAD:
                replacement = _lower_reduce_grad(gm.graph, node)
                counts["reductions"] += 1
            else:
                continue
            node.replace_all_uses_with(replacement)
            gm.graph.erase_node(node)
        return PassReport(changed=any(counts.values()), counts=counts)


def _lower_unshard(graph: fx.Graph, node: fx.Node) -> fx.Node:
    shard, _, _, shape, dim, _, group_size, group_name, _, _, _ = node.args
    tags = {key: node.meta[key] for key in ("recompute", "ac_graph_id")}
    saved = tags["recompute"] == CheckpointPolicy.MUST_SAVE
    with graph.inserting_before(node):
        emit = GraphEmitter(graph, origin=node, extra_meta={} if saved else tags)
        full = emit_unshard(emit, shard, shape=shape, dim=dim, group_size=group_size, group_name=group_name)
    if saved:  # only the result: saving a step on the way to it would save it twice
        full.meta.update(tags)
    return full


def _lower_reduce_grad(graph: fx.Graph, node: fx.Node) -> fx.Node:
    grad, _, _, shard_shape, dim, _, group_size, group_name, reduce_op, scale = node.args
    with graph.inserting_before(node):
        return emit_reduce_grad(
            GraphEmitter(graph, origin=node),
            grad,
            shard_shape=shard_shape,
            dim=dim,
            group_size=group_size,
            group_name=group_name,
            reduce_op=reduce_op,
            scale=scale,
        )
