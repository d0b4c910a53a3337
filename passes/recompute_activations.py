"""recompute_activations: which activations are computed again in the backward, and which are saved instead.

The results of the ops in ``recomputed`` are not saved for the backward. The backward computes them again, with all
that lies between them and what is saved; the partitioner may have no way to save an op in between. Both lists come
from a partition that was tried (:mod:`graphshard.backend.step_trials`).

Before::

    %mm_0: f32[4, 8] = mm(%primals_1, %primals_2)
    %relu_0: f32[4, 8] = relu(%mm_0)

After, with ``recomputed=("relu",)`` and ``saved=("mm",)``, the names of the nodes::

    %mm_0: f32[4, 8] = mm(%primals_1, %primals_2)  !save
    %relu_0: f32[4, 8] = relu(%mm_0)  !recompute

Numerics: bitwise exact, if an op gives the same result twice.

Does not handle:

- nodes that have a tag already (gathered parameters, regions of ``torch.utils.checkpoint``): they keep it;
- collectives, which run only once;
- symbolic sizes, which the partitioner saves or recomputes as it sees fit.
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
    """Options of the pass; see the module docstring.

    Attributes:
        recomputed: names of nodes of the forward that are computed again, unless they are in ``saved``.
        saved: names of nodes whose results the forward saves.
    """

    name: ClassVar[str] = "recompute_activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.TAGGED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    recomputed: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts nodes "recomputed" and "saved" that had no tag; names that are missing are reported as skipped."""
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
    """Whether a node is an op with tensors as its result."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (Tensor, tuple, list))


def _communicates(node: fx.Node) -> bool:
    is_of_dtensor = isinstance(node.target, OpOverload) and node.target.namespace == "_dtensor"
    return is_collective(node) or is_wait(node) or is_of_dtensor
