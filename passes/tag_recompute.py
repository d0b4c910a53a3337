"""tag_recompute: what the partitioner must save for the backward, and what it must gather again.

In a unit that reshards after the forward, the ``unshard`` nodes are tagged for recomputation, and so is everything
that views and casts make of full parameters alone. Otherwise the partitioner would save a transpose of the full
parameter, and nothing would be freed. In a unit that does not reshard, the ``unshard`` nodes are tagged to be saved.
Pieces kept by ``spread_parameters`` are saved too.

A parameter with a gather extension is gathered as several tensors. What is computed of them and of the other tensors
of its shard alone, a dequantised weight for instance, is tagged for recomputation with them. What is computed in front
of their gather, a cast for instance, is saved: it has the size of a piece.

Before::

    %unshard_0: f32[8, 4] = unshard(%primals_1, %primals_2, 'w', ..., reshard=2, ...)
    %permute_0: f32[4, 8]@(1,4) = permute(%unshard_0, [1, 0])

After::

    %unshard_0: f32[8, 4] = unshard(%primals_1, %primals_2, 'w', ..., reshard=2, ...)  !recompute
    %permute_0: f32[4, 8]@(1,4) = permute(%unshard_0, [1, 0])  !recompute

Numerics: bitwise exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ir import KEEP_PIECE, UNSHARD, UnshardCall, is_collective, is_repeatable, parameter_of
from graphshard.pipeline import Fact, PassContext, PassReport, is_layout

#: Above the id of every checkpointed region. The partitioner saves a recomputed node if its reader belongs to a
#: region with a higher id, which would keep the gathered parameter.
_REGION_ID = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TagRecompute:
    """See the module docstring; no options: each ``unshard`` node says what its unit wants."""

    name: ClassVar[str] = "tag_recompute"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.MERGED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "recomputed" and "saved" gathers."""
        counts = {"recomputed": 0, "saved": 0}
        changed = False
        for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
            reshard = UnshardCall(*node.args).reshard > 1
            policy = CheckpointPolicy.MUST_RECOMPUTE if reshard else CheckpointPolicy.MUST_SAVE
            changed |= set_policy(node, policy)
            counts["recomputed" if reshard else "saved"] += 1
        for node in gm.graph.find_nodes(op="call_function", target=KEEP_PIECE):
            for kept in (node, *node.users):
                changed |= set_policy(kept, CheckpointPolicy.MUST_SAVE)
        for node in gm.graph.nodes:
            if _is_view_of_recomputed(node):
                changed |= set_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
        for node in _sent_for_recomputed(gm.graph):
            changed |= set_policy(node, CheckpointPolicy.MUST_SAVE)
        for node in _made_of_parts(gm.graph, ctx.held):
            changed |= set_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
        return PassReport(changed=changed, counts=counts)


def set_policy(node: fx.Node, policy: CheckpointPolicy) -> bool:
    """Tags a node for the partitioner; returns whether that changed anything."""
    changed = node.meta.get("recompute") != policy
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _REGION_ID
    return changed


def _sent_for_recomputed(graph: fx.Graph) -> Iterator[fx.Node]:
    """What gathers that run again read, where it is computed and no input."""
    for node in filter(_is_recomputed, graph.find_nodes(op="call_function", target=UNSHARD)):
        if _is_part(node) and node.args[0].op == "call_function":
            yield node.args[0]


def _made_of_parts(graph: fx.Graph, held: frozenset[str]) -> Iterator[fx.Node]:
    """What is computed of tensors that are gathered again, and of shards, alone."""
    alone: set[fx.Node] = set()
    of_gathered: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.target is UNSHARD and _is_part(node):
            alone.add(node)
            of_gathered.update([node] if _is_recomputed(node) else [])
        elif node.name in held or (node.op == "call_function" and alone.issuperset(sources)):
            if node.op == "call_function" and not is_repeatable(node):
                continue
            if is_collective(node) and not of_gathered.isdisjoint(sources):
                continue  # only what an extension needs before it casts, a largest value
            alone.add(node)
            if not of_gathered.isdisjoint(sources):
                of_gathered.add(node)
                yield node


def _is_part(node: fx.Node) -> bool:
    name = UnshardCall(*node.args).name
    return parameter_of(name) != name


def _is_recomputed(node: fx.Node) -> bool:
    return (
        node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE
        and node.meta.get("ac_graph_id") == _REGION_ID
    )


def _is_view_of_recomputed(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is UNSHARD or not node.all_input_nodes:
        return False
    return is_layout(node) and all(map(_is_recomputed, node.all_input_nodes))
