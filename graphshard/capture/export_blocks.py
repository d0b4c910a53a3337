"""Exports the joint graph of a model whose blocks repeat, faster than a plain export.

AOTAutograd takes time for each call it traces. So one block is exported once, and in the export of the whole model each
repetition is a pair of opaque ops. Copies of the block's nodes then replace these ops. The result equals the graph of a
plain export, node for node.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import export_joint, storage_id, tree_map
from ..ir import output_values, tensors_of, type_key, writes_of
from .find_blocks import Block, find_blocks, is_function


class _NotRepeatableError(Exception):
    """A block cannot be exported on its own, or its export would differ from a plain one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """The joint graph of one block.

    Attributes:
        inputs, tangents: its inputs: those of the block, and the gradients of differentiable outputs.
        trained: whether each input of the block needs a gradient.
        forward, backward: its calls.
        results: the outputs of the block.
        differentiable: whether gradients flow into each output.
        gradients: the gradient of each input, or None.
    """

    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    trained: tuple[bool, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    differentiable: tuple[bool, ...]
    gradients: tuple[fx.Node | None, ...]


#: The block whose repetitions are exported as opaque ops.
_EXPORTED: ContextVar[_Exported] = ContextVar("exported block")


def export_joint_of_blocks(
    stack: ExitStack,
    traced: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    decompositions: Mapping[Any, Any],
) -> fx.GraphModule:
    """:func:`graphshard._compat.export_joint`, faster where blocks repeat.

    It must run inside the fake mode of ``args``. Errors are those of a plain export.
    """
    plain = traced.graph
    try:
        if blocks := find_blocks(traced):
            with ExitStack() as attempt:
                exported = _export_block(traced, blocks[0], decompositions)
                traced.graph = _with_opaque_blocks(plain, blocks)
                token = _EXPORTED.set(exported)
                attempt.callback(_EXPORTED.reset, token)
                joint = export_joint(attempt, traced, args, kwargs, decompositions)
                _put_blocks(joint, exported, traced, blocks)
                stack.enter_context(attempt.pop_all())
            return joint
    # Any error: if the model causes it, the plain export raises it again, with a better message.
    except Exception:
        traced.graph = plain
    return export_joint(stack, traced, args, kwargs, decompositions)


def _export_block(traced: fx.GraphModule, block: Block, decompositions: Mapping[Any, Any]) -> _Exported:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{number}") for number, node in enumerate(block.inputs)}

    def copied(node: fx.Node) -> fx.Node:
        if is_function(traced, node) and node not in copies:
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in block.nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(tuple(copies[node] for node in block.outputs))
    values = [node.meta["example_value"] for node in block.inputs]
    fakes = [_Values().like(value).requires_grad_(value.requires_grad) for value in values]
    with ExitStack() as stack:
        joint = export_joint(stack, fx.GraphModule(traced, graph), tuple(fakes), {}, decompositions)
    return _parts(joint, block)


def _parts(joint: fx.GraphModule, block: Block) -> _Exported:
    placeholders = joint.graph.find_nodes(op="placeholder")
    outputs = output_values(joint.graph)
    differentiable = tuple(node.meta["example_value"].requires_grad for node in block.outputs)
    num_inputs, num_results = len(block.inputs), len(block.outputs)
    if len(outputs) != num_results + num_inputs or len(placeholders) != num_inputs + sum(differentiable):
        raise _NotRepeatableError("autograd follows a write on its inputs, or it has effects")
    if not writes_of(joint.graph).all.isdisjoint(placeholders):
        raise _NotRepeatableError("it writes on its inputs")
    calls = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op != "call_function" for node in calls):
        raise _NotRepeatableError("its graph holds constants")
    tags = [node.meta.get("partitioner_tag") for node in calls]
    if not set(tags) <= {"is_forward", "is_backward"}:
        raise _NotRepeatableError("some of its calls belong to one half")
    if any(value.is_neg() for node in calls for value in tensors_of(node.meta["val"])):
        raise _NotRepeatableError("some of its values are negated views")
    is_backward = [tag == "is_backward" for tag in tags]
    return _Exported(
        inputs=tuple(placeholders[:num_inputs]),
        tangents=tuple(placeholders[num_inputs:]),
        trained=tuple(node.meta["example_value"].requires_grad for node in block.inputs),
        forward=tuple(node for node, late in zip(calls, is_backward, strict=True) if not late),
        backward=tuple(node for node, late in zip(calls, is_backward, strict=True) if late),
        results=tuple(outputs[:num_results]),
        differentiable=differentiable,
        gradients=tuple(outputs[num_results:]),
    )


