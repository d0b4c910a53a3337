"""Moves compute into the flight of a collective that compute reads soon.

Some task *makes* what a collective sends, and another task *reads* its result; compute between the two hides the
collective. A node moves there together with its *group*. From in front of the flight, the group is all that is made
of the node up to the reader. From after it, the group is all that the node is made of, back to the maker. The group
moves to right after the start of the collective or, if it needs something that stands later, to right in front of
the reader.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from ..errors import PlanError
from ..ir import copy_graph, is_c10d_op, is_collective, is_wait, touches, writes_of
from .from_graph import GraphProblem


class Move(NamedTuple):
    """One group that moves. It names no node, since names differ between ranks.

    Attributes:
        flight: the collective beside which it runs, by its index in the graph as it came.
        op, number: the node whose group moves: the one with this number, from 0, among all with this op in that
            graph.
        carried: collectives of the group, by their index in that graph.
    """

    flight: int
    op: str
    number: int
    carried: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Flight:
    """A collective whose input some task makes and whose result another task reads.

    Attributes:
        start: the node that starts it.
        made: the last task that what it sends is made of.
        readers: the tasks that read its result.
        reader: the first of them.
    """

    start: fx.Node
    made: fx.Node
    readers: frozenset[fx.Node]
    reader: fx.Node


class Moving:
    """A copy of a graph whose compute moves.

    Attributes:
        gm: the copy.
        twin: its node for each node of the graph as it came.
        flights: by the nodes that start them, in the order of the graph as it came.
    """

    def __init__(self, gm: fx.GraphModule, found: GraphProblem) -> None:
        self.gm = copy_graph(gm)
        self.twin = dict(zip(gm.graph.nodes, self.gm.graph.nodes, strict=True))
        tasks = frozenset(self.twin[task] for task in found.tasks)
        starts = [self.twin[start] for start in found.starts]
        flights = (_flight_of(start, tasks) for start in starts)
        self.flights = {flight.start: flight for flight in flights if flight is not None}
        self._free = frozenset(starts) - self.flights.keys()
        self._written = writes_of(self.gm.graph).all
        self._index = {node: index for index, node in enumerate(filter(is_collective, self.gm.graph.nodes))}
        self._names = _names_of(self.gm.graph)
        self._movable: dict[fx.Node, bool] = {}

    def group(self, head: fx.Node, flight: Flight) -> list[fx.Node] | None:
        """The nodes that move with ``head``, in order; ``head`` stands in front of ``flight.made`` or after the reader.

        None if the group cannot move: some of it makes or reads a collective with a flight of its own, writes to
        memory, draws random numbers, or is an op that is not known to be pure.
        """
        is_ahead = head < flight.reader
        found = {head}
        pending = [head]
        while pending:
            node = pending.pop()
            if not self._is_movable(node):
                return None
            for other in node.users if is_ahead else node.all_input_nodes:
                is_between = other < flight.reader if is_ahead else flight.made < other
                if is_between and other not in found:
                    found.add(other)
                    pending.append(other)
        return sorted(found)

    def _is_movable(self, node: fx.Node) -> bool:
        known = self._movable.get(node)
        if known is None:
            known = self._movable[node] = self._moves_freely(node)
        return known

    def _moves_freely(self, node: fx.Node) -> bool:
        if is_collective(node):
            return node in self._free
        if is_wait(node):
            return node.all_input_nodes[0] in self._free
        touched = (node, *node.all_input_nodes)
        return _is_pure(node) and not any(touches(one, self._written) for one in touched)

    def move(self, head: fx.Node, group: Sequence[fx.Node], flight: Flight) -> Move:
        """Moves the group of a node into the flight of a collective."""
        moved, behind = set(group), flight.start.next
        while behind in moved:
            behind = behind.next
        needed = (source for node in group for source in node.all_input_nodes if source not in moved)
        anchor = behind if all(source < behind for source in needed) else flight.reader
        for node in group:
            anchor.prepend(node)
        for other in self.flights.values():
            if other.reader in group:
                other.reader = min(other.readers)
        carried = tuple(sorted(self._index[node] for node in group if is_collective(node)))
        return Move(self._index[flight.start], *self._names[head], carried)

    def follow(self, moves: Iterable[Move]) -> None:
        """Makes the moves that another rank made in its own graph.

        Raises:
            PlanError: this graph lacks the node or the collective, or the group cannot move here, or not with the
                same collectives.
        """
        starts = {index: node for node, index in self._index.items()}
        heads = {name: node for node, name in self._names.items()}
        for move in moves:
            start, head = starts.get(move.flight), heads.get((move.op, move.number))
            flight = None if start is None else self.flights.get(start)
            group = None if head is None or flight is None else self.group(head, flight)
            if head is None or flight is None or group is None or self.move(head, group, flight) != move:
                raise PlanError(
                    f"the plan to follow moves {move.op} number {move.number} beside collective {move.flight}, with "
                    f"the collectives {list(move.carried)}, which this graph does not allow; compile "
                    "the same graph with the same options on every rank"
                )


def _flight_of(start: fx.Node, tasks: frozenset[fx.Node]) -> Flight | None:
    (wait,) = start.users
    made = max(_tasks_from(start, tasks, is_ahead=True), default=None)
    readers = frozenset(_tasks_from(wait, tasks, is_ahead=False))
    if made is None or not readers:
        return None
    return Flight(start=start, made=made, readers=readers, reader=min(readers))


def _tasks_from(node: fx.Node, tasks: frozenset[fx.Node], *, is_ahead: bool) -> Iterator[fx.Node]:
    """The first tasks before or after a node, on all paths that lead through no other collective."""
    seen = {node}
    pending = [node]
    while pending:
        one = pending.pop()
        for other in one.all_input_nodes if is_ahead else one.users:
            if other in seen:
                continue
            seen.add(other)
            if other in tasks:
                yield other
            elif not is_collective(other):
                pending.append(other)


def _names_of(graph: fx.Graph) -> dict[fx.Node, tuple[str, int]]:
    counts: dict[str, int] = {}
    names = {}
    for node in graph.nodes:
        op = str(node.target)
        number = counts[op] = counts.get(op, -1) + 1
        names[node] = (op, number)
    return names


def _is_pure(node: fx.Node) -> bool:
    """Whether a node is an op that only computes, from its inputs alone."""
    if node.target is operator.getitem:
        return True
    is_op = isinstance(node.target, OpOverload) and not is_c10d_op(node)
    return is_op and torch.Tag.nondeterministic_seeded not in node.target.tags
