"""lower_reshards: reshards become collectives and local slices.

| from | to | becomes |
|---|---|---|
| Shard(i) | Replicate | all-gather |
| Shard(i) | Shard(j) | all-to-all |
| Partial | Replicate | all-reduce |
| Partial | Shard(i) | reduce-scatter |
| Replicate | Shard(i) | slice |
| Replicate, Shard(i) | Partial(sum) | division, pad with zeros |

Before::

    %reshard_0: f32[4, 8] = reshard(%mm_0, Partial(sum) -> Replicate, shape=[4, 8], axis=tp=2, sends=128 bytes)

After::

    %all_reduce_0: f32[4, 8] = all_reduce(%mm_0, 'sum', axis=tp)
    %wait_tensor_0: f32[4, 8] = wait_tensor(%all_reduce_0)

Numerics: bitwise equal to the eager op; the same emitter writes both.

A slice starts at this rank's offset, so a lowered graph differs between the ranks of the axis; its collectives do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.ir import RESHARD, GraphEmitter, ReshardCall, emit_reshard, is_collective, recompute_tags
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class LowerReshards:
    """See the module docstring; no options."""

    name: ClassVar[str] = "lower_reshards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "collectives" started and "local" reshards.

        Raises:
            UnsupportedShardingError: a reshard turns terms of one reduction into terms of another.
        """
        counts = {"collectives": 0, "local": 0}
        for node in gm.graph.find_nodes(op="call_function", target=RESHARD):
            with gm.graph.inserting_before(node):
                emit = GraphEmitter(gm.graph, origin=node, extra_meta=recompute_tags(node))
                result = emit_reshard(emit, ReshardCall(*node.args))
            counts["collectives" if _communicates(result, node.args[0]) else "local"] += 1
            node.replace_all_uses_with(result)
            gm.graph.erase_node(node)
        return PassReport(changed=any(counts.values()), counts=counts)


def _communicates(result: fx.Node, source: fx.Node) -> bool:
    """Whether a collective lies between the two; what is written for a reshard is a chain."""
    node = result
    while node is not source:
        if is_collective(node):
            return True
        node = node.all_input_nodes[0]
    return False
