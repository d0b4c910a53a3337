"""merge_unshards: one gather and one reduction per parameter, however often it is read.

A parameter that is read twice (a tied weight, a module called twice) is traced as two ``unshard`` nodes. In the
backward it has two ``reduce_grad`` nodes, whose results are added.

Before::

    %unshard_0: f32[8, 4] = unshard(%primals_1, %primals_2, 'w', ...)
    %unshard_1: f32[8, 4] = unshard(%primals_1, %primals_2, 'w', ...)
    %reduce_grad_0: f32[4, 4] = reduce_grad(%mm_2, %primals_2, 'w', ...)
    %reduce_grad_1: f32[4, 4] = reduce_grad(%mm_3, %primals_2, 'w', ...)
    %add_0: f32[4, 4] = add(%reduce_grad_0, %reduce_grad_1)

After::

    %unshard_0: f32[8, 4] = unshard(%primals_1, %primals_2, 'w', ...)
    %add_0: f32[8, 4] = add(%mm_2, %mm_3)
    %reduce_grad_0: f32[4, 4] = reduce_grad(%add_0, %primals_2, 'w', ...)

Numerics: merging gathers is bitwise exact. Adding gradients before the reduction instead of after it changes the
order of the sums: equal up to rounding in the dtype of the reduction.

Does not handle:

- a reduction whose result is read by more than the sum;
- a sum with a factor (``alpha``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.ir import REDUCE_GRAD, UNSHARD, GraphEmitter, ReduceGradCall, aten
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class MergeUnshards:
    """See the module docstring; no options."""

    name: ClassVar[str] = "merge_unshards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.MERGED, Fact.REDUCED})
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gathers merged" and "reductions merged"."""
        gathers = _merge_gathers(gm.graph)
        reductions = _merge_reductions(gm.graph)
        return PassReport(
            changed=bool(gathers or reductions),
            counts={"gathers merged": gathers, "reductions merged": reductions},
        )


def _merge_gathers(graph: fx.Graph) -> int:
    first_of: dict[tuple[object, ...], fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.target is not UNSHARD:
            continue
        key = tuple(tuple(arg) if isinstance(arg, (list, tuple)) else arg for arg in node.args)
        first = first_of.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            merged += 1
    return merged


def _merge_reductions(graph: fx.Graph) -> int:
    merged = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        left, right = node.args[:2]
        if node.kwargs or not (_is_private_reduction(left) and _is_private_reduction(right)):
            continue
        first, second = ReduceGradCall(*left.args), ReduceGradCall(*right.args)
        if left is right or first[1:] != second[1:]:
            continue
        with graph.inserting_before(node):
            emit = GraphEmitter(graph, origin=node)
            total = emit(aten.add.Tensor, first.grad, second.grad)
            reduced = emit(REDUCE_GRAD, *first._replace(grad=total))
        node.replace_all_uses_with(reduced)
        for dead in (node, left, right):
            graph.erase_node(dead)
        merged += 1
    return merged


def _is_private_reduction(value: object) -> bool:
    return isinstance(value, fx.Node) and value.target is REDUCE_GRAD and len(value.users) == 1
