"""Explains why compute waits for a collective, and how to change that.

The cause is what kept the collective from ending sooner in the schedule. The remedy follows from the cause and the
numbers of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..planner.search import BucketRun, Collective, Problem
from ..units import size_text, time_text
from .events import Walk

#: Causes that keep a collective from ending sooner.
CAUSES = (
    "closed early",  # it is waited for before its result is read
    "spread",  # it ends in time on average, but times of collectives vary on this machine
    "queue",  # its group is busy with another collective
    "first",  # it is at the beginning, where no compute could hide it
    "data",  # its input is made too late
    "order",  # it reads the result of another collective
    "schedule",  # the schedule starts it later than it could
)


#: What placed the collectives: the fixed rule of the passes, the planner, or the author of the graph.
SCHEDULES = ("passes", "plan", "graph")

_CLOSED_EARLY = {
    "passes": "the schedule keeps few collectives open at a time, to save memory",
    "plan": "what it holds until then does not fit, or costs more elsewhere",
    "graph": "the graph has it so",
}
_STARTED_LATE = {
    "passes": "the schedule starts each gather one ahead of its use",
    "graph": "the graph has it so",
}
_MORE_OVERLAP = {
    "passes": 'plan="auto", which places and merges collectives by cost',
    "plan": "a larger memory_budget",
    "graph": "graphshard.schedule_graph, which places and merges collectives by cost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a collective is exposed; ``cause`` is one of :data:`CAUSES`."""

    cause: str
    reason: str
    remedy: str


