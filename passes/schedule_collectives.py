"""schedule_collectives: start gathers early, wait late; compute keeps its order.

Each gather starts ``prefetch`` gathers ahead of its first reader: right after the wait, and the
copies out, of the gather that many places earlier, or at the top of the graph. Starting it before
that wait would gain nothing, since collectives of one group queue, and would hold one more bucket.
Each wait stands right before the first reader of its result. A reduction starts where it stands and
is waited for where its result is needed, but at most ``reductions_in_flight`` reductions are open at
a time, because each holds a full gradient bucket.

Before (unit b after unit a)::

    %all_gather_into_tensor_0 = all_gather_into_tensor(%a)
    %wait_tensor_0 = wait_tensor(%all_gather_into_tensor_0)
    %mm_0 = mm(%x, %wait_tensor_0)
    %all_gather_into_tensor_1 = all_gather_into_tensor(%b)
    %wait_tensor_1 = wait_tensor(%all_gather_into_tensor_1)
    %mm_1 = mm(%mm_0, %wait_tensor_1)

After::

    %all_gather_into_tensor_0 = all_gather_into_tensor(%a)
    %wait_tensor_0 = wait_tensor(%all_gather_into_tensor_0)
    %all_gather_into_tensor_1 = all_gather_into_tensor(%b)
    %mm_0 = mm(%x, %wait_tensor_0)
    %wait_tensor_1 = wait_tensor(%all_gather_into_tensor_1)
    %mm_1 = mm(%mm_0, %wait_tensor_1)

Numerics: bitwise exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from graphshard.buckets import UNPACK
from graphshard.collectives import GATHERS, REDUCE_SCATTERS, is_collective, is_wait, short_name
from graphshard.context import PassContext
from graphshard.errors import OptionError
from graphshard.facts import Fact
from graphshard.pipeline import PassReport
from graphshard.provenance import is_layout, shards_behind
from graphshard.rewrite import apply_order


@dataclass(frozen=True, kw_only=True)
class ScheduleCollectives:
    """See the module docstring.

    Attributes:
        prefetch: how many gathers ahead of use one starts; 0 starts each right before its wait.
        reductions_in_flight: reductions that may be open at a time, at least 1.

    A unit whose user named the units to prefetch starts those gathers instead, and a user's own limit
    of open reductions replaces ``reductions_in_flight`` (both are in the context).
    """

    name: ClassVar[str] = "schedule_collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    prefetch: int = 1
    reductions_in_flight: int = 2

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise OptionError(f"schedule_collectives: prefetch={self.prefetch} must be at least 0")
        if self.reductions_in_flight < 1:
            raise OptionError(
                f"schedule_collectives: reductions_in_flight={self.reductions_in_flight} must be at least 1"
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gathers", "reductions" placed; other collectives stay and are named as skipped."""
        placement = _Placement(
            gm, ctx, prefetch=self.prefetch, in_flight=ctx.max_reductions or self.reductions_in_flight
        )
        order = placement.order()
        changed = order != list(gm.graph.nodes)
        if changed:
            apply_order(gm.graph, order)
        return PassReport(
            changed=changed,
            counts={"gathers": len(placement.gathers), "reductions": len(placement.reductions)},
            skipped=tuple(placement.skipped),
        )


@dataclass
class _Placement:
    """Builds the new order by placing each node after what it needs, as late as it may."""

    gm: fx.GraphModule
    ctx: PassContext
    prefetch: int
    in_flight: int
    gathers: list[fx.Node] = field(default_factory=list)
    reductions: list[fx.Node] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._placed: dict[fx.Node, None] = {}
        self._open: list[fx.Node] = []
        movable = []
        for node in filter(is_collective, self.gm.graph.nodes):
            if node.target in GATHERS and shards_behind(node, self.ctx):
                movable.append(node)
            elif node.target in REDUCE_SCATTERS:
                self.reductions.append(node)
            else:
                self.skipped.append(
                    f"{node.name} ({short_name(node)}) is not a gather of shards or a reduction"
                )
        self._lazy = _lazy_nodes(self.gm.graph, self.ctx, set(movable))
        self.gathers = self._by_first_need(movable)
        self._rank = {node: index for index, node in enumerate(self.gathers)}

    def order(self) -> list[fx.Node]:
        for placeholder in self.gm.graph.find_nodes(op="placeholder"):
            self._place(placeholder)
        for gather in self.gathers[: self.prefetch]:
            self._place(gather)
        for node in self.gm.graph.nodes:
            if node not in self._lazy:
                self._place(node)
        # What nothing reads (a dead view, say) keeps existing, in front of the output.
        unread = [node for node in self.gm.graph.nodes if node not in self._placed]
        *rest, output = self._placed
        return [*rest, *unread, output]

    def _by_first_need(self, movable: list[fx.Node]) -> list[fx.Node]:
        """Gathers in the order in which compute first asks for them."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        wanted = set(movable)

        def visit(node: fx.Node) -> None:
            if node in seen:
                return
            seen.add(node)
            for source in node.all_input_nodes:
                visit(source)
            if node in wanted:
                found[node] = None

        for node in self.gm.graph.nodes:
            if node not in self._lazy:
                visit(node)
        return list(found) + [node for node in movable if node not in found]

    def _place(self, node: fx.Node) -> None:
        if node in self._placed:
            return
        for source in node.all_input_nodes:
            self._place(source)
        if node.target in REDUCE_SCATTERS:
            self._close_reductions(before=node)
        self._placed[node] = None
        if is_wait(node) and node.args[0] in self._rank:
            self._unpack(node)
            for upcoming in self._upcoming(node.args[0]):
                self._place(upcoming)

    def _upcoming(self, gather: fx.Node) -> list[fx.Node]:
        """The gathers to start once this one is copied out: those the user named, else the next ones."""
        later = self.gathers[self._rank[gather] + 1 :]
        named = self.ctx.prefetched_after(self._unit_of(gather)) if self.prefetch else ()
        if not named:
            return later[: self.prefetch]
        return [other for unit in named for other in later if self._unit_of(other) == unit]

    def _unit_of(self, gather: fx.Node) -> str:
        return shards_behind(gather, self.ctx)[0].unit

    def _unpack(self, wait: fx.Node) -> None:
        """All copies out of a bucket at once: then the bucket, and later each copy, can be freed."""
        for user in wait.users:
            if user.target is UNPACK:
                self._place(user)
                for item in user.users:
                    self._place(item)

    def _close_reductions(self, before: fx.Node) -> None:
        self._open = [node for node in self._open if not any(user in self._placed for user in node.users)]
        while len(self._open) >= self.in_flight:
            for wait in self._open.pop(0).users:
                self._place_with_unpacking(wait)
        self._open.append(before)

    def _place_with_unpacking(self, node: fx.Node) -> None:
        self._place(node)
        for user in node.users:
            if user in self._lazy and user not in self._placed:
                self._place_with_unpacking(user)


def _lazy_nodes(graph: fx.Graph, ctx: PassContext, gathers: set[fx.Node]) -> set[fx.Node]:
    """Nodes placed only when something needs them: gathers, what packs them, waits, what unpacks them."""
    lazy: set[fx.Node] = set(gathers)
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
