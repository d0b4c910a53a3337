"""The events of a schedule: what the compute stream does when, and what each collective does.

The rules are the planner's (:class:`graphshard.planner.simulate.Machine`); this walks the same states
and writes down what happens between them, so that the events add up to the simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planner.problem import Problem
from ..planner.simulate import Machine, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One thing the compute stream does.

    Attributes:
        kind: "compute", "copy" or "wait".
        task: index of the task that computes; -1 for copies and waits.
        members: collectives that are packed, unpacked or waited for; empty for a task.
        start, seconds: when, and how long.
    """

    kind: str
    task: int
    members: tuple[int, ...]
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightEvent:
    """One collective, or bucket of them, from its start to its wait.

    Attributes:
        members: indices of its collectives.
        start, wait: gaps of the problem.
        num_bytes, seconds: what it moves, and how long that takes alone.
        issued, began, finished: when it entered its queue, moved, and ended.
        needed: when the compute stream waits for it.
        behind: members of the bucket in front of it in its queue; empty for the first.
    """

    members: tuple[int, ...]
    start: int
    wait: int
    num_bytes: int
    seconds: float
    issued: float
    began: float
    finished: float
    needed: float
    behind: tuple[int, ...]

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waits for it."""
        return max(0.0, self.finished - self.needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A start or a wait; ``busy_seconds`` is the stream's clock there without its waits before."""

    members: tuple[int, ...]
    is_start: bool
    busy_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """All events of a schedule.

    Attributes:
        stream: of compute, in order, without pauses between.
        flights: in the order of their starts.
        steps: starts and waits in order.
        seconds: when all is over.
    """

    stream: tuple[StreamEvent, ...]
    flights: tuple[FlightEvent, ...]
    steps: tuple[StepEvent, ...]
    seconds: float

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waits for collectives."""
        return sum(event.seconds for event in self.stream if event.kind == "wait")


def walk(problem: Problem, steps: Sequence[Step]) -> Walk:
    """Carries out a schedule that :func:`graphshard.planner.simulate.simulate` accepts."""
    machine = Machine(problem, budget_bytes=None)
    state = machine.begin()
    stream: list[StreamEvent] = []
    open_flights: dict[tuple[int, ...], dict] = {}
    flights: dict[tuple[int, ...], FlightEvent | None] = {}
    last_in_queue: dict[int, tuple[int, ...]] = {}
    taken: list[StepEvent] = []
    waited = 0.0

    def note(kind: str, start: float, end: float, task: int = -1, members: tuple[int, ...] = ()) -> None:
        if end > start:
            event = StreamEvent(kind=kind, task=task, members=members, start=start, seconds=end - start)
            stream.append(event)

    def run_to(position: int) -> None:
        nonlocal state
        while state.position < position:
            following = machine.run(state)
            assert following is not None, "the schedule was simulated"
            note("compute", state.seconds, following.seconds, task=state.position)
            state = following

    for step in steps:
        run_to(step.position)
        members = step.members
        if step.is_start:
            bucket = machine.bucket(members)
            following = machine.start(state, bucket)
            assert following is not None, "the schedule was simulated"
            note("copy", state.seconds, following.seconds, members=members)
            open_flights[members] = {
                "start": step.position,
                "num_bytes": bucket.num_bytes,
                "seconds": bucket.seconds,
                "issued": following.seconds,
                "began": max(following.seconds, state.free[bucket.queue]),
                "finished": following.flights[-1].finish,
                "behind": last_in_queue.get(bucket.queue, ()),
            }
            flights[members] = None  # keeps the order of starts
            last_in_queue[bucket.queue] = members
            clock = following.seconds
        else:
            flight = next(flight for flight in state.flights if flight.bucket.members == members)
            following = machine.wait(state, flight)
            assert following is not None, "the schedule was simulated"
            arrived = max(state.seconds, flight.finish)
            clock = state.seconds
            note("wait", state.seconds, arrived, members=members)
            note("copy", arrived, following.seconds, members=members)
            flights[members] = FlightEvent(
                members=members, wait=step.position, needed=state.seconds, **open_flights.pop(members)
            )
        taken.append(StepEvent(members=members, is_start=step.is_start, busy_seconds=clock - waited))
        if not step.is_start:
            waited += arrived - clock
        state = following
    run_to(machine.end)
    done = [flight for flight in flights.values() if flight is not None]
    assert len(done) == len(flights), "every start has a wait"
    return Walk(stream=tuple(stream), flights=tuple(done), steps=tuple(taken), seconds=state.seconds)