class Explainer:
    """Explains the exposed collectives of one schedule.

    Args:
        problem: the planning problem of the graph.
        found: the events of its schedule.
        made_by: what placed the collectives: one of :data:`SCHEDULES`.
        declined: why a collective is not overlapped more, by its name.
        unit_of: the unit of a collective, by its name.
        label_of: the label of a process group, by its name.
        where: a position of the schedule in words.
        values: names of the collectives that move values between placements.
    """

    def __init__(
        self,
        problem: Problem,
        found: Walk,
        *,
        made_by: str,
        declined: dict[str, str],
        unit_of: dict[str, str],
        label_of: Callable[[str], str],
        where: Callable[[int], str],
        values: frozenset[str] = frozenset(),
    ) -> None:
        self._problem, self._made_by, self._values = problem, made_by, values
        self._declined, self._unit_of, self._label_of, self._where = declined, unit_of, label_of, where
        self._compute = sum(event.seconds for event in found.stream if event.kind != "wait")
        self._busy: dict[str, float] = {}
        for flight in found.flights:
            queue = self._one(flight).queue
            self._busy[queue] = self._busy.get(queue, 0.0) + flight.seconds

    def explain(self, flight: BucketRun) -> Explanation:
        """Explains an exposed collective."""
        ones = [self._problem.collectives[index] for index in flight.members]
        earliest, deadline = max(one.earliest for one in ones), min(one.deadline for one in ones)
        name = ones[0].name
        if flight.wait < deadline:
            return self._closed_early(flight, deadline, name)
        if flight.finished <= flight.needed:
            return self._spread(flight)
        if flight.behind and flight.began > flight.issued:
            return self._queued(flight)
        if flight.start == 0:
            return self._first(flight, ones)
        if flight.start == earliest:
            return self._late_data(flight, ones)
        if any(one.after for one in ones):
            return Explanation(
                cause="order",
                reason="it reads the result of another collective, and can start only when that one has ended",
                remedy=self._less_to_send(flight),
            )
        return self._scheduled(flight, earliest, name)

    def _one(self, flight: BucketRun) -> Collective:
        return self._problem.collectives[flight.members[0]]

    def _closed_early(self, flight: BucketRun, deadline: int, name: str) -> Explanation:
        why = self._declined.get(name, _CLOSED_EARLY[self._made_by])
        return Explanation(
            cause="closed early",
            reason=f"it is waited for {self._where(flight.wait)}, but its result is first read "
            f"{self._where(deadline)}: {why}",
            remedy=self._more_overlap(),
        )

    def _spread(self, flight: BucketRun) -> Explanation:
        return Explanation(
            cause="spread",
            reason=f"on average it ends {time_text(flight.needed - flight.finished)} before its result is needed, but "
            "the times of collectives vary on this machine (collective_spread_seconds of the card), and a late one is "
            "waited for",
            remedy=self._more_room(flight),
        )

    def _queued(self, flight: BucketRun) -> Explanation:
        front = self._problem.collectives[flight.behind[0]]
        unit = self._unit_of.get(front.name, "")
        what = f"the {front.kind} of unit {unit!r}" if unit else front.name
        queue = self._one(flight).queue
        lost = flight.began - flight.issued
        reason = f"it waits {time_text(lost)} in the queue of {self._label_of(queue)}, behind {what}"
        busy = self._busy[queue]
        if busy >= 0.9 * self._compute:
            return Explanation(
                cause="queue",
                reason=f"{reason}; the group is busy for {time_text(busy)}, and compute takes "
                f"{time_text(self._compute)}",
                remedy="there is about as much to send as to compute: more tokens per rank, fewer ranks on "
                "the shard axis with copies on a replicate axis, smaller dtypes, or faster links",
            )
        return Explanation(cause="queue", reason=reason, remedy=self._spread_out())

    def _first(self, flight: BucketRun, ones: Sequence[Collective]) -> Explanation:
        unit = self._unit_of.get(ones[0].name, "")
        of = f" of unit {unit!r}" if unit else ""
        return Explanation(
            cause="first",
            reason="it is at the beginning, where no compute runs yet that could hide it",
            remedy=f"make it smaller: {size_text(flight.num_bytes)}{of} come in one piece; put the modules that "
            "are used later into units of their own",
        )

    def _late_data(self, flight: BucketRun, ones: Sequence[Collective]) -> Explanation:
        hidden = flight.needed - flight.issued
        unit = self._unit_of.get(ones[0].name, "")
        follows = f"only {time_text(hidden)} of compute follow" if hidden > 0 else "no compute follows"
        reason = (
            f"it starts as soon as its input exists, and {follows} until its result is needed, for "
            f"{time_text(flight.seconds)} of communication"
        )
        if ones[0].limit == "reduction" and flight.wait >= len(self._problem.tasks):
            part = f"unit {unit!r}" if unit else "the last unit"
            remedy = (
                f"make {part} smaller (smaller units inside it), so that less is left to reduce at the end"
            )
        else:
            remedy = self._less_to_send(flight)
        return Explanation(cause="data", reason=reason, remedy=remedy)

    def _scheduled(self, flight: BucketRun, earliest: int, name: str) -> Explanation:
        where = self._where(flight.start)
        if self._made_by == "plan":
            budget = self._problem.budget_bytes
            why = "another order or bucket costs more elsewhere"
            if budget is not None:
                why += f", or does not fit the budget of {size_text(budget)}"
            return Explanation(
                cause="schedule", reason=f"it starts {where}: {why}", remedy=self._more_room(flight)
            )
        why = self._declined.get(name, _STARTED_LATE[self._made_by])
        first = "at the beginning" if earliest == 0 else self._where(earliest)
        return Explanation(
            cause="schedule",
            reason=f"it could start {first}, but starts {where}: {why}",
            remedy=self._more_overlap(),
        )

    def _more_overlap(self) -> str:
        return _MORE_OVERLAP[self._made_by]

    def _more_room(self, flight: BucketRun) -> str:
        """How to get more compute between start and wait; a plan without a budget has used all there is."""
        is_free = self._made_by == "plan" and self._problem.budget_bytes is None
        return self._less_to_send(flight) if is_free else self._more_overlap()

    def _spread_out(self) -> str:
        equal = "units of more equal size, so that each collective has compute of its own to hide behind"
        return equal if self._made_by == "plan" else f"{_MORE_OVERLAP[self._made_by]}, or {equal}"

    def _less_to_send(self, flight: BucketRun) -> str:
        if self._one(flight).name in self._values:
            return (
                f"less to send at this point ({size_text(flight.num_bytes)}): placements that move less, fewer ranks "
                f"on {self._label_of(self._one(flight).queue)}, or smaller dtypes"
            )
        return (
            f"less to send at this point ({size_text(flight.num_bytes)}): smaller dtypes, smaller units, or "
            "more tokens per rank"
        )
