"""Which parameter a collective serves, read from the data flow of the graph.

Between a shard and its gather stand only casts, pads and views; between a reduction and its gradient only slices,
scales and casts. A gather extension may compute anything of its shard before the gather. Following these chains needs
no hidden node metadata.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ir import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_HOOK,
    GATHERS,
    JOIN_PARTS,
    PACK,
    REDUCE_SCATTERS,
    UNPACK,
    UNSHARD,
    ParameterBinding,
    RowPlace,
    aten,
    dtype_text,
    group_name,
    is_collective,
    is_repeatable,
    is_wait,
    operands,
    output_values,
    setting,
    tensor_bytes,
)
from .context import PassContext

#: Names of the kinds of collectives in bucket keys and counts.
KINDS: dict[Any, str] = {
    **dict.fromkeys(GATHERS, "gather"),
    **dict.fromkeys(REDUCE_SCATTERS, "reduction"),
    ALL_REDUCE: "all-reduce",
    ALL_REDUCE_HOOK: "hook",
}
_REDUCTIONS = {target for target, kind in KINDS.items() if kind != "gather"}

_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_SCALE_OPS = {aten.mul.Tensor, aten.div.Tensor}

#: Ops that may stand between a shard and its gather, or between a reduction and its gradient.
_LAYOUT_OPS = {
    aten.constant_pad_nd.default,
    aten.clone.default,
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.select.int,
    aten._to_copy.default,
    aten.cat.default,
    aten.split_with_sizes.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.device_put.default,
    operator.getitem,
    PACK,
    UNPACK,
}


def is_layout(node: fx.Node) -> bool:
    """True for views and for the ops that may stand around a collective.

    A product counts only if it scales by a constant; a product of two tensors is compute.
    """
    if node.target in _SCALE_OPS:
        return len(node.all_input_nodes) == 1
    is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    return is_view or node.target in _LAYOUT_OPS


def shards_behind(node: fx.Node, ctx: PassContext) -> list[ParameterBinding]:
    """The parameters whose shards a gather over their axis reads; empty if it reads anything else too.

    What a gather extension computes of a shard in front of the gather (:func:`prepared_nodes`) counts as the shard.
    """
    found: dict[str, ParameterBinding] = {}
    pending = operands(node)
    while pending:
        source = pending.pop()
        binding = ctx.binding(source.name) if source.op == "placeholder" else None
        if binding is not None and group_name(node) in binding.group_names:
            found[binding.placeholder] = binding
        elif is_layout(source):
            pending.extend(source.all_input_nodes)
        else:
            behind = parts_behind(source, ctx, is_free=True)
            if not behind or any(group_name(node) not in each.group_names for each in behind):
                return []
            found |= {each.placeholder: each for each in behind}
    return sorted(found.values(), key=lambda binding: binding.position)


def parts_behind(node: fx.Node, ctx: PassContext, *, is_free: bool = False) -> list[ParameterBinding]:
    """The parameters with gather extensions of whose shards alone a value is computed; else none.

    With ``is_free``, none either if an op on the way must stay where it is.
    """
    holder = ctx.holders()
    found: dict[str, ParameterBinding] = {}
    pending, seen = [node], {node}
    while holder and pending:
        source = pending.pop()
        if source.op == "placeholder":
            if source.name not in holder:
                return []
            found[holder[source.name].name] = holder[source.name]
        elif source.target in GATHERS or (is_free and not is_repeatable(source)):
            return []
        fresh = [each for each in source.all_input_nodes if each not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return sorted(found.values(), key=lambda binding: binding.position)


def prepared_nodes(gm: fx.GraphModule, ctx: PassContext) -> frozenset[fx.Node]:
    """What gather extensions compute of their shards alone, without what they compute of gathered tensors.

    A cast for the wire is one, and so are the largest value that it needs, its all-reduce, and the wait for that. An op
    that draws random numbers or writes to memory is none, nor is what is computed of its result.
    """
    holder = ctx.holders()
    found: set[fx.Node] = set()
    if holder:
        for node in gm.graph.nodes:
            sources = node.all_input_nodes
            if node.op != "call_function" or node.target in GATHERS or not sources or not is_repeatable(node):
                continue
            if all(each in found or (each.op == "placeholder" and each.name in holder) for each in sources):
                found.add(node)
    return frozenset(found)


def row_places(gm: fx.GraphModule, ctx: PassContext) -> dict[fx.Node, RowPlace]:
    """For each gather of one shard (as it is or cast), the shard's place in its row; other gathers are left out."""
    bindings = {binding.placeholder: binding for binding in ctx.parameters if binding.row_offset >= 0}
    found = {}
    for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER):
        shard, _ = gathered_shard(node)
        if shard.name in bindings and shard.op == "placeholder":
            value, binding = shard.meta["val"], bindings[shard.name]
            row = f"{binding.handle} {group_name(node)} {value.dtype} {value.device}"
            found[node] = RowPlace(row, binding.row_offset, value.numel())
    return found