def _with_opaque_blocks(plain: fx.Graph, blocks: Sequence[Block]) -> fx.Graph:
    """A copy of the graph in which each block is one call."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(plain, copies))
    graph.set_codegen(plain._codegen)
    for index, block in enumerate(blocks):
        replaced = [copies[node] for node in block.nodes]
        with graph.inserting_before(replaced[-1]):
            inputs = [copies[node] for node in block.inputs]
            results = graph.call_function(_OpaqueBlock.apply, (index, *inputs))
            for number, node in enumerate(block.outputs):
                result = graph.call_function(operator.getitem, (results, number))
                copies[node].replace_all_uses_with(result)
                copies[node] = result
        for old in reversed(replaced):
            graph.erase_node(old)
    return graph


@torch.library.custom_op("graphshard::opaque_block", mutates_args=())
def _opaque_block(index: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The opaque op for the forward of a repetition."""
    raise NotImplementedError


@_opaque_block.register_fake
def _(index: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [_Values().like(node.meta["val"]) for node in _EXPORTED.get().results]


@torch.library.custom_op("graphshard::opaque_block_backward", mutates_args=())
def _opaque_block_backward(index: int, tangents: Sequence[Tensor]) -> list[Tensor]:
    """The opaque op for the backward of a repetition."""
    raise NotImplementedError


@_opaque_block_backward.register_fake
def _(index: int, tangents: Sequence[Tensor]) -> list[Tensor]:
    gradients = _EXPORTED.get().gradients
    return [_Values().like(node.meta["val"]) for node in gradients if node is not None]


class _OpaqueBlock(torch.autograd.Function):
    """A repetition as one differentiable call of the opaque ops."""

    @staticmethod
    def forward(ctx: Any, index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        exported = _EXPORTED.get()
        _refuse_other_types(inputs, exported.inputs)
        if ctx.needs_input_grad[1:] != exported.trained:
            raise _NotRepeatableError("other inputs need gradients")
        ctx.index = index
        ctx.set_materialize_grads(False)
        results = _opaque_block(index, list(inputs))
        flows = exported.differentiable
        ctx.save_for_backward(*inputs, *results)
        ctx.mark_non_differentiable(*(one for one, has in zip(results, flows, strict=True) if not has))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        exported = _EXPORTED.get()
        flowing = zip(gradients, exported.differentiable, strict=True)
        tangents = [gradient for gradient, has in flowing if has]
        _refuse_other_types(tangents, exported.tangents)
        _ = ctx.saved_tensors  # raises an error if one was changed in place
        found = iter(_opaque_block_backward(ctx.index, tangents))
        return None, *(None if node is None else next(found) for node in exported.gradients)


def _refuse_other_types(given: Sequence[Tensor | None], exported: Sequence[fx.Node]) -> None:
    for value, node in zip(given, exported, strict=True):
        if value is None or type_key(value) != type_key(node.meta["val"]):
            raise _NotRepeatableError("its values come in other types")


def _put_blocks(
    joint: fx.GraphModule, exported: _Exported, traced: fx.GraphModule, blocks: Sequence[Block]
) -> None:
    """Replaces each opaque op by copies of the block's nodes."""
    copiers = [_Copier(exported, index, traced, blocks[0], block) for index, block in enumerate(blocks)]
    for node in list(joint.graph.nodes):
        if node.target is torch.ops.graphshard.opaque_block.default:
            copiers[node.args[0]].put_forward(node)
        elif node.target is torch.ops.graphshard.opaque_block_backward.default:
            copiers[node.args[0]].put_backward(node)
    # A number identifies and orders checkpointed regions.
    regions: dict[Any, int] = {}
    for node in joint.graph.nodes:
        if "ac_graph_id" in node.meta:
            node.meta["ac_graph_id"] = regions.setdefault(node.meta["ac_graph_id"], len(regions) + 1)


class _Copier:
    """Copies the nodes of one repetition into the joint graph of the model."""

    def __init__(
        self, exported: _Exported, index: int, traced: fx.GraphModule, first: Block, block: Block
    ) -> None:
        self._exported = exported
        self._index = index
        self._modules = dict(_module_stacks(traced, first.nodes, traced, block.nodes))
        self._copies: dict[fx.Node, fx.Node] = {}
        self._values = _Values()

    def put_forward(self, opaque: fx.Node) -> None:
        self._read(self._exported.inputs, opaque.args[1])
        self._put(opaque, self._exported.forward, self._exported.results)

    def put_backward(self, opaque: fx.Node) -> None:
        self._read(self._exported.tangents, opaque.args[1])
        gradients = [node for node in self._exported.gradients if node is not None]
        self._put(opaque, self._exported.backward, gradients)

    def _read(self, placeholders: Sequence[fx.Node], given: Any) -> None:
        for placeholder, node in zip(placeholders, given, strict=True):
            self._copies[placeholder] = node
            self._values.know(placeholder.meta["val"], node.meta["val"])

    def _put(self, opaque: fx.Node, calls: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
        graph = opaque.graph
        for user in opaque.users:
            self._values.know(results[user.args[1]].meta["val"], user.meta["val"])
        with graph.inserting_before(opaque):
            for node in calls:
                copied = graph.node_copy(node, self._copies.__getitem__)
                self._copies[node] = copied
                self._describe(copied)
        for user in list(opaque.users):
            user.replace_all_uses_with(self._copies[results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(opaque)

    def _describe(self, node: fx.Node) -> None:
        meta = node.meta
        meta["val"] = tree_map(self._values.copy, meta["val"])
        for name in ("nn_module_stack", "fwd_nn_module_stack"):
            if name in meta:
                meta[name] = self._modules.get(_stack_key(meta[name]), meta[name])
        if "ac_graph_id" in meta:
            meta["ac_graph_id"] = (self._index, meta["ac_graph_id"])


def _stack_key(stack: Mapping[str, Any]) -> Any:
    return tuple((name, path) for name, (path, _) in stack.items())


def _module_stacks(
    first_owner: fx.GraphModule, first: Sequence[fx.Node], owner: fx.GraphModule, nodes: Sequence[fx.Node]
) -> Iterator[tuple[Any, Any]]:
    """Maps the module stack of each call of the first block to that of the same call of another."""
    for one, other in zip(first, nodes, strict=True):
        if "nn_module_stack" in one.meta and "nn_module_stack" in other.meta:
            yield _stack_key(one.meta["nn_module_stack"]), other.meta["nn_module_stack"]
        for source, other_source in zip(one.all_input_nodes, other.all_input_nodes, strict=True):
            if is_function(first_owner, source):
                inner = operator.attrgetter(str(source.target))(first_owner)
                other_inner = operator.attrgetter(str(other_source.target))(owner)
                yield from _module_stacks(
                    inner, list(inner.graph.nodes), other_inner, list(other_inner.graph.nodes)
                )


class _Values:
    """Fake values of a repetition; they share memory with each other as those of the block do."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    def know(self, value: Any, ours: Any) -> None:
        """Records ``ours`` as the copy of ``value``, unless there is one."""
        if isinstance(value, Tensor):
            self._memory.setdefault(storage_id(value), ours)

    def copy(self, value: Any) -> Any:
        """A copy of a value, in the copy of its memory."""
        if not isinstance(value, Tensor):
            return value
        memory = self._memory.get(storage_id(value))
        if memory is None:
            memory = self._memory[storage_id(value)] = self.like(value)
            return memory
        with torch.no_grad():
            found = self._view(memory, value)
            return found.conj() if value.is_conj() else found

    @staticmethod
    def _view(memory: Tensor, value: Tensor) -> Tensor:
        if memory.dtype == value.dtype:
            return memory.as_strided(value.shape, value.stride(), value.storage_offset())
        viewed = torch.empty(0, dtype=value.dtype, device=value.device)
        return viewed.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    @staticmethod
    def like(value: Tensor) -> Tensor:
        """A new tensor of the same type, in memory of its own."""
        num_elements = value.untyped_storage().nbytes() // value.element_size()
        if num_elements == value.numel():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        flat = torch.empty(num_elements, dtype=value.dtype, device=value.device)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())
