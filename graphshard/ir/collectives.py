"""Level 2: the ops that are collectives, and what can be read of one in a graph.

Predicates, the operands and the settings of a collective, its waits, and waits that do nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .._compat import collective_op
from .._compat_gloo import gather_library  # noqa: F401  how gloo gathers
from .custom_collectives import ALL_REDUCE_HOOK, CUSTOM_ALL_GATHER, CUSTOM_REDUCE_SCATTER
from .node_args import call_arguments

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_TO_ALL = c10d.all_to_all_single.default
WAIT = c10d.wait_tensor.default

#: The collective of the process group, and the op that calls the user's object in its place.
GATHERS = (ALL_GATHER, CUSTOM_ALL_GATHER)
REDUCE_SCATTERS = (REDUCE_SCATTER, CUSTOM_REDUCE_SCATTER)

#: Ops that write their result to an input, and the op that returns it instead; some torch versions lack some of them.
_IN_MEMORY: dict[str, Any] = {
    "all_gather_into_tensor_out": ALL_GATHER,
    "reduce_scatter_tensor_out": REDUCE_SCATTER,
    "all_reduce_": ALL_REDUCE,
    "all_reduce_coalesced_": c10d.all_reduce_coalesced.default,
    "broadcast_": c10d.broadcast.default,
}
FUNCTIONAL_FORMS: dict[Any, Any] = {
    op: functional for name, functional in _IN_MEMORY.items() if (op := collective_op(name)) is not None
}

#: All ops that start a collective.
COLLECTIVES = frozenset(
    {
        ALL_GATHER,
        REDUCE_SCATTER,
        ALL_REDUCE,
        ALL_TO_ALL,
        c10d.all_gather_into_tensor_coalesced.default,
        c10d.reduce_scatter_tensor_coalesced.default,
        c10d.all_reduce_coalesced.default,
        c10d.broadcast.default,
        CUSTOM_ALL_GATHER,
        CUSTOM_REDUCE_SCATTER,
        ALL_REDUCE_HOOK,
        *FUNCTIONAL_FORMS,
    }
)

#: Collectives with a derivative of their own, and the plain op of each. Since torch 2.13 captured graphs keep them.
_WITH_DERIVATIVE: dict[Any, Any] = {
    getattr(torch.ops._c10d_functional_autograd, op._opname).default: op
    for op in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
}

#: Messages between two ranks. The other ranks of the group take no part, so these are not collectives.
POINT_TO_POINT = frozenset(filter(None, map(collective_op, ("isend", "irecv", "batch_p2p_ops"))))


def is_collective(node: fx.Node) -> bool:
    """True for a node that starts a collective, also for one that writes its result to an input."""
    return node.op == "call_function" and node.target in COLLECTIVES


def is_point_to_point(node: fx.Node) -> bool:
    """True for a node that sends to one rank, or receives from one."""
    return node.op == "call_function" and node.target in POINT_TO_POINT


def is_wait(node: fx.Node) -> bool:
    """True for ``wait_tensor``."""
    return node.op == "call_function" and node.target is WAIT


def functional_form(target: Any) -> Any:
    """The op that returns the result which ``target`` writes to an input; ``target`` itself if it is no such op."""
    return FUNCTIONAL_FORMS.get(target, target)


def short_name(node: fx.Node) -> str:
    """``all_gather_into_tensor`` for ``_c10d_functional.all_gather_into_tensor.default``."""
    return str(node.target).split(".")[-2]


def group_name(node: fx.Node) -> str:
    """Name of the process group of a collective."""
    return str(call_arguments(node)["group_name"])


def set_group_name(node: fx.Node, name: str) -> None:
    """Has a collective call its process group by another name."""
    if "group_name" in node.kwargs:
        node.update_kwarg("group_name", name)
    else:
        node.update_arg([each.name for each in node.target._schema.arguments].index("group_name"), name)


def operands(node: fx.Node) -> list[fx.Node]:
    """The values that a collective communicates.

    The memory that it writes to, a unit's handle, and the sizes of an exchange's pieces are not among them.
    """
    arguments = call_arguments(node)
    apart = [arguments.get(name) for name in ("out", "handle")]
    return [
        source
        for source in node.all_input_nodes
        if source not in apart and not isinstance(source.meta.get("val"), (int, torch.SymInt))
    ]


def is_c10d_op(node: fx.Node) -> bool:
    """True for ops of ``torch.distributed`` itself (``c10d.allreduce_``): no schema tells what they write to."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "c10d"


def setting(node: fx.Node) -> str:
    """What ranks must agree on besides types: the reduction (``"sum"``) or the source of a broadcast; else ""."""
    arguments = call_arguments(node)
    return str(arguments.get("reduce_op", arguments.get("src", "")))


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The inputs that an op writes to, by its schema."""
    is_op = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    if not (is_op and node.target._schema.is_mutable):
        return []
    given = call_arguments(node)
    found: list[fx.Node] = []
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            items = value if isinstance(value, (tuple, list)) else (value,)
            found += [item for item in items if isinstance(item, fx.Node)]
    return found


def waits_of(collective: fx.Node) -> list[fx.Node]:
    """The waits for a collective, or for the items of a coalesced one, in the order of the items.

    If nothing waits for the result of a collective that writes to an input: the next wait for that input.
    """
    items = [user for user in collective.users if user.target is operator.getitem]
    found = [wait for source in (collective, *items) for wait in source.users if is_wait(wait)]
    if not found:
        for memory in written_operands(collective):
            later = [user for user in memory.users if is_wait(user) and collective < user]
            found += [min(later)] if later else []
    return found


def repeated_waits(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Waits that do nothing, each with the first wait for the same result.

    Such a wait waits for the same value as an earlier wait, or for the result of one. Waits for collectives that write
    to an input are not among them: that memory may be written to, and waited for, again.
    """
    first_of: dict[fx.Node, fx.Node] = {}
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        (source,) = wait.all_input_nodes
        started = source.args[0] if source.target is operator.getitem else source
        if source in first_of and is_wait(source):
            first_of[wait] = first_of[source]
        elif is_collective(started) and not written_operands(started):
            first_of[wait] = first_of.setdefault(source, wait)
    return {wait: first for wait, first in first_of.items() if is_wait(wait) and wait is not first}


def merge_waits(graph: fx.Graph) -> int:
    """Erases :func:`repeated_waits`; returns their number."""
    repeated = repeated_waits(graph)
    for wait, first in repeated.items():
        wait.replace_all_uses_with(first)
        graph.erase_node(wait)
    return len(repeated)


def with_derivative(graph: fx.Graph) -> list[fx.Node]:
    """The collectives of a graph that are ops with a derivative of their own (``_c10d_functional_autograd``)."""
    return [node for op in _WITH_DERIVATIVE for node in graph.find_nodes(op="call_function", target=op)]


def drop_derivatives(graph: fx.Graph) -> int:
    """Replaces :func:`with_derivative` by plain collectives; returns their number.

    Their gradient is in the graph already, or nobody needs it.
    """
    found = with_derivative(graph)
    for node in found:
        node.target = _WITH_DERIVATIVE[node.target]
    return len(found)
