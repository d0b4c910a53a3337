"""Finds the blocks that a captured model repeats, such as the layers of a transformer.

A model calls its layers one after the other, so a stretch of the calls of its graph is periodic. Any call of a period
could be the first. A block begins where the fewest values that need a gradient cross.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._compat import storage_id
from .._compat_frames import ENTER_AUTOCAST, EXIT_AUTOCAST, LOG_USAGE, SET_GRAD_ENABLED
from ..ir import type_key
from ..periods import periodic_stretch

#: The fewest repetitions for which an export of one block pays.
_MIN_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One repetition.

    Attributes:
        nodes: its calls, in order.
        inputs: values from outside that it reads: parameters, buffers, inputs and results of other calls.
        outputs: those of its calls that nodes outside read.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def find_blocks(gm: fx.GraphModule) -> tuple[Block, ...]:
    """Consecutive blocks of ``gm`` that run the same calls on inputs of the same types; () if there are none.

    Gradients flow into a block through its outputs alone. A value that needs a gradient enters one block and is read
    nowhere else. So the backward of a block is separate from that of the others.

    Args:
        gm: a graph of Dynamo, with ``meta["example_value"]`` on its values.
    """
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    typed: dict[Any, int] = {}
    words = [typed.setdefault(_word(gm, node), len(typed)) for node in calls]
    start, period, length = periodic_stretch(words)
    if length < _MIN_BLOCKS * period or not _is_mode_default(calls[:start]):
        return ()
    for first in _beginnings(calls, start, period, length):
        blocks = _equal_blocks(gm, calls, first, period, (start + length - first) // period)
        if len(blocks) >= _MIN_BLOCKS:
            return blocks
    return ()


def _word(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The op, arguments and types of a call, as a key: equal for the same call of other blocks."""
    if node.op == "call_module" or node.meta.get("example_value") is None:
        return node  # equal to no other; a call without a result changes the meaning of those behind it
    return (
        node.op,
        node.target,
        _argument_word(gm, node.args),
        _argument_word(gm, node.kwargs),
        _type(node),
        repr(node.meta.get("custom")),  # annotations by the user, such as a memory budget
    )


def _is_mode_default(calls: Sequence[fx.Node]) -> bool:
    """Whether gradients are recorded and autocast is off behind these calls, as in an export of one block."""
    entered: set[fx.Node] = set()
    is_recording = True
    for node in calls:
        if node.meta.get("example_value") is not None or node.target is LOG_USAGE:
            continue
        if node.target is SET_GRAD_ENABLED:
            is_recording = node.args == (True,)
        elif node.target is ENTER_AUTOCAST:
            entered.add(node)
        elif node.target is EXIT_AUTOCAST:
            entered.difference_update(node.all_input_nodes)
        else:
            return False
    return is_recording and not entered


def _argument_word(gm: fx.GraphModule, value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _attribute_word(gm, value) if value.op == "get_attr" else _type(value)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_argument_word(gm, part) for part in value))
    if isinstance(value, dict):
        return tuple((name, _argument_word(gm, part)) for name, part in value.items())
    if isinstance(value, slice):
        return (slice, *(_argument_word(gm, part) for part in (value.start, value.stop, value.step)))
    return (type(value), repr(value))


def _attribute_word(gm: fx.GraphModule, node: fx.Node) -> Any:
    """A key of what an attribute holds: the type of a tensor, or the calls of a function (a checkpointed region)."""
    value = operator.attrgetter(str(node.target))(gm)
    if not isinstance(value, fx.GraphModule):
        return _type(node) if isinstance(value, torch.Tensor) else (type(value), id(value))
    # The user chooses what is saved, and may choose differently in each block.
    if "_checkpoint_context_fn" in value.meta:
        return (fx.GraphModule, id(value))
    positions = {inner: index for index, inner in enumerate(value.graph.nodes)}
    return tuple(
        (
            inner.op,
            inner.target if inner.op.startswith("call") else None,
            tuple(positions[source] for source in _operands(inner)),
            _argument_word(value, inner.args),
            _argument_word(value, inner.kwargs),
            _attribute_word(value, inner) if inner.op == "get_attr" else _type(inner),
            repr(inner.meta.get("custom")),
        )
        for inner in value.graph.nodes
    )


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call reads, with repetitions."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands


