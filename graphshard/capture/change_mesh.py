"""Changes the mesh of a captured step, without another capture.

The halves depend on the mesh only through their shard ops, their shards and the context: the partitioner treats
parameters as free to keep, and tags tell it which gathers to repeat. A mesh without shards is the exception. Nothing is
gathered again there, so it needs a capture of its own. So does another size of a further axis (tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._compat import lazy_graph_modules
from ..ir import (
    REDUCE_GRAD,
    UNSHARD,
    MeshAxis,
    MeshLayout,
    ReduceGradCall,
    ShardedShape,
    UnshardCall,
    copy_graph,
    fake_result,
    padded_shape,
    row_offsets,
)
from ..pipeline import PassContext
from .capture_step import CapturedStep


def can_reshard(before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    """Whether a step captured for the mesh ``before`` can be changed to the mesh ``after``."""
    return (before["shard"] > 1) == (after["shard"] > 1) and _further(before) == _further(after)


def _further(mesh: Mapping[str, int]) -> dict[str, int]:
    """The axes beside those of data parallelism; the halves hold their collectives."""
    return {name: size for name, size in mesh.items() if name not in ("replicate", "shard")}


def reshard_step(captured: CapturedStep, mesh: Mapping[str, int]) -> CapturedStep:
    """A copy of a step, on the ranks of another mesh.

    Args:
        captured: a step whose halves are not lowered; it is not changed.
        mesh: sizes of the axes: "shard", "replicate" if there are replicas, and the further axis of ``captured``.

    Returns:
        A step without texts and records; its joint graph is that of ``captured``.
    """
    if captured.context.held:
        sizes = {binding.group_size for binding in captured.context.parameters}
        assert sizes == {mesh["shard"]}, "a step with gather extensions is captured for each mesh"
        forward, backward = copy_graph(captured.forward), copy_graph(captured.backward)
        return replace(captured, forward=forward, backward=backward, text="", records=())
    with lazy_graph_modules():
        offsets = _offsets(captured, mesh["shard"])
        forward, backward = (
            _resharded(gm, captured.context, mesh, offsets) for gm in (captured.forward, captured.backward)
        )
    context = _context_on_mesh(captured.context, mesh, offsets)
    if captured.placed is not None:
        context = replace(context, mesh=MeshLayout.of_axes([*context.mesh.axes, captured.placed.axis]))
    return replace(captured, forward=forward, backward=backward, context=context, text="", records=())


def _offsets(captured: CapturedStep, num_shards: int) -> dict[str, int]:
    """Row offsets of shards in their units, by name of the parameter."""
    bindings = {binding.name: binding for binding in captured.context.parameters}
    graph = captured.forward.graph
    dtypes = {node.name: node.meta["val"].dtype for node in graph.find_nodes(op="placeholder")}
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        if any(reader.target is torch.ops.aten.view_as_complex.default for reader in node.users):
            dtypes[node.args[0].name] = dtypes[node.args[0].name].to_complex()
    ordered = [bindings[name] for name in captured.order if name in bindings]
    return row_offsets(
        {
            each.name: ShardedShape(each.unit, each.shape, each.dim, num_shards, dtypes[each.placeholder])
            for each in ordered
        }
    )


def _axes(mesh: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of a shard op that name its ranks."""
    num_replicas = mesh.get("replicate", 1)
    replicate = "replicate" if num_replicas > 1 else ""
    return {
        "group_size": mesh["shard"],
        "replicate_axis": replicate,
        "replicate_size": num_replicas,
        "replicate_group": replicate,
    }


def _context_on_mesh(
    context: PassContext, mesh: Mapping[str, int], offsets: Mapping[str, int]
) -> PassContext:
    num_shards, num_replicas = mesh["shard"], mesh.get("replicate", 1)
    sizes = {"replicate": num_replicas} if num_replicas > 1 else {}
    sizes["shard"] = num_shards
    bindings = tuple(
        replace(
            binding,
            group_size=num_shards,
            reshard=num_shards if binding.reshard > 1 else 1,
            replicate_axis="replicate" if num_replicas > 1 else "",
            replicate_size=num_replicas,
            group_names=tuple(reversed(sizes)),
            row_offset=offsets[binding.name],
        )
        for binding in context.parameters
    )
    axes = [MeshAxis(label=name, size=size, group_name=name) for name, size in sizes.items()]
    return replace(context, mesh=MeshLayout.of_axes(axes), parameters=bindings)


def _resharded(
    gm: fx.GraphModule, context: PassContext, mesh: Mapping[str, int], offsets: Mapping[str, int]
) -> fx.GraphModule:
    gm = copy_graph(gm)
    num_shards, axes = mesh["shard"], _axes(mesh)
    inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    shapes = {}
    for binding in context.parameters:
        shapes[binding.name] = padded_shape(binding.shape, binding.dim, num_shards)
        if binding.placeholder in inputs:
            _retype(inputs[binding.placeholder], shapes[binding.name])
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        call = UnshardCall(*node.args)
        reshard = num_shards if call.reshard > 1 else 1
        node.args = tuple(call._replace(reshard=reshard, row_offset=offsets[call.name], **axes))
    for node in gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        reduction = ReduceGradCall(*node.args)
        node.args = tuple(reduction._replace(shard_shape=shapes[reduction.name], **axes))
        _retype(node, shapes[reduction.name])
    return gm


def _retype(node: fx.Node, shape: list[int]) -> None:
    kwargs = {"dtype": node.meta["val"].dtype}
    node.meta["val"] = fake_result(torch.ops.aten.new_empty.default, (node, shape), kwargs)
