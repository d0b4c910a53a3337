"""How much overlap of the rule-based schedule fits in a memory budget: a greedy choice, collective by collective.

The sequence of starts is that of the order with all overlap. It does not depend on sizes of activations, so it is
equal on ranks whose batches differ. Only the places of starts and waits among compute are chosen here. In the first
order each start is as late, and each wait as early, as the sequence allows. A move away from it adds the bytes that
the collective holds to the nodes it moves past, so the live bytes of one order are enough to judge every move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from ..ir import UNPACK, fusion_runs, is_collective, is_view, is_wait, short_name, tensor_bytes
from ..memory import UNMEASURED, KernelScratch, MemoryModel, kept_inputs
from ..units import size_text
from .rule_order import Decisions, Movable, Placement


def fit(
    gm: fx.GraphModule,
    movable: Movable,
    wanted: Decisions,
    *,
    budget_bytes: int | None = None,
    device_type: str | None = None,
    scratch: KernelScratch = UNMEASURED,
) -> tuple[Decisions, list[str]]:
    """The part of the ``wanted`` overlap that fits in a budget.

    Args:
        gm: a forward, inference or backward graph.
        movable: its collectives.
        wanted: ``prefetch`` and ``in_flight`` of the order with all overlap.
        budget_bytes: the allowed peak of the graph, without the inputs that the caller keeps; None for the peak of
            the order without any overlap.
        device_type: where the graph will run; None for where its values are.
        scratch: what kernels allocate there for themselves.

    Returns:
        Decisions, and one sentence for each collective that overlaps less than wanted.
    """
    model = MemoryModel(gm, kept=kept_inputs(gm), device_type=device_type, scratch=scratch)
    if budget_bytes is None:
        budget_bytes = model.timeline(Placement(movable, Decisions()).order()).peak_bytes
    sequence = [node for node in Placement(movable, wanted).order() if is_collective(node)]
    latest = Placement(movable, Decisions(sequence=sequence)).order()
    fitting = _Fitting(movable, model, wanted, latest, budget_bytes)
    if (excess := model.timeline(latest).peak_bytes - budget_bytes) > 0:
        fitting.declined.append(
            f"the sequence of starts that overlaps exceeds {size_text(budget_bytes)} by {size_text(excess)} at least"
        )
    for collective in sequence:
        fitting.floor = max(fitting.floor, fitting.place(collective))
    decisions = Decisions(
        in_flight=wanted.in_flight, sequence=sequence, starts=fitting.starts, closes=fitting.closes
    )
    return decisions, fitting.declined


class _Fitting:
    """The bytes live at each node of one order, and the moves that still fit in a budget."""

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
            node.op != "placeholder"
            and node not in movable.lazy
            and not is_view(node)
            and first[index] == index
            for index, node in enumerate(order)
        ]
        #: The position before which no later start of the sequence may stand.
        self.floor = 0
        self.starts: dict[fx.Node, list[fx.Node]] = {}
        self.closes: dict[fx.Node, list[fx.Node]] = {}
        self.declined: list[str] = []

    def place(self, collective: fx.Node) -> int:
        """Decides for one collective; returns the position at which it starts."""
        if collective in self._movable.gathers:
            return self._start_early(collective)
        if collective in self._movable.reductions:  # an all-reduce stays where the sequence has it
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
        """The nodes that make the input of a gather and move with it."""
        for source in node.all_input_nodes:
            if source in self._movable.lazy:
                yield source
                yield from self._packing(source)

    def _earliest(self, gather: fx.Node) -> int:
        """Right after the copies out of the gather ``prefetch`` places earlier, or the top of the graph."""
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
        elif self._order[limit] in self._movable.reductions:
            best = limit  # said here, since a later one may be closed before it
        else:
            self._hold(held_bytes, waited + 1, limit)
            return
        self.closes.setdefault(self._order[best], []).append(reduction)
        self._hold(held_bytes, waited + 1, best)

    def _latest_wait(self, reduction: fx.Node) -> int:
        """The position where its result is needed, or where too many reductions would be open."""
        rank = self._movable.reductions.index(reduction) + self._wanted.in_flight
        closing = self._movable.reductions[rank : rank + 1]
        return min(self._position[node] for node in (*closing, *self._needed_by(reduction)))

    def _needed_by(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if user in self._movable.lazy and user not in self._movable.all_reduces:
                yield from self._needed_by(user)
            else:
                yield user

    def _hold(self, num_bytes: int, start: int, end: int) -> None:
        for position in range(start, end):
            self._live[position] += num_bytes

    def _decline(self, node: fx.Node, verb: str, where: fx.Node, held_bytes: int) -> None:
        self.declined.append(
            f"{node.name} ({short_name(node)}) {verb} {where.name}: it holds {size_text(held_bytes)}, which would "
            f"raise the peak above {size_text(self._budget_bytes)}"
        )
