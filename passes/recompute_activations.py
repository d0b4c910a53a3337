"""recompute_activations: activations that are computed again in the backward, and those that are saved instead.

Of the ops named here the results are not saved for the backward, which computes them again; the other names are of
what it computes them from. Both come from a partition that was tried (:mod:`graphshard.joint_trials`). What has a
tag keeps it: gathered parameters, and regions of ``torch.utils.checkpoint``. A collective runs once.

Before::

    %mm_0: f32[4, 8] = mm(%primals_1, %primals_2)
    %relu_0: f32[4, 8] = relu(%mm_0)

After, with ``recomputed=("relu",)`` and ``saved=("mm",)``, the names of the nodes::

    %mm_0: f32[4, 8] = mm(%primals_1, %primals_2)  !save
    %relu_0: f32[4, 8] = relu(%mm_0)  !recompute

Numerics: bitwise exact, as far as an op gives the same twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.collectives import is_collective, is_wait
from graphshard.context import PassContext
from graphshard.facts import Fact
from graphshard.pipeline import PassReport

from .tag_recompute import set_policy


@dataclass(frozen=True, kw_only=True)
class RecomputeActivations:
    """See the module docstring.

    Attributes:
        recomputed: names of nodes of the forward.
        saved: names of nodes whose results the forward saves.
    """

    name: ClassVar[str] = "recompute_activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.TAGGED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    recomputed: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts nodes "recomputed" and "saved"; what communicates, and names that are missing, are skipped."""
        policies = dict.fromkeys(self.recomputed, CheckpointPolicy.MUST_RECOMPUTE)
        policies |= dict.fromkeys(self.saved, CheckpointPolicy.MUST_SAVE)
        counts, changed, skipped = {"recomputed": 0, "saved": 0}, False, []
        nodes = {node.name: node for node in gm.graph.nodes}
        for name, policy in policies.items():
            node = nodes.get(name)
            if node is None:
                skipped.append(f"no node {name!r} in this graph")
            elif _communicates(node) and policy is CheckpointPolicy.MUST_RECOMPUTE:
                skipped.append(f"{name}: communicates")
            elif _is_activation(node) and node.meta.get("recompute") in (None, policy):
                changed |= set_policy(node, policy)
                counts["recomputed" if policy is CheckpointPolicy.MUST_RECOMPUTE else "saved"] += 1
        return PassReport(changed=changed, counts=counts, skipped=tuple(skipped))


def _is_activation(node: fx.Node) -> bool:
    """Not a symbolic size, which the partitioner saves or computes again as it sees fit."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (Tensor, tuple, list))


def _communicates(node: fx.Node) -> bool:
    is_of_dtensor = isinstance(node.target, OpOverload) and node.target.namespace == "_dtensor"
    return is_collective(node) or is_wait(node) or is_of_dtensor
