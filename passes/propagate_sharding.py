"""propagate_sharding: a graph on whole tensors becomes the graph of one rank, on its pieces.

The input graph computes with whole tensors on every rank of an axis. Reshards say where the pieces are: in front of
them a parameter is ``Shard``, behind them ``Replicate``; a pair of reshards to ``Shard`` and back marks a value that is
to be cut. The pass gives every value a placement, in the order of the graph, by the rules of DTensor. Where an op wants
an input in another placement than the one it has, a reshard moves it; the reshards of the input graph disappear. Shapes
become local. Outputs keep their placements.

Before (a parameter cut along dim 0 over two ranks)::

    %reshard_0: f32[8, 4] = reshard(%primals_1, Shard(0) -> Replicate, shape=[8, 4], axis=tp=2, sends=64 bytes)
    %permute_0: f32[4, 8]@(1,4) = permute(%reshard_0, [1, 0])
    %mm_0: f32[2, 8] = mm(%primals_2, %permute_0)
    return [%mm_0]

After::

    %permute_0: f32[4, 4]@(1,4) = permute(%primals_1, [1, 0])
    %mm_0: f32[2, 4] = mm(%primals_2, %permute_0)
    %reshard_0: f32[2, 8] = reshard(%mm_0, Shard(1) -> Replicate, shape=[2, 8], axis=tp=2, sends=32 bytes)
    return [%mm_0]

Numerics: those of the other placements: sums over a cut dim are sums of the ranks' sums. Copies are bitwise. Where a
gradient of a parameter is cast to a smaller dtype, the ranks' sums are added in that dtype.

Does not handle:

- an op without a rule, or one that draws random numbers or writes to its input: its inputs are gathered, and the report
  says which op, where, and what that costs;
- reshards of more than one axis in a graph, and a cut along a symbolic size: these are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import UnsupportedShardingError
from graphshard.ir import RESHARD, ReshardCall, graph_text
from graphshard.pipeline import Fact, PassContext, PassReport
from graphshard.propagation import LocalGraph


@dataclass(frozen=True, kw_only=True)
class PropagateSharding:
    """See the module docstring; no options."""

    name: ClassVar[str] = "propagate_sharding"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "reshards", the "bytes" that a rank sends for them, and "calls gathered" for want of a rule.

        Raises:
            UnsupportedShardingError: reshards of several axes, or a cut along a symbolic size.
        """
        calls = [ReshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
        declared = [call for call in calls if not call.placed]
        if not declared:
            return PassReport(changed=False, counts={"reshards": 0, "bytes": 0, "calls gathered": 0})
        axes = {(call.axis, call.group_name) for call in calls}
        if len(axes) > 1:
            names = ", ".join(sorted(axis for axis, _ in axes))
            raise UnsupportedShardingError(
                f"propagate_sharding: one graph has reshards of several axes ({names}); place its parameters on one "
                "axis beside those of fully_shard"
            )
        before = graph_text(gm)
        local = LocalGraph(gm.graph, declared[0])
        local.write()
        return PassReport(
            changed=graph_text(gm) != before, counts=local.counts(), skipped=tuple(local.gathered())
        )
