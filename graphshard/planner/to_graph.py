"""Turns a schedule into a graph: merges buckets, and places collectives where the schedule has them.

The work is done on a copy. The copy replaces the graph only after all checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..cost import collective_kind
from ..ir import RowPlace, apply_order, copy_graph, is_collective, is_wait
from ..pipeline import is_layout
from .from_graph import GraphProblem
from .merge_collectives import merge_gathers, merge_reductions
from .search import Step, simulate


def planned_graph(gm: fx.GraphModule, found: GraphProblem, steps: Sequence[Step]) -> fx.GraphModule:
    """A copy of ``gm`` with the collectives merged and placed as ``steps`` say.

    Raises:
        PlanError: the steps break a rule of :mod:`.search.machine`.
    """
    simulate(found.problem, steps)
    copied = copy_graph(gm)
    twin = dict(zip(gm.graph.nodes, copied.graph.nodes, strict=True))
    starts: dict[tuple[int, ...], fx.Node] = {}
    for step in steps:
        if step.is_start:
            members = [twin[found.starts[index]] for index in step.members]
            places = [found.problem.collectives[index].place for index in step.members]
            starts[step.members] = _merge(copied.graph, members, places)
    order = _Order(copied.graph, [twin[node] for node in found.tasks], starts).nodes(steps)
    _check_order(order)
    apply_order(copied.graph, order)
    copied.graph.lint()
    return copied


def _merge(graph: fx.Graph, members: list[fx.Node], places: list[RowPlace | None]) -> fx.Node:
    if len(members) == 1:
        return members[0]
    if collective_kind(members[0]) == "all_gather":
        return merge_gathers(graph, members, places)
    return merge_reductions(graph, members)


class _Order:
    """Places nodes one after the other, each after its inputs."""

    def __init__(self, graph: fx.Graph, tasks: list[fx.Node], starts: dict[tuple[int, ...], fx.Node]) -> None:
        self._graph, self._tasks, self._starts = graph, tasks, starts
        self._fixed = {
            *tasks,
            *(node for node in graph.nodes if node.op in ("placeholder", "get_attr", "output")),
        }
        self._placed: dict[fx.Node, None] = {}

    def nodes(self, steps: Sequence[Step]) -> list[fx.Node]:
        for node in self._graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._placed[node] = None
        position = 0
        for step in steps:
            self._run(position, step.position)
            position = step.position
            start = self._starts[step.members]
            if step.is_start:
                self._place(start)
            else:
                for wait in start.users:
                    self._place_with_results(wait)
        self._run(position, len(self._tasks))
        output = self._graph.output_node()
        for node in self._graph.nodes:
            if node is not output:
                self._place(node)
        return [*self._placed, output]

    def _run(self, first: int, end: int) -> None:
        for task in self._tasks[first:end]:
            for source in task.all_input_nodes:
                self._place(source)
            self._placed[task] = None

    def _place(self, node: fx.Node) -> None:
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [source for source in current.all_input_nodes if source not in self._placed]
            if current in self._placed or not missing:
                self._placed[current] = None
                pending.pop()
            else:
                pending.extend(missing)

    def _place_with_results(self, wait: fx.Node) -> None:
        """Places the wait, and what is made of it and of nodes already placed."""
        self._place(wait)
        pending = [wait]
        while pending:
            value = pending.pop(0)
            for user in value.users:
                is_ready = all(source in self._placed for source in user.all_input_nodes)
                is_movable = user not in self._fixed and not is_collective(user) and not is_wait(user)
                if is_ready and is_movable and user not in self._placed and not self._packs(user):
                    self._placed[user] = None
                    pending.append(user)

    def _packs(self, node: fx.Node) -> bool:
        """Whether a node is there for starts of collectives: it is then placed with them. It may be saved, too."""
        if is_layout(node):
            return bool(node.users) and all(is_collective(user) for user in node.users)
        return self._leads_to_starts(node)

    def _leads_to_starts(self, node: fx.Node) -> bool:
        readers = [user for user in node.users if user.op != "output"]
        if not readers or node in self._fixed or is_wait(node):
            return False
        return all(is_collective(user) or self._leads_to_starts(user) for user in readers)


def _check_order(order: Sequence[fx.Node]) -> None:
    seen: set[fx.Node] = set()
    for node in order:
        late = [source.name for source in node.all_input_nodes if source not in seen]
        assert not late, f"{node.name} is placed before {late}"
        seen.add(node)
