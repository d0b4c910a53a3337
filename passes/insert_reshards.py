"""insert_reshards: placed parameters of a plain joint graph become the pieces of a rank, behind a reshard.

The input graph holds whole parameters and whole gradients: a capture without ``parallelize``. The input of each placed
parameter becomes the piece of the first rank of the axis, which is never smaller than another, with a reshard to
``Replicate`` in front of its first reader. Its gradient gets a reshard back. The result has the form of the graphs that
Dynamo captures behind ``parallelize``, which ``propagate_sharding`` reads.

Before::

    %primals_1: f32[8, 4] = input
    %mm_0: f32[2, 8] = mm(%primals_2, ...)
    return [%mm_0, %mm_1, None]

After (cut along dim 0 over two ranks)::

    %primals_1: f32[4, 4] = input
    %reshard_0: f32[8, 4] = reshard(%primals_1, Shard(0) -> Replicate, shape=[8, 4], axis=tp=2, sends=64 bytes)
    %mm_0: f32[2, 8] = mm(%primals_2, ...)
    %reshard_1: f32[4, 4] = reshard(%mm_1, Replicate -> Shard(0), shape=[8, 4], axis=tp=2, sends=0 bytes)
    return [%mm_0, %reshard_1, None]

Numerics: bitwise.

Does not handle:

- inputs with another shape than the parameter, or none of that name: these are refused;
- a parameter that only the output reads: its input becomes the piece, without a reshard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphshard.errors import ShardingError
from graphshard.ir import RESHARD, GraphEmitter, PlacedParameter, ReshardCall, fake_result, output_values
from graphshard.pipeline import Fact, PassContext, PassReport, joint_outputs


@dataclass(frozen=True, kw_only=True)
class InsertReshards:
    """See the module docstring; no options. The context's ``placed`` names the inputs to cut."""

    name: ClassVar[str] = "insert_reshards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "parameters" and "gradients".

        Raises:
            ShardingError: lists all inputs that are missing or have another shape; the graph is unchanged.
        """
        inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        pending = [each for each in ctx.placed if not _is_inserted(inputs.get(each.placeholder))]
        _refuse_misfits(pending, inputs)
        joint = joint_outputs(gm.graph)
        outputs = output_values(gm.graph)
        counts = {"parameters": 0, "gradients": 0}
        position = {node: index for index, node in enumerate(gm.graph.nodes)}
        for each in pending:
            node = inputs[each.placeholder]
            call = each.call._replace(value=node)
            _cut(gm.graph, call, position)
            counts["parameters"] += 1
            index = joint.gradients.get(node) if joint is not None else None
            grad = outputs[index] if index is not None else None
            if isinstance(grad, fx.Node):
                assert index is not None
                outputs[index] = _cut_gradient(gm.graph, call, grad)
                counts["gradients"] += 1
        if counts["gradients"]:
            gm.graph.output_node().args = (tuple(outputs),)
        has_new = bool(counts["parameters"])
        return PassReport(changed=has_new, counts=counts, new_signature=has_new)


def _is_inserted(node: fx.Node | None) -> bool:
    return node is not None and any(user.target is RESHARD for user in node.users)


def _refuse_misfits(pending: Sequence[PlacedParameter], inputs: dict[str, fx.Node]) -> None:
    wrong = []
    for each in pending:
        if each.placeholder not in inputs:
            wrong.append(f"{each.name}: the graph has no input {each.placeholder}")
            continue
        shape = list(inputs[each.placeholder].meta["val"].shape)
        if shape != list(each.call.shape):
            wrong.append(
                f"{each.name}: input {each.placeholder} has shape {shape}, not {list(each.call.shape)}"
            )
    if wrong:
        raise ShardingError("insert_reshards: " + "; ".join(wrong))


def _cut(graph: fx.Graph, call: ReshardCall, position: dict[fx.Node, int]) -> None:
    """Makes an input the piece of a rank; what reads it reads a reshard."""
    node = call.value
    readers = [reader for reader in node.users if reader.op != "output"]
    to_piece = call._replace(src=call.dst, dst=call.src)
    node.meta["val"] = fake_result(
        torch.ops.aten.new_empty.default,
        (node.meta["val"], fake_result(RESHARD, tuple(to_piece), {}).shape),
        {"dtype": node.meta["val"].dtype},
    )
    if not readers:
        return
    first = min(readers, key=position.__getitem__)
    with graph.inserting_before(first):
        whole = GraphEmitter(graph, origin=first)(RESHARD, *call)
    for reader in readers:
        reader.replace_input_with(node, whole)


def _cut_gradient(graph: fx.Graph, call: ReshardCall, grad: fx.Node) -> fx.Node:
    with graph.inserting_after(grad):
        return GraphEmitter(graph, origin=grad)(
            RESHARD, *call._replace(value=grad, src=call.dst, dst=call.src)
        )
