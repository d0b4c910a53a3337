"""Parameters with gather extensions in a graph of Dynamo: the graph takes the plain tensors that their shards hold.

Dynamo writes the read of such a parameter as one call (``traced_read`` of :mod:`graphshard.fsdp.read_parameter`), which
takes a DTensor of a tensor subclass. Here each becomes a module of the graph. Its inputs are the tensors that the shard
holds, and a *carrier*: a tensor with shape and dtype of the padded shard and no memory of its own, to which the
gradient goes.

AOTAutograd traces the module, so the joint graph has the ops of the extension around one ``unshard`` for each tensor
that it gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat import detect_fake_mode
from ..errors import UnsupportedShardingError
from ..fsdp import GatherExtended, slot_of_read
from ..fsdp.state import TracedExtension
from ..ir import ExtendedInputs

#: How Dynamo writes ``torch.utils.checkpoint``: (body, *operands), the body a graph of its own.
CHECKPOINTED_REGION = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedEntrance:
    """One parameter with a gather extension, whose shard enters as the tensors that it holds.

    Attributes:
        source: position of the DTensor among the arguments; the carrier enters there.
        first: position of the first tensor; they are the last inputs, one after the other.
        name: of the parameter.
        full_shape: of the parameter.
        extension: how they are taken out of the shard.
    """

    source: int
    first: int
    name: str
    full_shape: tuple[int, ...]
    extension: TracedExtension


def inputs_of_extended(
    entrances_: Sequence[ExtendedEntrance], num_inputs: int, graph: fx.Graph
) -> tuple[ExtendedInputs, ...]:
    """The inputs of a joint graph that stand for parameters with gather extensions.

    Args:
        entrances_: the parameters.
        num_inputs: of the graph that AOTAutograd traced. It may add inputs in front, never behind these.
        graph: the joint graph, or that of an inference.
    """
    if not entrances_:
        return ()
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    primals = [name for name in inputs if name.startswith("primals_")] or inputs

    def name(position: int) -> str:
        return primals[position - num_inputs]

    return tuple(
        ExtendedInputs(
            name=each.name,
            shape=each.full_shape,
            carrier=name(each.source),
            inner=tuple(name(each.first + index) for index in range(len(each.extension.names))),
        )
        for each in entrances_
    )


class ReadExtended(nn.Module):
    """Gathers one parameter, with the arguments of its ``unshard``."""

    def __init__(self, extension: TracedExtension, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._extension, self._arguments = extension, arguments

    def forward(self, carrier: Tensor, handle: Tensor, *inner: Tensor) -> Tensor:
        full: Tensor = GatherExtended.apply(self._extension, self._arguments, carrier, handle, *inner)
        return full


def enter_extended(gm: fx.GraphModule, inputs: list[Any]) -> list[ExtendedEntrance]:
    """Edits a graph of Dynamo in place; replaces and appends fake inputs.

    Raises:
        UnsupportedShardingError: a checkpointed region that reads such a parameter runs more than once.
    """
    entrances_: list[ExtendedEntrance] = []
    for position, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        read = next(_reads(placeholder), None)
        if read is not None:
            entrances_.append(_enter(gm, inputs, position, placeholder, read))
    return entrances_


def _reads(param: fx.Node) -> Iterator[fx.Node]:
    """The reads of a parameter, also those in checkpointed regions."""
    for user in param.users:
        if _is_read_of(user, param):
            yield user
        for inner in entrances(user, param) or ():
            yield from _reads(inner)


def _is_read_of(node: fx.Node, param: fx.Node) -> bool:
    """Whether a call reads this parameter; the other argument of a read is the handle of the unit."""
    return slot_of_read(node.target) is not None and node.args[0] is param


def _enter(
    gm: fx.GraphModule, inputs: list[Any], position: int, param: fx.Node, read: fx.Node
) -> ExtendedEntrance:
    slot = slot_of_read(read.target)
    assert slot is not None
    example, local = inputs[position], slot.param._local_tensor
    extension = TracedExtension.of(slot, local)
    entrance = ExtendedEntrance(
        source=position,
        first=len(inputs),
        name=slot.name,
        full_shape=tuple(slot.shape),
        extension=extension,
    )
    mode = detect_fake_mode([example])
    assert mode is not None, "Dynamo hands fake inputs to its backends"
    with mode:
        carrier = torch.empty(1, dtype=example.dtype, device=local.device).expand(extension.shape)
        carrier.requires_grad_(example.requires_grad)
        fakes = extension.like_inner(local)
    inputs[position] = carrier
    inputs += fakes
    _replace_reads(param, carrier, _add_inputs(param, extension, fakes), fakes, extension)
    return entrance


def _add_inputs(param: fx.Node, extension: TracedExtension, fakes: Sequence[Tensor]) -> list[fx.Node]:
    """Placeholders behind the last one of a graph for the tensors that the shard holds."""
    graph = param.graph
    *_, last = graph.find_nodes(op="placeholder")
    inner = []
    for name, fake in zip(extension.names, fakes, strict=True):
        with graph.inserting_after(last):
            last = graph.placeholder(f"{param.target}_{name.strip('_')}")
        last.meta, last.type = {**param.meta, "example_value": fake}, Tensor
        last._dynamo_source = None  # AOTAutograd asks each input for it
        inner.append(last)
    return inner


def _replace_reads(
    param: fx.Node,
    carrier: Tensor,
    inner: list[fx.Node],
    fakes: Sequence[Tensor],
    extension: TracedExtension,
) -> None:
    """Replaces the reads of a parameter in its graph by one gather, and in the checkpointed regions that take it."""
    param.meta["example_value"], param.type = carrier, Tensor
    gm = param.graph.owning_module
    assert gm is not None
    reads = [user for user in param.users if _is_read_of(user, param)]
    if reads:
        _, handle, *arguments = reads[0].args
        name = f"extended_{param.name}"
        gm.add_submodule(name, ReadExtended(extension, tuple(arguments)))
        with param.graph.inserting_before(reads[0]):
            gathered = param.graph.call_module(name, (param, handle, *inner))
        gathered.meta = dict(reads[0].meta)
        for read in reads:
            read.replace_all_uses_with(gathered)
            param.graph.erase_node(read)
    for region in [user for user in param.users if user.target is CHECKPOINTED_REGION]:
        bodies = entrances(region, param)
        if bodies is None:
            slot = extension.slot() if extension.slot is not None else None
            raise UnsupportedShardingError(
                f"parameter {slot.name if slot is not None else param.name} has an all-gather extension and is read in "
                "a checkpointed region that runs more than once: read it in one that runs once, or outside of it"
            )
        for inside in bodies:
            if next(_reads(inside), None) is not None:
                own = _add_inputs(inside, extension, fakes)
                region.args = (*region.args, *inner)
                _replace_reads(inside, carrier, own, fakes, extension)
    gm.recompile()


def entrances(call: fx.Node, value: fx.Node) -> list[fx.Node] | None:
    """The placeholders of a checkpointed region that ``value`` becomes; None if ``call`` runs no such region."""
    if call.target is not CHECKPOINTED_REGION or not isinstance(call.args[0], fx.Node):
        return None
    body, *operands = call.args
    assert call.graph.owning_module is not None
    region = getattr(call.graph.owning_module, str(body.target))
    if len(body.users) != 1 or len(call.graph.find_nodes(op="get_attr", target=body.target)) != 1:
        return None  # run twice, perhaps on different values
    placeholders = region.graph.find_nodes(op="placeholder")
    return [inner for inner, operand in zip(placeholders, operands, strict=True) if operand is value]
