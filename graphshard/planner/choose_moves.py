"""Which compute to move beside collectives that compute reads soon.

Collectives of tensor, sequence and expert parallelism stand between the task that makes what they send and the task
that reads their result. Backwards hold work that neither needs: gradients of weights, which only reductions read.
Autograd runs it before the collective. Moved after the start it hides the collective, but its inputs live a little
longer. Forwards that are recomputed hold work that can run sooner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..ir import is_fusible
from .from_graph import GraphProblem
from .move_compute import Flight, Move, Moving
from .search import Collective, Problem

#: A plan with moved compute is taken if it takes at most this share of the time without. It is made only if moves
#: can hide as much of compute's time, and lower the bound by as much.
WORTH = 0.99

#: The most flights that compute moves past: those of one block of a transformer with tensor parallelism.
_REACH = 4

#: The most nodes that are tried for one flight.
_MOST_TRIED = 64

#: A node that takes less than this share of a collective's time moves only together with others. So does a node that
#: Inductor generates code for: elsewhere it would be fused with less.
_LEAST = 0.05


@dataclass(slots=True, kw_only=True)
class _Window:
    """A flight, with the seconds of its collective and of the compute beside it."""

    flight: Flight
    need: float
    cover: float

    @property
    def lack(self) -> float:
        return max(0.0, self.need - self.cover)

    def beside(self, nodes: Sequence[fx.Node], seconds: Mapping[fx.Node, float]) -> float:
        """The seconds of those of these nodes that stand beside the flight."""
        made, reader = self.flight.made, self.flight.reader
        return sum(seconds.get(node, 0.0) for node in nodes if made < node < reader)


def moved_compute(gm: fx.GraphModule, found: GraphProblem) -> tuple[Moving, list[Move]] | None:
    """A copy of a graph whose compute is moved, and the moves; None if that is not worth a trial.

    Flights are filled one after the other until the compute beside each takes as long as its collective: first with
    nodes in front of the flight, nearest first, then with nodes after it. A move that would leave another flight
    with too little compute is not made.

    Args:
        gm: the graph; it stays as it is.
        found: the problem read from it.
    """
    problem = found.problem
    elapsed = [0.0, *itertools.accumulate(task.seconds for task in problem.tasks)]
    covers = [elapsed[one.deadline] - elapsed[one.earliest] for one in problem.collectives]
    needs = [_seconds(problem, one) for one in problem.collectives]
    is_between = [one.earliest > 0 and one.deadline < len(problem.tasks) for one in problem.collectives]
    least = (1 - WORTH) * elapsed[-1]
    lacks = [max(0.0, need - cover) for need, cover in zip(needs, covers, strict=True)]
    if sum(itertools.compress(lacks, is_between)) < least:
        return None
    moving = Moving(gm, found)
    windows = [
        _Window(flight=moving.flights[start], need=need, cover=cover)
        for start, need, cover in zip(map(moving.twin.get, found.starts), needs, covers, strict=True)
        if start in moving.flights
    ]
    seconds = {moving.twin[node]: task.seconds for node, task in zip(found.tasks, problem.tasks, strict=True)}
    before = sum(window.lack for window in windows)
    moves = [move for place in range(len(windows)) for move in _fill(moving, windows, place, seconds)]
    if before - sum(window.lack for window in windows) < least:
        return None
    moving.gm.graph.lint()
    return moving, moves


def _seconds(problem: Problem, one: Collective) -> float:
    size = one.kind, one.num_bytes, one.queue
    return problem.prices.collective_seconds(*size) + problem.prices.spread_seconds(*size)


def _fill(
    moving: Moving, windows: Sequence[_Window], place: int, seconds: Mapping[fx.Node, float]
) -> Iterator[Move]:
    """Moves compute beside one flight until it is covered or no candidate is left."""
    window = windows[place]
    if not window.lack:
        return
    near = windows[max(0, place - 2 * _REACH) : place + 2 * _REACH + 1]
    others = [other for other in near if other is not window]
    for head in list(itertools.islice(_candidates(windows, place, seconds), _MOST_TRIED)):
        if not window.lack:
            return
        if window.flight.made < head < window.flight.reader:
            continue  # it came with another
        group = moving.group(head, window.flight)
        if group is None:
            continue
        taken = [other.beside(group, seconds) for other in others]
        if any(
            lost and other.cover - lost < min(other.need, other.cover)
            for other, lost in zip(others, taken, strict=True)
        ):
            continue
        window.cover -= window.beside(group, seconds)
        yield moving.move(head, group, window.flight)
        window.cover += window.beside(group, seconds)
        for other, lost in zip(others, taken, strict=True):
            other.cover += other.beside(group, seconds) - lost


def _candidates(
    windows: Sequence[_Window], place: int, seconds: Mapping[fx.Node, float]
) -> Iterator[fx.Node]:
    """Nodes worth moving beside a flight: those in front of it, then those after it, nearest first."""
    flight = windows[place].flight
    least = _LEAST * windows[place].need
    graph = flight.start.graph
    first = windows[place - _REACH].flight.made if place >= _REACH else next(iter(graph.nodes))
    is_far = place + _REACH < len(windows)
    last = windows[place + _REACH].flight.reader if is_far else graph.output_node()
    for nearest, end, is_ahead in ((flight.made, first, True), (flight.reader, last, False)):
        related = _reached(flight.start, end, is_ahead=is_ahead)
        node = nearest
        while end < node if is_ahead else node < end:
            if node not in related and seconds.get(node, 0.0) >= least and not is_fusible(node):
                yield node
            node = node.prev if is_ahead else node.next


def _reached(start: fx.Node, end: fx.Node, *, is_ahead: bool) -> set[fx.Node]:
    """The nodes that a node is made of (or that are made of it), as far as they stand this side of ``end``."""
    found = {start}
    pending = [start]
    while pending:
        node = pending.pop()
        for other in node.all_input_nodes if is_ahead else node.users:
            is_near = end < other if is_ahead else other < end
            if is_near and other not in found:
                found.add(other)
                pending.append(other)
    return found
