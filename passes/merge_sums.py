"""merge_sums: a product and the sum after it become one product, if that delays nothing.

Inductor merges them after the plan is made, and at the place of the sum: the product then runs later than planned,
and its inputs are held until then. If a head shares its weight with the embedding, for instance, its gradient would
be computed at the end of the backward, and the gradient of the logits held until then. This pass merges them before
anything is planned. It merges a sum whose other summand exists before the product, or is made of inputs and gathers
alone. It keeps the others apart with a view, which Inductor's pattern does not match.

Before::

    %mm_0: f32[32, 16] = mm(%grad, %unshard_0)
    %mm_1: f32[64, 16] = mm(%t_0, %saved)
    %add_0: f32[32, 16] = add(%other, %mm_0)
    %sin_0: f32[64, 16] = sin(%third)
    %add_1: f32[64, 16] = add(%mm_1, %sin_0)

After::

    %addmm_0: f32[32, 16] = addmm(%other, %grad, %unshard_0)
    %mm_0: f32[64, 16] = mm(%t_0, %saved)
    %sin_0: f32[64, 16] = sin(%third)
    %view_0: f32[64, 16] = view(%mm_0, [64, 16])
    %add_0: f32[64, 16] = add(%view_0, %sin_0)

Numerics: merged, those of Inductor's own merging: the sum is made inside of the product. Kept apart, those of eager
code.

Does not handle what Inductor does not merge (its pattern ``addmm``, torch 2.11 to 2.15):

- products that another node reads, batched products, and sums with a factor;
- a summand of another dtype, or of a shape that does not broadcast to the product;
- on accelerators, sums that only pointwise ops read.

Nor does it handle symbolic sizes, where Inductor decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphshard.ir import GATHERS, UNSHARD, GraphEmitter, aten, is_pointwise, is_wait, recompute_tags
from graphshard.pipeline import Fact, PassContext, PassReport, is_layout


@dataclass(frozen=True, kw_only=True)
class MergeSums:
    """See the module docstring; no options."""

    name: ClassVar[str] = "merge_sums"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts sums "merged" and "kept apart"."""
        counts = {"merged": 0, "kept apart": 0}
        position = {node: index for index, node in enumerate(gm.graph.nodes)}
        for total in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            products = [
                one for one in total.args if isinstance(one, fx.Node) and _would_be_merged(one, total)
            ]
            if not products or _stays_on_accelerator(total, ctx):
                continue
            # Of two products, take the one that stands after the other.
            product = max(products, key=position.__getitem__)
            summand = _other(total, product)
            if position[summand] < position[product] or _is_given(summand):
                merged = _merge(gm.graph, summand, product, total, position)
                position[merged] = max(position[summand], position[product])
                counts["merged"] += 1
            else:
                _keep_apart(gm.graph, product, total)
                counts["kept apart"] += 1
        return PassReport(changed=any(counts.values()), counts=counts)


def _stays_on_accelerator(total: fx.Node, ctx: PassContext) -> bool:
    device = ctx.device_type or total.meta["val"].device.type
    return device != "cpu" and all(map(is_pointwise, total.users))


def _is_given(summand: fx.Node) -> bool:
    """Whether a value is made of inputs by gathers and layout ops alone, so that nothing has to be computed first."""
    pending, seen = [summand], {summand}
    for node in pending:
        if node.op == "placeholder":
            continue
        if not (is_layout(node) or is_wait(node) or node.target is UNSHARD or node.target in GATHERS):
            return False
        new = [source for source in node.all_input_nodes if source not in seen]
        pending += new
        seen.update(new)
    return True


def _other(total: fx.Node, product: fx.Node) -> fx.Node | None:
    """The other summand, if it is a node of the graph."""
    others = [one for one in total.args if isinstance(one, fx.Node) and one is not product]
    return others[0] if others else None


def _would_be_merged(product: fx.Node, total: fx.Node) -> bool:
    if product.target is not aten.mm.default or list(product.users) != [total] or total.kwargs:
        return False
    summand = _other(total, product)
    value = summand.meta["val"] if summand is not None else None
    result = product.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype != result.dtype:
        return False
    shapes = [*value.shape, *result.shape]
    return all(isinstance(size, int) for size in shapes) and _broadcasts_to(value.shape, result.shape)


def _broadcasts_to(shape: torch.Size, wanted: torch.Size) -> bool:
    if len(shape) > len(wanted):
        return False
    return all(size in (1, want) for size, want in zip(reversed(shape), reversed(wanted), strict=False))


def _merge(
    graph: fx.Graph, summand: fx.Node, product: fx.Node, total: fx.Node, position: dict[fx.Node, int]
) -> fx.Node:
    emit = GraphEmitter(graph, origin=product, extra_meta=recompute_tags(product))
    with graph.inserting_after(max(summand, product, key=position.__getitem__)):
        merged = emit(aten.addmm.default, summand, *product.args)
    total.replace_all_uses_with(merged)
    graph.erase_node(total)
    graph.erase_node(product)
    return merged


def _keep_apart(graph: fx.Graph, product: fx.Node, total: fx.Node) -> None:
    emit = GraphEmitter(graph, origin=product, extra_meta=recompute_tags(product))
    with graph.inserting_before(total):
        viewed = emit(aten.view.default, product, list(product.meta["val"].shape))
    total.replace_input_with(product, viewed)
