"""Facts: named statements about a graph, each with one checker.

A pass declares which facts it requires, provides and breaks. The pipeline runs the checkers after each pass. A checker
returns a sentence for each violation; an empty list means that the fact holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import torch
from torch import fx

from ..ir import (
    GATHERS,
    KEEP_PIECE,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    UnshardCall,
    fake_result,
    is_collective,
    is_wait,
    output_values,
    returns_nothing,
    short_name,
    value_text,
    waits_of,
    written_operands,
)
from .context import PassContext
from .provenance import (
    bucket_keys,
    is_layout,
    prepared_nodes,
    reductions_of,
    shards_behind,
    ungathered_readers,
)


class Fact(Enum):
    """A statement that can be true of a graph."""

    TYPED = "typed"
    """Every node whose op has a result has a fake value; in full mode it equals what its op computes."""
    WAITED = "waited"
    """Every collective is waited for exactly once and only the wait reads it; or it is an output, not waited for."""
    GATHERED = "gathered"
    """Nothing reads a shard but shard ops and, through layout ops, collectives."""
    REDUCED = "reduced"
    """Every gradient output of a sharded parameter comes out of its reduction."""
    MERGED = "merged"
    """A parameter is unsharded at most once."""
    TAGGED = "tagged"
    """Every ``unshard`` says whether its result is kept for the backward."""
    LOWERED = "lowered"
    """No shard op is left."""
    BUCKETED = "bucketed"
    """At most one gather per unit and group, and one reduction per unit, dtype and group, in this graph."""
    SCHEDULED = "scheduled"
    """No compute stands between the wait of a gather and the first compute that reads its result."""


Checker = Callable[[fx.GraphModule, PassContext], list[str]]


def check_typed(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """TYPED; ``ctx.full_checks`` recomputes every fake value and compares."""
    problems = []
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        if "val" not in node.meta and not returns_nothing(node):
            problems.append(f"{node.name} ({node.target}) has no fake value")
        elif ctx.full_checks and _can_compare(node):
            problems.extend(_compare_with_op(node))
    return problems


def _can_compare(node: fx.Node) -> bool:
    """Whether an op gives an equal type each time; one whose result depends on data has new symbols in each call."""
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and "val" in node.meta and not node.meta.get("unbacked_bindings")


def _compare_with_op(node: fx.Node) -> Iterable[str]:
    try:
        computed = value_text(fake_result(node.target, node.args, node.kwargs))
    except Exception as error:  # any op may reject its arguments, each in its own way
        yield f"{node.name}: {node.target} rejects its arguments: {error}"
        return
    if computed.split("@")[0] != value_text(node.meta["val"]).split("@")[0]:
        yield f"{node.name}: recorded {value_text(node.meta['val'])}, but {node.target} gives {computed}"


def check_waited(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """WAITED."""
    problems = []
    for node in filter(is_collective, gm.graph.nodes):
        waits = waits_of(node)
        readers = [user for user in node.users if not is_wait(user) and not _is_getitem(user)]
        if readers and readers != [gm.graph.output_node()]:
            problems.append(f"{node.name} ({short_name(node)}) is read by {readers[0].name} before a wait")
        expected = sum(map(_is_getitem, node.users)) or len(written_operands(node)) or 1
        if len(waits) != expected and not readers:
            problems.append(f"{node.name} ({short_name(node)}) has {len(waits)} waits, expected {expected}")
    return problems


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def check_gathered(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """GATHERED."""
    problems = []
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        binding = ctx.binding(placeholder.name)
        if binding is not None and binding.group_size > 1:  # a shard on an axis of one rank is all of it
            problems += [
                f"{reader.name} ({reader.target}) reads a shard of {binding.name} ungathered"
                for reader in ungathered_readers(placeholder)
            ]
    return problems


def check_reduced(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """REDUCED: looks at the gradient outputs of a joint or a backward graph."""
    if ctx.first_gradient is None:
        return []
    values = output_values(gm.graph)
    problems = []
    for binding in ctx.reduced_bindings():
        gradient = ctx.gradient_of(binding, values)
        if gradient is None:
            continue
        if gradient.target is REDUCE_GRAD or reductions_of(gradient, binding):
            continue
        problems.append(f"the gradient of {binding.name} ({gradient.name}) does not come from a reduction")
    return problems


def check_merged(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """MERGED."""
    seen: dict[fx.Node, fx.Node] = {}
    problems = []
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        first = seen.setdefault(node.args[0], node)
        if first is not node:
            name = UnshardCall(*node.args).name
            problems.append(f"{name} is unsharded by {first.name} and again by {node.name}")
    return problems


def check_tagged(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """TAGGED."""
    nodes = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    return [
        f"{node.name} ({UnshardCall(*node.args).name}) has no recompute tag"
        for node in nodes
        if "recompute" not in node.meta
    ]


def check_lowered(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """LOWERED."""
    return [
        f"{node.name} is still {node.target}"
        for node in gm.graph.nodes
        if node.target in (UNSHARD, REDUCE_GRAD, KEEP_PIECE, RESHARD)
    ]


def check_bucketed(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """BUCKETED."""
    seen: dict[tuple[str, ...], str] = {}
    problems = []
    for node, key in bucket_keys(gm, ctx).items():
        first = seen.setdefault(key, node.name)
        if first != node.name:
            problems.append(f"{first} and {node.name} are both {' '.join(filter(None, key))}")
    return problems


def check_scheduled(gm: fx.GraphModule, ctx: PassContext) -> list[str]:
    """SCHEDULED; only of gathers of shards, since others stay between the compute around them."""
    problems = []
    prepared = prepared_nodes(gm, ctx)
    nodes = [node for node in gm.graph.nodes if node not in prepared or is_collective(node)]
    for index, wait in enumerate(nodes):
        if not is_wait(wait) or wait.all_input_nodes[0].target not in GATHERS:
            continue
        if not shards_behind(wait.all_input_nodes[0], ctx):
            continue
        unpacked = {wait}
        for node in nodes[index + 1 :]:
            reads = any(source in unpacked for source in node.all_input_nodes)
            if is_collective(node) and reads:
                break  # of another axis, which moves what was gathered
            if is_layout(node):
                unpacked.update([node] if reads else [])
            elif node.op == "call_function" and not is_collective(node) and not is_wait(node):
                if not reads and _has_compute_reader(unpacked):
                    problems.append(f"{wait.name} waits before {node.name}, which does not need it")
                break
    return problems


def _has_compute_reader(values: set[fx.Node]) -> bool:
    return any(user.op == "call_function" for value in values for user in value.users if user not in values)


CHECKERS: dict[Fact, Checker] = {
    Fact.TYPED: check_typed,
    Fact.WAITED: check_waited,
    Fact.GATHERED: check_gathered,
    Fact.REDUCED: check_reduced,
    Fact.MERGED: check_merged,
    Fact.TAGGED: check_tagged,
    Fact.LOWERED: check_lowered,
    Fact.BUCKETED: check_bucketed,
    Fact.SCHEDULED: check_scheduled,
}