def _type(node: fx.Node) -> Any:
    return _value_type(node.meta.get("example_value"))


def _value_type(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (type_key(value), value.requires_grad)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_value_type, value))
    return (type(value), repr(value))


def _beginnings(calls: Sequence[fx.Node], start: int, period: int, length: int) -> Iterator[int]:
    """Where the first block may begin: by the fewest crossing values with gradients, then by the most blocks."""
    position = {node: index for index, node in enumerate(calls)}
    crossing = [0] * (len(calls) + 1)
    for index, node in enumerate(calls):
        if _needs_gradient(node):
            last = max((position.get(user, len(calls)) for user in node.users), default=index)
            for place in range(index + 1, min(last, start + 3 * period) + 1):
                crossing[place] += 1
    yield from sorted(
        range(start, start + period),
        key=lambda first: (crossing[first + period], -((start + length - first) // period), first),
    )


def _needs_gradient(node: fx.Node) -> bool:
    values = node.meta.get("example_value")
    parts = values if isinstance(values, (list, tuple)) else (values,)
    return any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)


def _sources(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The tensors that a call reads, with repetitions. Dynamo has one node for a tensor, whatever its names."""
    return [source for source in _operands(node) if not is_function(gm, source)]


def is_function(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node reads a subgraph that a call runs, not a tensor."""
    return node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(gm), fx.GraphModule)


def _equal_blocks(
    gm: fx.GraphModule, calls: Sequence[fx.Node], first: int, period: int, count: int
) -> tuple[Block, ...]:
    """The longest run of equal blocks among ``count`` of them."""
    starts = range(first, first + count * period, period)
    blocks = [_block(gm, calls[start : start + period]) for start in starts]
    shapes = [_shape(gm, block) if _is_separate(block) else None for block in blocks]
    best: list[Block] = []
    for shape, run in itertools.groupby(zip(shapes, blocks, strict=True), key=operator.itemgetter(0)):
        equal = [block for _, block in run]
        if shape is not None and len(equal) > len(best):
            best = equal
    return tuple(best)


def _block(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> Block:
    inside = set(nodes)
    sources = dict.fromkeys(source for node in nodes for source in _sources(gm, node))
    return Block(
        nodes=tuple(nodes),
        inputs=tuple(source for source in sources if source not in inside),
        outputs=tuple(node for node in nodes if any(user not in inside for user in node.users)),
    )


def _shape(gm: fx.GraphModule, block: Block) -> Any:
    """The data flow of a block, as a key: which value each call reads, and which values leave."""
    numbers = {node: number for number, node in enumerate((*block.inputs, *block.nodes))}
    reads = tuple(tuple(map(numbers.__getitem__, _sources(gm, node))) for node in block.nodes)
    return reads, tuple(map(numbers.__getitem__, block.outputs))


def _is_separate(block: Block) -> bool:
    """Whether only tensors cross, each output has memory of its own, and values with gradients enter no other block."""
    crossing = [node.meta.get("example_value") for node in (*block.inputs, *block.outputs)]
    if not all(isinstance(value, torch.Tensor) for value in crossing):
        return False
    if not any(map(_needs_gradient, block.outputs)) or any(
        value.is_conj() or value.is_neg() for value in crossing
    ):
        return False
    memory = list(map(storage_id, crossing))
    read, written = memory[: len(block.inputs)], memory[len(block.inputs) :]
    if len(set(written)) < len(written) or set(written) & set(read):
        return False
    inside = set(block.nodes)
    entering = filter(_needs_gradient, block.inputs)
    return all(user in inside for node in entering for user in node.users)
