"""merge_waits: one wait for each result of a collective, and one collective for each value.

A tensor of tensor parallelism that is read in several places may be traced with a wait for each of them (torch 2.14
does so). This pass keeps the first wait only. Later passes move a collective together with its one wait.

Before::

    %reduce_scatter_0: f32[4, 8] = reduce_scatter_tensor(%mm_0, 'sum', 2, 'tp')
    %wait_0: f32[4, 8] = wait_tensor(%reduce_scatter_0)
    %mm_1: f32[4, 8] = mm(%wait_0, %primals_2)
    %wait_1: f32[4, 8] = wait_tensor(%reduce_scatter_0)
    %mm_2: f32[4, 8] = mm(%wait_1, %primals_3)

After::

    %reduce_scatter_0: f32[4, 8] = reduce_scatter_tensor(%mm_0, 'sum', 2, 'tp')
    %wait_0: f32[4, 8] = wait_tensor(%reduce_scatter_0)
    %mm_1: f32[4, 8] = mm(%wait_0, %primals_2)
    %mm_2: f32[4, 8] = mm(%wait_0, %primals_3)

Collectives that communicate the same values become one. A forward and its backward may each ask for the same
collective of the same tensor: DTensor from torch 2.14 on redistributes the input of a layer norm again in the
backward. AOTAutograd's partitioner merges such collectives, but from 2.14 on it keeps their waits apart.

A model may call a collective as an op with a derivative of its own (``_c10d_functional_autograd``). It becomes the
plain op here: the joint graph already holds its gradient.

Numerics: bitwise the same.

Does not handle:

- waits for memory that a collective writes to in place: they stay;
- equal collectives of random numbers, or with a possible write to memory between them: both stay.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphshard.ir import (
    GraphEmitter,
    aten,
    drop_derivatives,
    is_c10d_op,
    is_collective,
    is_wait,
    merge_waits,
    readers_through_aliases,
    waits_of,
    written_operands,
)
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class MergeWaits:
    """See the module docstring; no options."""

    name: ClassVar[str] = "merge_waits"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "derivatives dropped", "collectives merged" and "waits merged"."""
        counts = {
            "derivatives dropped": drop_derivatives(gm.graph),
            "collectives merged": _merge_equal_collectives(gm.graph),
            "waits merged": merge_waits(gm.graph),
        }
        return PassReport(changed=any(counts.values()), counts=counts)


def _merge_equal_collectives(graph: fx.Graph) -> int:
    """Erases collectives that repeat an earlier one, whose result takes their place; returns their number.

    Two collectives are equal if their ops and arguments are equal, and if their operands are computed in the same
    way. Random ops, and ops with a possible write between them, count as different. The collective that is left has
    the waits of all. If the graph returns the result of either one, the repeated one becomes a copy, since a caller
    may write to what it gets.
    """
    num_merged = 0
    for node, first in _repeated(graph).items():
        if _is_returned(first) or _is_returned(node):
            for wait in waits_of(node):
                _read_copy(graph, wait)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        num_merged += is_collective(first)
    return num_merged


def _repeated(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Collectives and their items that repeat earlier ones, each with the first; items before their collectives."""
    first_of: dict[fx.Node, fx.Node] = {}
    known: dict[Any, fx.Node] = {}
    num_writes = 0
    nodes = list(graph.nodes) if sum(map(is_collective, graph.nodes)) > 1 else []
    for node in nodes:
        first_of[node] = node
        if node.op != "call_function":
            continue
        if _may_write(node):
            num_writes += 1
        elif torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            key = (num_writes, node.target, _key(node.args, first_of), _key(node.kwargs, first_of))
            first_of[node] = known.setdefault(key, node)
    repeated: dict[fx.Node, fx.Node] = {}
    for node, first in first_of.items():
        is_item = node.target is operator.getitem and node.args[0] in repeated
        if node is not first and (is_item or is_collective(node)):
            repeated[node] = first
    return dict(reversed(repeated.items()))


def _may_write(node: fx.Node) -> bool:
    """Whether an op writes to its inputs, or has no schema that rules it out."""
    if isinstance(node.target, torch._ops.OpOverload):
        return is_c10d_op(node) or (not is_wait(node) and bool(written_operands(node)))
    is_number = isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
    return node.target is not operator.getitem and not is_number


def _key(value: Any, first_of: dict[fx.Node, fx.Node]) -> Any:
    """A hashable key that is equal for equal arguments."""
    if isinstance(value, fx.Node):
        return first_of[value]
    if isinstance(value, (list, tuple)):
        return (len(value), *(_key(part, first_of) for part in value))
    if isinstance(value, dict):
        return tuple((name, _key(part, first_of)) for name, part in value.items())
    return (type(value), repr(value))


def _is_returned(node: fx.Node) -> bool:
    return any(reader.op == "output" for reader in readers_through_aliases(node))


def _read_copy(graph: fx.Graph, wait: fx.Node) -> None:
    """Replaces the readings of a wait's result by readings of a copy."""
    with graph.inserting_after(wait):
        copied = GraphEmitter(graph, origin=wait)(aten.clone.default, wait)
    wait.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
