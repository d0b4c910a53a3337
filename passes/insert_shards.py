"""insert_shards: a plain joint graph becomes the joint graph of the sharded model.

The input graph holds full parameters and full gradients: a capture without ``fully_shard``. The input of each
parameter becomes its shard, with an ``unshard`` in front of the first reader. Each gradient of it gets a
``reduce_grad`` in front of the output. Each unit gets an input that is its handle. The result has the form of the
graphs that Dynamo captures of a sharded model. A complex parameter is gathered as reals, with a last dim of 2. The
facts about a parameter (unit, axes, dtypes) come as an :class:`~graphshard.ir.params.UnshardCall` without its tensors.

Before::

    %primals_1: f32[8, 4] = input
    %mm_0: f32[2, 8] = mm(%primals_2, ...)
    return [%mm_0, %mm_1, None]

After::

    %primals_1: f32[4, 4] = shard w Shard(0) of [8, 4] over shard=2, unit root
    %primals_handle_root: i8[0] = input
    %unshard_0: f32[8, 4] = unshard(%primals_1, %primals_handle_root, 'w', unit='root', shape=[8, 4], ...)
    %mm_0: f32[2, 8] = mm(%primals_2, ...)
    %reduce_grad_0: f32[4, 4] = reduce_grad(%mm_1, ...)
    return [%mm_0, %reduce_grad_0, None, None]

Numerics: those of sharded data parallelism instead of one rank: gradients are means over the ranks.

Does not handle:

- inputs with another shape than the parameter, or none of that name: these are refused;
- a parameter that only the output reads: its input becomes the shard, without an ``unshard``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphshard.errors import ShardingError
from graphshard.ir import (
    REDUCE_GRAD,
    UNSHARD,
    GraphEmitter,
    PlainParameter,
    UnshardCall,
    aten,
    fake_result,
    gradient_call,
    output_values,
    padded_shape,
)
from graphshard.pipeline import Fact, PassContext, PassReport, joint_outputs


@dataclass(frozen=True, kw_only=True)
class InsertShards:
    """See the module docstring; no options. The context's ``plain`` names the inputs to shard."""

    name: ClassVar[str] = "insert_shards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.MERGED, Fact.REDUCED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "parameters" and "gradients".

        Raises:
            ShardingError: lists all inputs that are missing or have another shape; the graph is unchanged.
        """
        inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        pending = {
            given.placeholder: given
            for given in ctx.plain
            if given.placeholder not in inputs or not _is_inserted(inputs[given.placeholder])
        }
        _refuse_misfits(pending, inputs)
        joint = joint_outputs(gm.graph)
        outputs = output_values(gm.graph)
        handles_behind: dict[int, int] = {}
        counts = {"parameters": 0, "gradients": 0}
        handles = _handles(gm.graph)
        position = {node: index for index, node in enumerate(gm.graph.nodes)}
        for name, node in inputs.items():
            if name not in pending:
                continue
            given = pending[name]
            unit = given.call.unit
            output = joint.gradients.get(node, len(outputs) - 1) if joint is not None else -1
            if unit not in handles:
                handles[unit] = _add_handle(gm.graph, node, unit)
                handles_behind[output] = handles_behind.get(output, 0) + 1
            call = given.call._replace(shard=node, handle=handles[unit])
            _gather(gm.graph, call, given.dtype, position)
            counts["parameters"] += 1
            grad = outputs[output] if joint is not None and node in joint.gradients else None
            if isinstance(grad, fx.Node):
                outputs[output] = _reduce(gm.graph, call, grad, given.dtype)
                counts["gradients"] += 1
        if joint is not None and counts["parameters"]:
            _set_outputs(gm.graph, outputs, handles_behind)
        has_new = bool(counts["parameters"])
        return PassReport(changed=has_new, counts=counts, new_signature=has_new)


def _handles(graph: fx.Graph) -> dict[str, fx.Node]:
    """The handles of units whose parameters with gather extensions are gathered already."""
    calls = [UnshardCall(*node.args) for node in graph.find_nodes(op="call_function", target=UNSHARD)]
    return {call.unit: call.handle for call in calls}


def _is_inserted(node: fx.Node) -> bool:
    return any(user.target is UNSHARD for user in node.users)


def _refuse_misfits(pending: Mapping[str, PlainParameter], inputs: Mapping[str, fx.Node]) -> None:
    wrong = []
    for name, given in pending.items():
        if name not in inputs:
            wrong.append(f"{given.call.name}: the graph has no input {name}")
            continue
        value = inputs[name].meta["val"]
        shape = [*value.shape, 2] if value.is_complex() else list(value.shape)
        if shape != list(given.call.shape):
            wrong.append(f"{given.call.name}: input {name} has shape {shape}, not {list(given.call.shape)}")
    if wrong:
        raise ShardingError("insert_shards: " + "; ".join(wrong))


def _add_handle(graph: fx.Graph, after: fx.Node, unit: str) -> fx.Node:
    with graph.inserting_after(after):
        handle = graph.placeholder(f"primals_handle_{unit.replace('.', '_')}")
    handle.meta["val"] = _empty_like(after, [0], torch.int8)
    return handle


def _gather(graph: fx.Graph, call: UnshardCall, dtype: torch.dtype, position: Mapping[fx.Node, int]) -> None:
    node = call.shard
    is_complex = node.meta["val"].is_complex()
    shard_shape = padded_shape(call.shape, call.dim, call.group_size)
    node.meta["val"] = _empty_like(node, shard_shape, dtype.to_real() if is_complex else dtype)
    readers = [reader for reader in node.users if reader.op != "output"]
    if not readers:
        return
    first = min(readers, key=position.__getitem__)
    with graph.inserting_before(first):
        emit = GraphEmitter(graph, origin=first)
        full = emit(UNSHARD, *call)
        full = emit(aten.view_as_complex.default, full) if is_complex else full
    for reader in readers:
        reader.replace_input_with(node, full)


def _empty_like(node: fx.Node, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    kwargs = {"dtype": dtype}
    value: torch.Tensor = fake_result(torch.ops.aten.new_empty.default, (node.meta["val"], shape), kwargs)
    return value


def _reduce(graph: fx.Graph, call: UnshardCall, grad: fx.Node, dtype: torch.dtype) -> fx.Node:
    shard = call.shard.meta["val"]
    emit, end = GraphEmitter(graph, origin=grad), _end_of_function(grad)
    if grad.meta["val"].is_complex():
        dtype = dtype.to_real()
        with graph.inserting_after(end):
            grad = end = emit(aten.view_as_real.default, grad)
    with graph.inserting_after(end):
        return emit(REDUCE_GRAD, *gradient_call(call, grad, shard.shape, dtype, shard.device))


def _end_of_function(grad: fx.Node) -> fx.Node:
    """The last node of the autograd function that made a gradient, additions of its results included.

    Autograd adds the results of a function to the gradients that wait for more before it calls the next function,
    the one that reduces. With a reduction in between, both terms of such a sum would be alive during it.
    """
    last = grad
    while _sequence(last.next) is not None and _sequence(last.next) == _sequence(grad):
        last = last.next
    while last.next.target is torch.ops.aten.add.Tensor and _sequence(last.next) is not None:
        last = last.next
    return last


def _sequence(node: fx.Node) -> int | None:
    number: int | None = node.meta.get("seq_nr")
    return number


def _set_outputs(graph: fx.Graph, outputs: Sequence[Any], handles_behind: Mapping[int, int]) -> None:
    """Sets the outputs, with None for the gradient of each handle; ``handles_behind`` counts these by output."""
    output = graph.output_node()

    def with_handles(values: Sequence[Any]) -> list[Any]:
        return [
            each
            for index, value in enumerate(values)
            for each in (value, *[None] * handles_behind.get(index, 0))
        ]

    if "desc" in output.meta:  # AOTAutograd's: one for each output
        output.meta["desc"] = with_handles(output.meta["desc"])
    output.args = (tuple(with_handles(outputs)),)
