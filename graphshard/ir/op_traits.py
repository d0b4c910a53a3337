"""What an op does with memory: whether it is a view, a copy, an alias, or part of a generated kernel.

The answers come from the schema and the tags of the op, and from the values where an op may be a view or a copy. The
memory model (:mod:`graphshard.memory.model`) and the cost model (:mod:`graphshard.cost.kernels`) use the same ones.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .collectives import aten, is_collective, is_wait
from .node_args import call_arguments
from .tensor_sizes import is_contiguous, size_hint

#: Ops that Inductor generates code for, although they are not tagged pointwise or reduction.
_GENERATED = {
    aten._to_copy.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.embedding.default,
    aten.full.default,
    aten.gather.default,
    aten.index.Tensor,
    torch.ops.prims.iota.default,
}

#: Ops that change the dtype, and views that change the shape.
_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}

#: Functional ops that write into a copy of their first input; the kernel that copies can compute a pointwise input.
_SCATTERS = {
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index_put_accumulate.default,
    aten.index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}

#: Views whose schema does not mark them as such.
_UNMARKED_VIEWS = {aten._unsafe_view.default, aten.reshape.default}

#: Ops that return a view if they can, else a copy; the values tell which.
_MAY_COPY = {aten.contiguous, aten.flatten, aten.reshape, aten.reshape_as, aten.to}


@dataclass(frozen=True, slots=True)
class _Traits:
    """Answers that are asked for often, and are equal for all nodes of one op."""

    is_fusible: bool
    is_reduction: bool
    is_view: bool
    may_copy: bool
    is_in_place: bool
    shared: tuple[str, ...]
    """Names of the arguments whose memory the results share, by the schema."""


@functools.lru_cache(maxsize=4096)
def _traits(target: Any) -> _Traits:
    tags = getattr(target, "tags", ())
    is_op = isinstance(target, torch._ops.OpOverload)
    returned = [result.alias_info for result in target._schema.returns] if is_op else []
    is_reduction = torch.Tag.reduction in tags
    return _Traits(
        is_fusible=target in _GENERATED or torch.Tag.pointwise in tags or is_reduction,
        is_reduction=is_reduction,
        is_view=target is operator.getitem or target in _UNMARKED_VIEWS or (is_op and target.is_view),
        may_copy=is_op and target.overloadpacket in _MAY_COPY,
        is_in_place=bool(returned) and all(alias is not None and alias.is_write for alias in returned),
        shared=_shared_arguments(target._schema) if is_op else (),
    )


def _shared_arguments(schema: torch.FunctionSchema) -> tuple[str, ...]:
    returned = set().union(*(result.alias_info.before_set for result in schema.returns if result.alias_info))
    return tuple(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.before_set & returned
    )


def is_fusible(node: fx.Node) -> bool:
    """True for a node that Inductor generates code for and may fuse with its neighbours."""
    traits = _traits(node.target)
    return traits.is_fusible or (traits.may_copy and _copies(node))


def is_view(node: fx.Node) -> bool:
    """True for a node that runs no kernel: a view, or an item of a tuple."""
    traits = _traits(node.target)
    return traits.is_view and not (traits.may_copy and _copies(node))


def is_repeatable(node: fx.Node) -> bool:
    """True for an op that gives the same result each time and writes to no memory; for an item of a tuple too."""
    if node.target is operator.getitem:
        return True
    is_op = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
    return is_op and torch.Tag.nondeterministic_seeded not in node.target.tags


def returns_nothing(node: fx.Node) -> bool:
    """Whether a node calls an op without a result: a check of a number, the end of ordered effects, a print."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns


def is_alias(node: fx.Node) -> bool:
    """True for a node whose results share memory with inputs: a view, a wait, an in-place op."""
    return is_view(node) or _traits(node.target).is_in_place or is_wait(node)


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the results of a node share, if :func:`is_alias` is true for it."""
    if not (shared := _traits(node.target).shared):
        return node.all_input_nodes
    given = call_arguments(node)
    found: list[fx.Node] = []
    fx.map_arg([given.get(name) for name in shared], found.append)
    return found


def _copies(node: fx.Node) -> bool:
    """True if the result is a copy because a view of the first input cannot have its dtype, device, or strides."""
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    result = node.meta.get("val")
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    if source.dtype != result.dtype or source.device != result.device or call_arguments(node).get("copy"):
        return True
    before, strides = _sizes(source.shape), _sizes(source.stride())
    after = _sizes(result.shape)
    if before == after:
        return any(
            size > 1 and one != other
            for size, one, other in zip(after, strides, _sizes(result.stride()), strict=True)
        )
    return not _can_be_viewed(before, strides, after)


def _sizes(values: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(map(size_hint, values))


@functools.lru_cache(maxsize=4096)
def _can_be_viewed(sizes: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(sizes, strides, device="meta").view(wanted)
    except RuntimeError:
        return False
    return True


def fusion_runs(order: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
    """For each position in ``order``, the first and the last position of its run of fusible nodes.

    Views and starts of collectives do not end a run; any other node does, also a wait. A node outside of all runs is a
    run by itself.
    """
    first, last = list(range(len(order))), list(range(len(order)))
    run: list[int] = []

    def close() -> None:
        for index in run:
            first[index], last[index] = run[0], run[-1]
        run.clear()

    for index, node in enumerate(order):
        if is_fusible(node):
            run.append(index)
        elif not (is_view(node) or is_collective(node)):
            close()
    close()
    return first, last


def is_pointwise(node: fx.Node) -> bool:
    """True for a node that Inductor generates code for and that is no reduction."""
    traits = _traits(node.target)
    return traits.is_fusible and not traits.is_reduction


def is_elementwise(node: fx.Node) -> bool:
    """True for a node whose elements depend only on the input elements at the same place, or on broadcast ones."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _CASTS


def lies_as(source: fx.Node, node: fx.Node) -> bool:
    """True for two tensors of one shape that are both contiguous."""
    values = [source.meta.get("val"), node.meta.get("val")]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    before, after = (_sizes(value.shape) for value in values)
    return before == after and all(is_contiguous(value) for value in values)


def viewed(node: fx.Node) -> fx.Node:
    """The node behind a chain of reshapes, each the only reader of its input; or the node itself."""
    while node.target in _RESHAPES and is_view(node) and len(node.args[0].users) == 1:
        if not is_contiguous(node.args[0].meta["val"]):
            break
        node = node.args[0]
    return node


def writes_over(scatter: fx.Node, node: fx.Node) -> bool:
    """True for a scatter that uses ``node`` as the tensor it writes into, and for nothing else."""
    if scatter.target not in _SCATTERS or scatter.args[0] is not node:
        return False
    others: list[fx.Node] = []
    fx.map_arg((scatter.args[1:], scatter.kwargs), others.append)
    return node not in others


def readers_through_aliases(node: fx.Node, *, through_waits: bool = True) -> Iterator[fx.Node]:
    """The nodes that compute with a node or with an alias of it; if not ``through_waits``, a wait is one of them."""
    for user in node.users:
        is_same = is_alias(user) and node in aliased_inputs(user)
        if is_same and (through_waits or not is_wait(user)):
            yield from readers_through_aliases(user, through_waits=through_waits)
        else:
            yield user