def gathered_shard(gather: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The shard that a gather sends, and the node that casts it first; None if none does."""
    (source,) = operands(gather)
    return (source.all_input_nodes[0], source) if source.target in _CASTS else (source, None)


def ungathered_readers(value: fx.Node) -> list[fx.Node]:
    """The nodes that compute with a value, a shard for instance: no shard ops, layout ops or collectives."""
    found = []
    pending = list(value.users)
    while pending:
        reader = pending.pop()
        if reader.op == "output" or reader.target is UNSHARD or is_collective(reader):
            continue
        if is_layout(reader):
            pending.extend(reader.users)
        else:
            found.append(reader)
    return found


def reductions_of(gradient: fx.Node, binding: ParameterBinding) -> list[fx.Node]:
    """The reductions that a gradient output comes out of, the last one first.

    Only layout ops and sums with inputs may stand in between. An all-reduce of a reduce-scattered gradient gives two
    reductions; a split reduction gives its parts; of a bucket, only the members that the gradient is made of are
    followed. If no reduction over the parameter's groups is found, the list is empty.
    """
    found: dict[fx.Node, None] = {}
    parts: dict[fx.Node, tuple[int, int] | None] = {gradient: None}
    pending = [gradient]
    for node in pending:
        if is_collective(node):
            if node.target not in _REDUCTIONS or group_name(node) not in binding.group_names:
                continue
            found[node] = None
        elif not (is_wait(node) or is_layout(node) or is_accumulation(node) or node.target is JOIN_PARTS):
            continue
        sources = [source for source in node.all_input_nodes if source.op != "placeholder"]
        if len(sources) > 1 and node.target is not JOIN_PARTS:
            sources = _packed_in(node, parts[node])
        for source in sources:
            if source not in parts:
                parts[source] = _part_of(node, source, parts[node])
                pending.append(source)
    return list(found)


def _part_of(node: fx.Node, source: fx.Node, part: tuple[int, int] | None) -> tuple[int, int] | None:
    """The range of elements of ``source`` that a part of ``node`` is made of; None for all, or if it is unknown."""
    value, behind = node.meta["val"], source.meta["val"]
    if not isinstance(value, torch.Tensor) or not isinstance(behind, torch.Tensor):
        return None
    if node.target is aten.slice.Tensor and behind.dim() == 1 and len(node.args) in (3, 4):
        start, stop = part or (0, int(value.shape[0]))
        return node.args[2] + start, node.args[2] + stop
    return part if value.numel() == behind.numel() else None


def _packed_in(node: fx.Node, part: tuple[int, int] | None) -> list[fx.Node]:
    """The members of a one-row bucket that a part of it overlaps; none for other nodes, or if the part is unknown."""
    if node.target is not PACK or node.args[1] != 1 or part is None:
        return []
    found, begin = [], 0
    for member in node.args[0]:
        end = begin + tensor_bytes(member.meta["val"]) // node.meta["val"].dtype.itemsize
        if member.op != "placeholder" and begin < part[1] and part[0] < end:
            found.append(member)
        begin = end
    return found


def is_accumulation(node: fx.Node) -> bool:
    """True for a sum with a gradient of earlier micro-batches, which is an input."""
    return node.target is aten.add.Tensor and any(
        source.op == "placeholder" for source in node.all_input_nodes
    )


def reduced_parameters(gm: fx.GraphModule, ctx: PassContext) -> dict[fx.Node, list[ParameterBinding]]:
    """For each reduction of a joint or backward graph, the parameters whose gradients come out of it."""
    if ctx.first_gradient is None:
        return {}
    values = output_values(gm.graph)
    served: dict[fx.Node, list[ParameterBinding]] = {}
    for binding in ctx.reduced_bindings():
        gradient = ctx.gradient_of(binding, values)
        for source in reductions_of(gradient, binding) if gradient is not None else ():
            served.setdefault(source, []).append(binding)
    return served


def bucket_keys(gm: fx.GraphModule, ctx: PassContext) -> dict[fx.Node, tuple[str, ...]]:
    """For each gather and reduction that serves one unit, the key that must be equal for two to be merged.

    Gathers of several dtypes are sent as bytes, so their dtype is not part of it.
    """
    reduced = reduced_parameters(gm, ctx)
    keys: dict[fx.Node, tuple[str, ...]] = {}
    for node in filter(is_collective, gm.graph.nodes):
        if node.target in GATHERS:
            bindings = shards_behind(node, ctx)
        elif node.target in _REDUCTIONS:
            bindings = reduced.get(node, [])
            if not bindings and node.target is ALL_REDUCE and ctx.extended:
                bindings = shards_behind(node, ctx)  # of what an extension needs before it casts
        else:
            continue
        if len({binding.unit for binding in bindings}) == 1:
            dtype = "" if node.target in GATHERS else dtype_text(node.meta["val"].dtype)
            keys[node] = (KINDS[node.target], bindings[0].unit, dtype, group_name(node), setting(node))
    return keys
