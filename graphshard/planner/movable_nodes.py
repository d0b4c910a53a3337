"""Which collectives of a graph can move, and which nodes move with them.

A collective can move if exactly one node reads it, that node is a wait, and no op writes in place to what it reads
or makes. These nodes move with it:

- its wait,
- the layout nodes (casts, pads, views) between inputs of the graph and its start,
- what a gather extension computes of a shard in front of its gather, waits of other collectives included,
- the layout nodes that are made of its result alone,

except those that read memory which some op writes to in place. All other nodes are compute and keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import fx

from ..ir import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_HOOK,
    ALL_TO_ALL,
    CUSTOM_ALL_GATHER,
    CUSTOM_REDUCE_SCATTER,
    FUNCTIONAL_FORMS,
    REDUCE_SCATTER,
    Writes,
    c10d,
    is_c10d_op,
    is_collective,
    is_point_to_point,
    is_wait,
    operands,
    short_name,
    touches,
)
from ..pipeline import is_accumulation, is_layout

#: Kinds of collectives that can move.
MOVABLE = {
    ALL_GATHER,
    CUSTOM_ALL_GATHER,
    REDUCE_SCATTER,
    CUSTOM_REDUCE_SCATTER,
    ALL_REDUCE,
    ALL_TO_ALL,
    c10d.broadcast.default,
}


def movable_collectives(gm: fx.GraphModule, writes: Writes) -> tuple[list[fx.Node], list[str]]:
    """The collectives that can move, in graph order, and a sentence on each of the others.

    Args:
        gm: the graph.
        writes: the values to whose memory some op writes in place, or may.
    """
    found = []
    messages = list(filter(is_point_to_point, gm.graph.nodes))
    notes = [
        f"{node.name} ({short_name(node)}) stays in its place: it is a message between two ranks, whose time is not "
        "known and counts as none"
        for node in messages
    ]
    notes += [
        f"{node.name} ({short_name(node)}) stays in its place, and its time counts as none: it is no functional "
        "collective (torch.distributed._functional_collectives)"
        for node in filter(is_c10d_op, gm.graph.nodes)
    ]
    for node in filter(is_collective, gm.graph.nodes):
        if why := _obstacle(node, writes, messages):
            notes.append(f"{node.name} ({short_name(node)}) stays in its place: it {why}")
        else:
            found.append(node)
    return found, notes


def _obstacle(node: fx.Node, writes: Writes, messages: Sequence[fx.Node]) -> str:
    """Why a collective cannot move; "" for one that can."""
    users = list(node.users)
    if node.target is ALL_REDUCE_HOOK:
        return "is a user's hook, whose time is not known and counts as none"
    if messages:
        return (
            f"shares its graph with {messages[0].name}, a message between two ranks, which may have other graphs: "
            "moved, it could wait for a rank that waits for this one"
        )
    if node.target in FUNCTIONAL_FORMS:
        return "writes its result to memory it is given"
    if node.target not in MOVABLE:
        return "is of a kind that is not planned"
    if len(users) != 1 or not is_wait(users[0]):
        return "is not read by one wait alone"
    if any(touches(one, writes.known) for one in (*operands(node), node)):
        return "reads or makes what another op writes to in place"
    if any(touches(one, writes.possible) for one in (*operands(node), node)):
        return "reads or makes what a method, a module or a function without a schema may write to in place"
    return ""


def moving_nodes(
    graph: fx.Graph, movable: list[fx.Node], written: Set[fx.Node], prepared: Set[fx.Node] = frozenset()
) -> set[fx.Node]:
    """The nodes that move: collectives, their waits, and layout nodes fed by these or by inputs alone.

    It uses the data flow alone, so it fits graphs from anywhere; ``rule_order`` relies on the context to know the
    parameters.

    Args:
        graph: the graph.
        movable: its collectives that can move.
        written: values to whose memory some op writes in place. Their readers stay: elsewhere they would read
            another value.
        prepared: what is computed of shards alone (:func:`graphshard.pipeline.prepared_nodes`). What collectives need
            of it moves with them.
    """
    moving = set(movable)
    fixed: set[fx.Node] = set()
    if written:
        fixed = {node for node in graph.nodes if any(touches(one, written) for one in node.all_input_nodes)}
    rooted: dict[fx.Node, bool] = {}  # layout nodes and prepared ones, made of inputs alone
    for node in graph.nodes:
        if is_wait(node) and node in prepared:
            rooted[node] = node.all_input_nodes[0] in moving
        elif (is_layout(node) or node in prepared) and node.all_input_nodes and node not in moving:
            rooted[node] = node not in fixed and all(
                source.op == "placeholder" or rooted.get(source) for source in node.all_input_nodes
            )
    pending = [source for node in movable for source in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if rooted.get(node) and node not in moving:
            moving.add(node)
            pending.extend(
                node.all_input_nodes
            )  # a collective stops it: what that needs is pending by itself
    collectives = set(movable)
    derived: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if (is_wait(node) and sources[0] in collectives) or (
            (is_layout(node) or is_accumulation(node))
            and node not in fixed
            and any(source in derived for source in sources)
            and all(source in derived or source.op == "placeholder" for source in sources)
        ):
            derived.add(node)
    return moving | derived
