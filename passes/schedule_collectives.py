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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.buckets import UNPACK
from graphshard.collectives import is_collective, is_wait, short_name
from graphshard.context import PassContext
from graphshard.errors import OptionError
from graphshard.facts import Fact
from graphshard.memory import MemoryModel, fusion_runs, is_view, kept_inputs, tensor_bytes
from graphshard.pipeline import PassReport
from graphshard.placement import Decisions, Movable, Placement
from graphshard.rewrite import apply_order

_MEMORY = ("free", "any")


@dataclass(frozen=True, kw_only=True)
class ScheduleCollectives:
    """See the module docstring.

    Attributes:
        prefetch: how many gathers ahead of use one may start; 0 starts each right before its wait.
        reductions_in_flight: reductions that may be open at a time, at least 1.
        memory: "free" overlaps only where the predicted peak of this graph stays what it is without
            overlap; "any" overlaps whatever it costs.
    """

    name: ClassVar[str] = "schedule_collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    prefetch: int = 1
    reductions_in_flight: int = 2
    memory: str = "free"

    def __post_init__(self) -> None:
        if self.memory not in _MEMORY:
            raise OptionError(
                f"schedule_collectives: memory={self.memory!r} is unknown; known: {', '.join(map(repr, _MEMORY))}"
            )
        if self.prefetch < 0:
            raise OptionError(f"schedule_collectives: prefetch={self.prefetch} must be at least 0")
        if self.reductions_in_flight < 1:
            raise OptionError(
                f"schedule_collectives: reductions_in_flight={self.reductions_in_flight} must be at least 1"
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gathers", "reductions" placed; other collectives stay and are named as skipped."""
        movable = Movable(gm, ctx)
        skipped = [
            f"{node.name} ({short_name(node)}) is not a gather of shards or a reduction"
            for node in movable.others
        ]
        decisions = Decisions(prefetch=self.prefetch, in_flight=self.reductions_in_flight)
        if self.memory == "free" and (movable.gathers or movable.reductions):
            decisions, declined = _decide(gm, movable, decisions)
            skipped += declined
        order = Placement(movable, decisions).order()
        changed = order != list(gm.graph.nodes)
        if changed:
            apply_order(gm.graph, order)
        return PassReport(
            changed=changed,
            counts={"gathers": len(movable.gathers), "reductions": len(movable.reductions)},
            skipped=tuple(skipped),
        )


def _decide(gm: fx.GraphModule, movable: Movable, wanted: Decisions) -> tuple[Decisions, list[str]]:
    """What of the ``wanted`` overlap fits under the peak of the order without any.

    The sequence of starts is the one of the wanted order whatever the sizes of activations are, so
    it is equal on ranks whose batches differ; only where the starts stand among compute is decided
    here, collective by collective in this sequence. The first order has each start as late, and each
    wait as early, as the sequence allows; every move away from it adds the bytes that the collective
    holds to the nodes it moves past.
    """
    model = MemoryModel(gm, kept=kept_inputs(gm))
    budget_bytes = model.timeline(Placement(movable, Decisions()).order()).peak_bytes
    sequence = [node for node in Placement(movable, wanted).order() if is_collective(node)]
    latest = Placement(movable, Decisions(sequence=sequence)).order()
    fitting = _Fitting(movable, model, wanted, latest, budget_bytes)
    for collective in sequence:
        fitting.floor = max(fitting.floor, fitting.place(collective))
    decisions = Decisions(
        in_flight=wanted.in_flight, sequence=sequence, starts=fitting.starts, closes=fitting.closes
    )
    return decisions, fitting.declined


class _Fitting:
    """The bytes live at each node of one order, and the moves that still fit under a budget."""

    def __init__(
        self,
        movable: Movable,
        model: MemoryModel,
        wanted: Decisions,
        order: Sequence[fx.Node],
        budget_bytes: int,
    ) -> None:
        self._movable, self._model, self._wanted = movable, model, wanted
        self._order, self._budget_bytes = order, budget_bytes
        self._live = list(model.timeline(order).live_bytes)
        self._position = {node: index for index, node in enumerate(order)}
        first, _ = fusion_runs(order)
        self._may_stand_before = [
            node not in movable.lazy and not is_view(node) and first[index] == index
            for index, node in enumerate(order)
        ]
        #: No later start of the sequence may stand in front of this position.
        self.floor = 0
        self.starts: dict[fx.Node, list[fx.Node]] = {}
        self.closes: dict[fx.Node, list[fx.Node]] = {}
        self.declined: list[str] = []

    def place(self, collective: fx.Node) -> int:
        """Decides for one collective; returns the position at which it starts."""
        if collective in self._movable.gathers:
            return self._start_early(collective)
        if collective in self._movable.reductions:
            self._wait_late(collective)
        return self._position[collective]

    def _start_early(self, gather: fx.Node) -> int:
        before, packing = self._position[gather], set(self._packing(gather))
        while self._order[before - 1] in packing:
            before -= 1
        held_bytes = self._model.held_bytes(gather) + tensor_bytes(gather.meta["val"])
        floor = max(self.floor, self._earliest(gather))
        best = position = before
        while position > floor and self._live[position - 1] + held_bytes <= self._budget_bytes:
            position -= 1
            best = position if self._may_stand_before[position] else best
        if position > floor and any(self._may_stand_before[floor:position]):
            self._decline(gather, "is not started before", self._order[position - 1], held_bytes)
        if best < before:
            self.starts.setdefault(self._order[best], []).append(gather)
            self._hold(held_bytes, best, before)
        return best

    def _packing(self, node: fx.Node) -> Iterator[fx.Node]:
        """What makes the input of a gather, and moves along."""
        for source in node.all_input_nodes:
            if source in self._movable.lazy:
                yield source
                yield from self._packing(source)

    def _earliest(self, gather: fx.Node) -> int:
        """Right after the copies out of the gather ``prefetch`` places earlier, or the top."""
        rank = self._movable.gathers.index(gather) - self._wanted.prefetch
        if rank < 0:
            return 0
        return 1 + max(self._position[node] for node in self._copies_out(self._movable.gathers[rank]))

    def _copies_out(self, gather: fx.Node) -> Iterator[fx.Node]:
        for wait in gather.users:
            yield wait
            for copies in (user for user in wait.users if user.target is UNPACK):
                yield from (copies, *copies.users)

    def _wait_late(self, reduction: fx.Node) -> None:
        waits = list(filter(is_wait, reduction.users))
        if not waits:
            return  # leaves the graph unwaited
        waited = min(self._position[wait] for wait in waits)
        held_bytes = self._model.held_bytes(reduction)
        limit = self._latest_wait(reduction)
        best = position = next(
            index for index in range(waited, len(self._order)) if self._may_stand_before[index]
        )
        while position < limit and self._live[position] + held_bytes <= self._budget_bytes:
            position += 1
            best = position if self._may_stand_before[position] else best
        if position < limit:
            self._decline(reduction, "is not left open past", self._order[position], held_bytes)
            self.closes.setdefault(self._order[best], []).append(reduction)
        self._hold(held_bytes, waited + 1, best if position < limit else limit)

    def _latest_wait(self, reduction: fx.Node) -> int:
        """Where its result is needed, or where too many would be open."""
        rank = self._movable.reductions.index(reduction) + self._wanted.in_flight
        closing = self._movable.reductions[rank : rank + 1]
        return min(self._position[node] for node in (*closing, *self._needed_by(reduction)))

    def _needed_by(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if user in self._movable.lazy:
                yield from self._needed_by(user)
            else:
                yield user

    def _hold(self, num_bytes: int, start: int, end: int) -> None:
        for position in range(start, end):
            self._live[position] += num_bytes

    def _decline(self, node: fx.Node, verb: str, where: fx.Node, held_bytes: int) -> None:
        self.declined.append(
            f"{node.name} ({short_name(node)}) {verb} {where.name}: it holds {held_bytes} bytes, which would "
            f"raise the peak above the {self._budget_bytes} bytes of the order without overlap"
        )
