"""recompute_activations: activations that are computed again in the backward, and those that are saved instead.

Of the ops named here the results are not saved for the backward, which computes them again, with all that lies between
them and what is saved: of an op in between the partitioner may know no way to save the result. Both lists come from
a partition that was tried (:mod:`graphshard.backend.step_trials`). What has a tag keeps it: gathered parameters, and
regions of ``torch.utils.checkpoint``. A collective runs once.

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

from graphshard.ir import is_collective, is_wait
from graphshard.pipeline import Fact, PassContext, PassReport

from .tag_recompute import set_policy


@dataclass(frozen=True, kw_only=True)
class RecomputeActivations:
    """See the module docstring.

    Attributes:
        recomputed: names of nodes of the forward; those that are saved are left out.
        saved: names of nodes whose results the forward saves.
    """

    name: ClassVar[str] = "recompute_activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.TAGGED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    recomputed: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts nodes "recomputed" and "saved" that had no tag; names that are missing are skipped."""
        counts = {"recomputed": 0, "saved": 0}
        saved, again = set(self.saved), set(self.recomputed)
        for node in reversed(gm.graph.nodes):
            if "recompute" in node.meta or not _is_activation(node):
                continue
            if node.name in saved:
                set_policy(node, CheckpointPolicy.MUST_SAVE)
                counts["saved"] += 1
            elif node.name in again and not _communicates(node):
                set_policy(node, CheckpointPolicy.MUST_RECOMPUTE)
                counts["recomputed"] += 1
                again.update(source.name for source in node.all_input_nodes)
        missing = {*self.recomputed, *self.saved} - {node.name for node in gm.graph.nodes}
        return PassReport(
            changed=any(counts.values()),
            counts=counts,
            skipped=tuple(f"no node {name!r} in this graph" for name in sorted(missing)),
        )


def _is_activation(node: fx.Node) -> bool:
    """Not a symbolic size, which the partitioner saves or computes again as it sees fit."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (Tensor, tuple, list))


def _communicates(node: fx.Node) -> bool:
    is_of_dtensor = isinstance(node.target, OpOverload) and node.target.namespace == "_dtensor"
    return is_collective(node) or is_wait(node) or is_of_dtensor
