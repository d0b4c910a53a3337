"""Orders of a graph in which only collectives, and the layout nodes around them, have moved: the rule-based schedule.

:class:`Placement` builds an order by placing each node after its inputs. Compute keeps its order. Nodes that only
collectives need (gathers, what packs them, waits, what unpacks them) are *lazy*: they are placed when another node
asks for them. A few decisions say which of them to ask for earlier.

If shards have copies, a gradient is reduced twice, and the all-reduce of the reduce-scattered gradient is lazy too.
It starts when its reduce-scatter is closed, and is waited for when the next one starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import fx

from ..ir import ALL_REDUCE, GATHERS, REDUCE_SCATTERS, UNPACK, group_name, is_collective, is_wait
from ..pipeline import PassContext, is_accumulation, is_layout, prepared_nodes, shards_behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """When collectives start and are waited for, if not where their result is needed.

    Attributes:
        prefetch: each gather starts right after the wait, and the copies out, of the gather this many places
            earlier, or at the top of the graph; 0 for right before its wait.
        in_flight: reductions that may be open at a time; the oldest is closed when one more starts.
        sequence: an order of starts to keep: before a collective starts, the gathers and all-reduces named before it
            do.
        starts: gathers to start in front of a node, at the latest.
        closes: reductions to close in front of a node, at the latest.
    """

    prefetch: int = 0
    in_flight: int = 1
    sequence: Sequence[fx.Node] = ()
    starts: Mapping[fx.Node, Sequence[fx.Node]] = field(default_factory=dict)
    closes: Mapping[fx.Node, Sequence[fx.Node]] = field(default_factory=dict)


class Movable:
    """The collectives of a graph that may move, and the nodes that move with them.

    Attributes:
        gathers: gathers of shards, in the order in which compute first needs them.
        reductions: reduce-scatters over the axes that hold shards, in graph order.
        all_reduces: all-reduces, over copies, of the results of ``reductions``, in graph order.
        others: every other collective; these stay between the compute around them.
        lazy: gathers, what packs them, what extensions compute for them, waits, what unpacks them, and
            ``all_reduces``.
        named: for a gather, those that the user wants started once it is copied out.
    """

    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self.graph = gm.graph
        collectives = list(filter(is_collective, gm.graph.nodes))
        found = [node for node in collectives if node.target in GATHERS and shards_behind(node, ctx)]
        self.reductions = [
            node
            for node in collectives
            if node.target in REDUCE_SCATTERS and _is_of_data_parallelism(node, ctx)
        ]
        second = _second_reductions(gm.graph, ctx, self.reductions)
        self.all_reduces = [node for node in second if node.target is ALL_REDUCE]
        known = {*found, *self.reductions, *self.all_reduces}
        self.others = [node for node in collectives if node not in known]
        prepared = prepared_nodes(gm, ctx)
        self.lazy = _nodes_placed_on_demand(gm.graph, ctx, {*found, *second}, prepared)
        self.gathers = self._by_first_need(found)
        self.named = self._named_by_user(ctx)

    def _by_first_need(self, gathers: list[fx.Node]) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        wanted = set(gathers)

        def visit(node: fx.Node) -> None:
            if node in seen:
                return
            seen.add(node)
            for source in node.all_input_nodes:
                visit(source)
            if node in wanted:
                found[node] = None

        for node in self.graph.nodes:
            if node not in self.lazy:
                visit(node)
        return list(found) + [node for node in gathers if node not in found]

    def _named_by_user(self, ctx: PassContext) -> dict[fx.Node, list[fx.Node]]:
        units = {gather: shards_behind(gather, ctx)[0].unit for gather in self.gathers}
        named = {}
        for index, gather in enumerate(self.gathers):
            later = self.gathers[index + 1 :]
            wanted = ctx.prefetched_after(units[gather])
            if wanted:
                named[gather] = [other for unit in wanted for other in later if units[other] == unit]
        return named


class Placement:
    """Builds one order of the nodes of ``movable.graph`` from ``decisions``."""

    def __init__(self, movable: Movable, decisions: Decisions) -> None:
        self._movable = movable
        self._decisions = decisions
        self._rank = {node: index for index, node in enumerate(movable.gathers)}
        self._reductions = frozenset(movable.reductions)
        self._all_reduces = frozenset(movable.all_reduces)
        self._sequence_rank = {node: index for index, node in enumerate(decisions.sequence)}
        self._next_in_sequence = 0
        self._placed: dict[fx.Node, None] = {}
        self._open: list[fx.Node] = []
        self._open_all_reduce: fx.Node | None = None

    def order(self) -> list[fx.Node]:
        """All nodes, inputs before their readers."""
        graph, lazy = self._movable.graph, self._movable.lazy
        for placeholder in graph.find_nodes(op="placeholder"):
            self._place(placeholder)
        for gather in self._movable.gathers[: self._decisions.prefetch]:
            self._place(gather)
        for node in graph.nodes:
            if node in lazy or node in self._placed:
                continue
            for reduction in self._decisions.closes.get(node, ()):
                self._close(reduction)
            if node.op == "output":
                for all_reduce in self._movable.all_reduces:  # each starts before its result is asked for
                    self._place(all_reduce)
            for source in node.all_input_nodes:  # waits and copies out come before the next start
                self._place(source)
            for gather in self._decisions.starts.get(node, ()):
                self._place(gather)
            self._place(node)
        # Nodes that nothing reads (a dead view, say) are kept, in front of the output.
        unread = [node for node in graph.nodes if node not in self._placed]
        *rest, output = self._placed
        return [*rest, *unread, output]

    def _place(self, node: fx.Node) -> None:
        if node in self._placed:
            return
        for source in node.all_input_nodes:
            self._place(source)
        if node in self._reductions:
            self._make_room(node)
        if node in self._sequence_rank:
            self._start_what_precedes(node)
        if node in self._all_reduces:
            self._close_all_reduce_before(node)
        self._placed[node] = None
        if is_wait(node) and node.all_input_nodes[0] in self._rank:
            self._unpack(node)
            for upcoming in self._upcoming(node.all_input_nodes[0]):
                self._place(upcoming)

    def _upcoming(self, gather: fx.Node) -> Sequence[fx.Node]:
        """The gathers to start once this one is copied out: those that the user named, else the next ones."""
        rank, distance = self._rank[gather], self._decisions.prefetch
        next_ones = self._movable.gathers[rank + 1 : rank + 1 + distance]
        return self._movable.named.get(gather, next_ones) if distance else ()

    def _start_what_precedes(self, collective: fx.Node) -> None:
        """Starts the gathers and all-reduces that precede a collective in the sequence.

        Not the reductions: they cannot start before their gradients exist.
        """
        while self._next_in_sequence < self._sequence_rank[collective]:
            earlier = self._decisions.sequence[self._next_in_sequence]
            self._next_in_sequence += 1
            if earlier in self._rank or earlier in self._all_reduces:
                self._place(earlier)

    def _unpack(self, wait: fx.Node) -> None:
        """Places all copies out of a bucket at once: then the bucket, and later each copy, can be freed."""
        for user in wait.users:
            if user.target is UNPACK:
                self._place(user)
                for item in user.users:
                    self._place(item)

    def _make_room(self, reduction: fx.Node) -> None:
        self._open = [node for node in self._open if not any(user in self._placed for user in node.users)]
        while len(self._open) >= self._decisions.in_flight:
            self._close(self._open.pop(0))
        self._open.append(reduction)

    def _close_all_reduce_before(self, upcoming: fx.Node) -> None:
        """Closes the open all-reduce: each holds a bucket of shards, and its group runs them one after the other."""
        if self._open_all_reduce is not None:
            self._close(self._open_all_reduce)
        self._open_all_reduce = upcoming

    def _close(self, reduction: fx.Node) -> None:
        for wait in reduction.users:
            self._place_with_unpacking(wait)

    def _place_with_unpacking(self, node: fx.Node) -> None:
        """Places a wait and what is made of it alone; starts an all-reduce of it unless a sequence says when."""
        self._place(node)
        for user in node.users:
            if user not in self._movable.lazy or user in self._placed or not self._is_ready(user):
                continue
            if user not in self._all_reduces:
                self._place_with_unpacking(user)
            elif not self._decisions.sequence:
                self._place(user)

    def _is_ready(self, node: fx.Node) -> bool:
        """Whether placing a lazy node places no compute."""
        return all(
            source in self._placed or (source in self._movable.lazy and self._is_ready(source))
            for source in node.all_input_nodes
        )


def at_once(order: Sequence[fx.Node]) -> list[fx.Node]:
    """An order with the waits of each collective right after its start."""
    result: dict[fx.Node, None] = {}
    for node in order:
        result[node] = None
        if is_collective(node):
            result |= dict.fromkeys(filter(is_wait, node.users))
    return list(result)


def _is_of_data_parallelism(node: fx.Node, ctx: PassContext) -> bool:
    """Whether a collective runs on an axis of the mesh; true for every one if the graph names no axis."""
    return not ctx.mesh.axes or ctx.mesh.find(group_name(node)) is not None


def _second_reductions(graph: fx.Graph, ctx: PassContext, reductions: list[fx.Node]) -> list[fx.Node]:
    """All-reduces of the results of ``reductions``, and the sums with earlier micro-batches in between."""
    found: dict[fx.Node, None] = {}
    reduced: set[fx.Node] = set()
    for node in graph.nodes:
        sources = [source for source in node.all_input_nodes if source.op != "placeholder"]
        if is_wait(node) and node.all_input_nodes[0] in reductions:
            reduced.add(node)
        elif not sources or not all(source in reduced for source in sources):
            continue
        elif node.target is ALL_REDUCE and _is_of_data_parallelism(node, ctx):
            found[node] = None
        elif is_accumulation(node):
            found[node] = None
            reduced.add(node)
        elif is_layout(node):
            reduced.add(node)
    return list(found)


def _nodes_placed_on_demand(
    graph: fx.Graph, ctx: PassContext, moved: set[fx.Node], prepared: Set[fx.Node]
) -> set[fx.Node]:
    """The lazy nodes: ``moved``, ``prepared``, all waits, and the layout nodes that these or parameters feed.

    It looks parameters up in the context; ``movable_nodes.moving_nodes`` takes graphs from anywhere, and respects
    writes in place.
    """
    lazy: set[fx.Node] = moved | prepared
    for node in graph.nodes:
        if is_wait(node):
            lazy.add(node)
        elif is_layout(node):
            sources = node.all_input_nodes
            if sources and all(
                source in lazy or (source.op == "placeholder" and ctx.binding(source.name))
                for source in sources
            ):
                lazy.add(node)
    return lazy
