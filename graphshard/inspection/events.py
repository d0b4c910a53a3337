"""The events of a schedule: those of the compute stream, and those of each collective.

They come from the states of the planner's simulation, so they add up to the simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..planner.search import BucketRun, Problem, Step, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One event of the compute stream.

    Attributes:
        kind: "compute", "copy" or "wait".
        task: index of the task that computes; -1 for copies and waits.
        members: collectives that are packed, unpacked or waited for; empty for a task.
        start, seconds: its start and its duration.
    """

    kind: str
    task: int
    members: tuple[int, ...]
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A start or a wait; ``busy_seconds`` is the time of the stream until then, without waits."""

    members: tuple[int, ...]
    is_start: bool
    busy_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """All events of a schedule.

    Attributes:
        stream: events of the compute stream, in order, without gaps.
        flights: collectives, in the order of their starts.
        steps: starts and waits, in order.
        seconds: the end of the schedule.
    """

    stream: tuple[StreamEvent, ...]
    flights: tuple[BucketRun, ...]
    steps: tuple[StepEvent, ...]
    seconds: float

    @property
    def exposed_seconds(self) -> float:
        """The time that the compute stream waits for collectives."""
        return sum(event.seconds for event in self.stream if event.kind == "wait")


def walk(problem: Problem, steps: Sequence[Step]) -> Walk:
    """Simulates a schedule; errors are those of :func:`graphshard.planner.search.simulate.simulate`."""
    simulation = simulate(problem, steps)
    resumed = {run.members: run.resumed for run in simulation.runs}
    stream: list[StreamEvent] = []
    taken: list[StepEvent] = []
    waited = busy = 0.0

    def note(kind: str, start: float, end: float, task: int = -1, members: tuple[int, ...] = ()) -> None:
        if end > start:
            event = StreamEvent(kind=kind, task=task, members=members, start=start, seconds=end - start)
            stream.append(event)

    for before, after in pairwise(simulation.end.path()):
        step = after.step
        if step is None:
            note("compute", before.seconds, after.seconds, task=before.position)
            continue
        arrived = before.seconds if step.is_start else resumed[step.members]
        note("wait", before.seconds, arrived, members=step.members)
        note("copy", arrived, after.seconds, members=step.members)
        clock = after.seconds if step.is_start else before.seconds
        busy = max(busy, clock - waited)  # the difference may fall by a rounding
        taken.append(StepEvent(members=step.members, is_start=step.is_start, busy_seconds=busy))
        waited += arrived - before.seconds
    return Walk(stream=tuple(stream), flights=simulation.runs, steps=tuple(taken), seconds=simulation.seconds)
