"""Which values of a graph the ops write to in place.

The schema of a torch op names the inputs that it writes to. A method, a module, a Python function or a higher-order op
has no schema: each input it may write to counts as possibly written, and so does each value that may share memory with
such an input.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import fx

from .collectives import is_c10d_op, is_wait, written_operands
from .op_traits import aliased_inputs, is_alias

#: Higher-order ops that write to none of their inputs.
_PURE_HIGHER_ORDER = {
    "auto_functionalized",
    "auto_functionalized_v2",
    "flex_attention",
    "flex_attention_backward",
    "triton_kernel_wrapper_functional",
}

#: Functions of torch that write to the statistics among their inputs.
_STATEFUL = {"batch_norm", "instance_norm", "native_batch_norm"}

#: Functions of ``operator`` that change their inputs.
_CHANGING = {getattr(operator, name) for name in dir(operator) if name.startswith("__i")} - {
    operator.inv,
    operator.invert,
    operator.index,
} | {operator.setitem, operator.delitem}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """The values whose memory ops write to.

    Attributes:
        known: a schema says that they are written to.
        possible: no schema says that they are not.
    """

    known: frozenset[fx.Node]
    possible: frozenset[fx.Node]

    @property
    def all(self) -> frozenset[fx.Node]:
        """The known and the possible ones."""
        return self.known | self.possible


def writes_of(graph: fx.Graph) -> Writes:
    """The values that ops of a graph write to, or may write to."""
    known: set[fx.Node] = set()
    possible: set[fx.Node] = set()
    for node in graph.nodes:
        if _has_schema(node):
            written, found = [] if is_wait(node) else written_operands(node), known
        else:
            written, found = _maybe_written(node), possible
        for source in written:
            found.update(bases_of(source))
            possible.update(_may_share(source))
    return Writes(known=frozenset(known), possible=frozenset(possible - known))


def touches(node: fx.Node, written: Set[fx.Node]) -> bool:
    """Whether the value of ``node`` shares memory with one of ``written``."""
    return not written.isdisjoint(bases_of(node))


def bases_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that own the memory of ``node``; several if an op wrote to several values."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        one = pending.pop(0)
        looked_at = _looked_at(one)
        found.update({} if looked_at else {one: None})
        pending.extend(looked_at)
    return list(found)


def base_of(node: fx.Node) -> fx.Node:
    """The first of :func:`bases_of`."""
    return bases_of(node)[0]


def _looked_at(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node shares; none if it has its own."""
    sources = node.all_input_nodes
    if node.op != "call_function" or not sources or not is_alias(node):
        return []
    if node.target is operator.getitem and not is_alias(sources[0]):
        return []  # an item of a tuple has memory of its own
    return aliased_inputs(node)


def _has_schema(node: fx.Node) -> bool:
    is_op = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return is_op and not is_c10d_op(node)


def _maybe_written(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node without a schema may write to."""
    return [] if node.op in ("placeholder", "get_attr", "output") or _is_pure(node) else node.all_input_nodes


def _is_pure(node: fx.Node) -> bool:
    """Whether the name of a method, a function or a higher-order op shows that it writes to no input."""
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    if node.op != "call_function":
        return False
    name, module = getattr(node.target, "__name__", "_"), getattr(node.target, "__module__", None)
    if name in _PURE_HIGHER_ORDER:
        return True
    if module in ("_operator", "operator"):
        return node.target not in _CHANGING
    is_torch = getattr(torch, name, None) is node.target and name not in _STATEFUL
    return is_torch and not name.endswith("_") and "out" not in node.kwargs


def _may_share(node: fx.Node) -> Iterator[fx.Node]:
    """The values that a node may share memory with, through nodes without a schema too."""
    for base in bases_of(node):
        yield base
        if base.op in ("call_method", "call_module", "call_function") and not _has_schema(base):
            for source in base.all_input_nodes:
                yield from _may_share(source)
