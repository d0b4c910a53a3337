"""What ops of a graph write to in place, as far as that can be read.

The schema of a torch op says which inputs it writes to. Nothing says so of a method, a module, a Python function or a
higher-order op: what these may write to counts as written, and everything that may share memory with it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..collectives import is_wait
from ..memory import is_alias

#: Higher-order ops that write to none of their inputs.
_PURE_HIGHER_ORDER = {
    "auto_functionalized",
    "auto_functionalized_v2",
    "flex_attention",
    "flex_attention_backward",
    "triton_kernel_wrapper_functional",
}

#: Functions of torch that write to statistics they are given.
_STATEFUL = {"batch_norm", "instance_norm", "native_batch_norm"}

#: Functions of ``operator`` that change what they are given.
_CHANGING = {getattr(operator, name) for name in dir(operator) if name.startswith("__i")} - {
    operator.inv,
    operator.invert,
    operator.index,
} | {operator.setitem, operator.delitem}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """The values whose memory ops write to.

    Attributes:
        known: schemas say so.
        possible: nothing says that they are not written to.
    """

    known: frozenset[fx.Node]
    possible: frozenset[fx.Node]

    @property
    def all(self) -> frozenset[fx.Node]:
        """Both."""
        return self.known | self.possible


def writes_of(graph: fx.Graph) -> Writes:
    """What the ops of a graph write to, or may."""
    known: set[fx.Node] = set()
    possible: set[fx.Node] = set()
    for node in graph.nodes:
        written, found = (_written(node), known) if _has_schema(node) else (_maybe_written(node), possible)
        for source in written:
            found.add(base_of(source))
            possible.update(_may_share(source))
    return Writes(known=frozenset(known), possible=frozenset(possible - known))


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` looks at."""
    while node.op == "call_function" and node.all_input_nodes and is_alias(node):
        if node.target is operator.getitem and not is_alias(node.all_input_nodes[0]):
            return node  # an item of a tuple has memory of its own
        node = node.all_input_nodes[0]
    return node


def _has_schema(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs that an op with a schema writes to."""
    if is_wait(node):
        return
    arguments = node.target._schema.arguments
    given = {
        argument.name: value for argument, value in zip(arguments, node.args, strict=False)
    } | node.kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            yield from (value,) if isinstance(value, fx.Node) else filter(_is_node, value or ())


def _maybe_written(node: fx.Node) -> list[fx.Node]:
    """The inputs that anything else may write to."""
    return [] if node.op in ("placeholder", "get_attr", "output") or _is_pure(node) else node.all_input_nodes


def _is_pure(node: fx.Node) -> bool:
    """Whether the name of a method, a function or a higher-order op says that it writes to nothing."""
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
    """The values whose memory a node may look at, where it is made by what has no schema."""
    base = base_of(node)
    yield base
    if base.op in ("call_method", "call_module", "call_function") and not _has_schema(base):
        for source in base.all_input_nodes:
            yield from _may_share(source)


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)
