"""merge_sums: a product and the sum behind it are one product, as Inductor makes them.

Inductor merges them after the plan is made, and where the sum stands: the product runs later than planned, and what it
reads is held until then. Here they are merged before anything is planned, where the later of the product and the
other summand stands.

Before::

    %mm_0: f32[32, 16] = mm(%grad, %unshard_0)
    %mm_1: f32[64, 16] = mm(%t_0, %saved)
    %add_0: f32[32, 16] = add.Tensor(%other, %mm_0)

After::

    %addmm_0: f32[32, 16] = addmm(%other, %grad, %unshard_0)
    %mm_1: f32[64, 16] = mm(%t_0, %saved)

Merged is what Inductor merges (its pattern ``addmm``, torch 2.11 to 2.15): a product of matrices that only the sum
reads, another summand of its dtype that broadcasts to it, no factor. Not where sizes are symbolic.

Numerics: those of Inductor's own merging: the sum is made inside of the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphshard.collectives import aten
from graphshard.context import PassContext
from graphshard.facts import Fact
from graphshard.pipeline import PassReport
from graphshard.rewrite import GraphEmitter, recompute_tags


@dataclass(frozen=True, kw_only=True)
class MergeSums:
    """See the module docstring; no options."""

    name: ClassVar[str] = "merge_sums"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "sums merged"."""
        position = {node: index for index, node in enumerate(gm.graph.nodes)}
        merged = 0
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            products = [
                (position[one], one)
                for one in node.args
                if isinstance(one, fx.Node) and _is_merged(one, node)
            ]
            if products:
                _, product = max(products)  # of two, the one that has the other in front of it
                _merge(gm.graph, product, node, position)
                merged += 1
        return PassReport(changed=merged > 0, counts={"sums merged": merged})


def _is_merged(product: fx.Node, total: fx.Node) -> bool:
    if product.target is not aten.mm.default or list(product.users) != [total] or total.kwargs:
        return False
    (summand,) = [one for one in total.args if one is not product] or [None]
    value = summand.meta["val"] if isinstance(summand, fx.Node) else None
    result = product.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype != result.dtype:
        return False
    shapes = [*value.shape, *result.shape]
    return all(isinstance(size, int) for size in shapes) and _broadcasts_to(value.shape, result.shape)


def _broadcasts_to(shape: torch.Size, wanted: torch.Size) -> bool:
    if len(shape) > len(wanted):
        return False
    return all(size in (1, want) for size, want in zip(reversed(shape), reversed(wanted), strict=False))


def _merge(graph: fx.Graph, product: fx.Node, total: fx.Node, position: dict[fx.Node, int]) -> None:
    (summand,) = [one for one in total.args if one is not product]
    last = max(product, summand, key=position.__getitem__)
    emit = GraphEmitter(graph, origin=product, extra_meta=recompute_tags(product))
    with graph.inserting_after(last):
        merged = emit(aten.addmm.default, summand, *product.args)
    position[merged] = position[last]
    total.replace_all_uses_with(merged)
    graph.erase_node(total)
    graph.erase_node(product)
