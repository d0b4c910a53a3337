"""merge_reshards: one reshard in place of several where the ranks then send fewer bytes, or the same with fewer steps.

- A reshard of a reshard becomes one from the first placement to the last; one that leads back is removed.
- Equal reshards of one value become one.
- Of two different reshards of one value, one is computed from the other's result: the piece of a value that is gathered
  anyway is a slice.

Before::

    %reshard_0: f64[2, 6] = reshard(%mm_0, Partial(sum) -> Shard(0), shape=[4, 6], axis=tp=2, sends=96 bytes, placed)
    %reshard_1: f64[4, 6] = reshard(%mm_0, Partial(sum) -> Replicate, shape=[4, 6], axis=tp=2, sends=192 bytes, placed)

After::

    %reshard_0: f64[4, 6] = reshard(%mm_0, Partial(sum) -> Replicate, shape=[4, 6], axis=tp=2, sends=192 bytes, placed)
    %reshard_1: f64[2, 6] = reshard(%reshard_0, Replicate -> Shard(0), shape=[4, 6], axis=tp=2, sends=0 bytes, placed)

Numerics: a reduce-scatter may sum in another order than an all-reduce. All else is bitwise.

Does not handle:

- reshards that ``propagate_sharding`` has not written: they say what the model's code has in pieces;
- two reshards of one value where only the second is of the backward: the forward does not wait for what it would give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphshard.ir import (
    REPLICATE,
    RESHARD,
    GraphEmitter,
    ReshardCall,
    aten,
    expected_bytes_sent,
    recompute_tags,
    reshard_exists,
)
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class MergeReshards:
    """See the module docstring; no options."""

    name: ClassVar[str] = "merge_reshards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts what was "joined" (a reshard of a reshard), "shared" (equal ones) and "derived" from another."""
        rules: dict[str, Callable[[fx.Graph], int]] = {"joined": _join, "shared": _share, "derived": _derive}
        counts = dict.fromkeys(rules, 0)
        is_done = False
        while not is_done:
            found = {name: rule(gm.graph) for name, rule in rules.items()}
            counts = {name: counts[name] + number for name, number in found.items()}
            is_done = not any(found.values())
        return PassReport(changed=any(counts.values()), counts=counts)


def _placed(graph: fx.Graph) -> list[tuple[fx.Node, ReshardCall]]:
    nodes = graph.find_nodes(op="call_function", target=RESHARD)
    return [(node, call) for node in nodes if (call := ReshardCall(*node.args)).placed]


def _join(graph: fx.Graph) -> int:
    """Reshards of reshards."""
    num_joined = 0
    for node, call in _placed(graph):
        first = call.value
        if first.target is not RESHARD:
            continue
        before = ReshardCall(*first.args)
        if (
            not before.placed
            or before.group_name != call.group_name
            or not reshard_exists(before.src, call.dst)
        ):
            continue
        direct = call._replace(value=before.value, src=before.src)
        if not _is_better(node, direct, alone=len(first.users) == 1):
            continue
        with graph.inserting_before(node):
            emit = GraphEmitter(graph, origin=node, extra_meta=recompute_tags(node))
            _replace(
                node, _as_it_lies(emit, node, direct) if direct.src == direct.dst else emit(RESHARD, *direct)
            )
        if not first.users:
            graph.erase_node(first)
        num_joined += 1
    return num_joined


def _is_better(node: fx.Node, direct: ReshardCall, *, alone: bool) -> bool:
    """Whether ``direct`` should replace a reshard of a reshard; ``alone``: nothing else reads the first one."""
    if direct.src == direct.dst:
        return True
    call = ReshardCall(*node.args)
    now, then = _sent(node, call), _sent(node, direct)
    if not alone:
        return then < now
    return then <= now + _sent(node, ReshardCall(*call.value.args))


def _as_it_lies(emit: GraphEmitter, node: fx.Node, direct: ReshardCall) -> fx.Node:
    """The value itself; a copy if it lies in memory otherwise than the result of a reshard."""
    value: fx.Node = direct.value
    if value.meta["val"].stride() == node.meta["val"].stride():
        return value
    return emit(aten.clone.default, value, memory_format=torch.contiguous_format)


def _share(graph: fx.Graph) -> int:
    """Equal reshards of one value."""
    first: dict[Any, fx.Node] = {}
    num_shared = 0
    for node, call in _placed(graph):
        known = first.setdefault((call.value, call.src, call.dst, call.group_name), node)
        if known is not node:
            _replace(node, known)
            num_shared += 1
    return num_shared


def _derive(graph: fx.Graph) -> int:
    """Different reshards of one value."""
    position: dict[fx.Node, float] = {node: place for place, node in enumerate(graph.nodes)}
    families: dict[Any, list[tuple[fx.Node, ReshardCall]]] = {}
    for node, call in _placed(graph):
        families.setdefault((call.value, call.src, call.group_name), []).append((node, call))
    num_derived = 0
    for members in families.values():
        source, given = next((each for each in members if each[1].dst == REPLICATE), members[0])
        for node, call in members:
            derived = call._replace(value=source, src=given.dst)
            if node is source or not reshard_exists(given.dst, call.dst) or _is_of_backward(source, node):
                continue
            if _sent(node, derived) >= _sent(node, call):
                continue
            if position[source] > position[node]:  # both read the same value
                node.prepend(source)
                position[source] = position[node] - 0.5
            with graph.inserting_before(node):
                emit = GraphEmitter(graph, origin=node, extra_meta=recompute_tags(node))
                _replace(node, emit(RESHARD, *derived))
            num_derived += 1
    return num_derived


def _is_of_backward(source: fx.Node, node: fx.Node) -> bool:
    """Whether a value of the forward would be computed from one of the backward."""
    return source.meta.get("partitioner_tag") == "is_backward" != node.meta.get("partitioner_tag")


def _sent(node: fx.Node, call: ReshardCall) -> int:
    return expected_bytes_sent(call, node.meta["val"].dtype)


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
