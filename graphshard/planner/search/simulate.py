"""What a schedule costs: the definition of time and memory that everything else uses.

:mod:`.machine` has the rules and the cost of a step. Here a whole schedule runs through that machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import PlanError
from .machine import Machine, State, Step
from .problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRun:
    """One bucket of a simulated schedule; times are in seconds from the beginning.

    Attributes:
        members: indices of its collectives.
        start, wait: gaps.
        num_bytes, seconds: the bytes it moves, and how long that takes alone.
        issued, began, finished: when it entered its queue, began and ended. It may begin before the one in front has
            ended.
        needed: when the compute stream waits for it.
        resumed: when the compute stream is expected to go on.
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
    resumed: float
    behind: tuple[int, ...]

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waits for it."""
        return self.resumed - self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        seconds: when the last task and the last wait are over.
        runs: the buckets in the order of their starts.
        task_seconds: when each task starts.
        peak_bytes: the most that is live, in tasks and in steps.
        live_bytes: what is live in each task.
        end: the last state; it leads back to all states before.
    """

    seconds: float
    runs: tuple[BucketRun, ...]
    task_seconds: tuple[float, ...]
    peak_bytes: int
    live_bytes: tuple[int, ...]
    end: State

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waited for collectives."""
        return sum(run.exposed_seconds for run in self.runs)


def simulate(problem: Problem, steps: Sequence[Step], *, machine: Machine | None = None) -> Simulation:
    """Runs a schedule without a budget.

    Args:
        problem: what is planned.
        steps: in their order.
        machine: a machine of this problem without a budget, if there is one already: it caches buckets.

    Raises:
        PlanError: a step breaks a rule of :mod:`.machine`; names the collectives and the rule.
    """
    machine = machine or Machine(problem, budget_bytes=None)
    state = machine.begin()
    runs: dict[tuple[int, ...], dict] = {}
    last_in_queue: dict[int, tuple[int, ...]] = {}
    task_seconds, live = [], []

    def advance(position: int) -> None:
        nonlocal state
        while state.position < position:
            task_seconds.append(state.seconds)
            live.append(machine.live[state.position] + state.held_bytes - machine.released[state.position])
            following = machine.run(state)
            if following is None:
                raise PlanError(f"{problem.where(state.position)}: {_why_not_run(machine, state)}")
            state = following

    for step in steps:
        if step.position < state.position:
            raise PlanError(f"{_names(problem, step.members)}: its step comes after a later one (rule 1)")
        advance(step.position)
        if step.is_start:
            bucket = machine.bucket(step.members)
            following = machine.start(state, bucket)
            if following is None:
                why = machine.why_not_start(state, bucket)
                raise PlanError(f"{_names(problem, step.members)} cannot start: {why}")
            flight = following.flights[-1]
            runs[step.members] = {
                "start": step.position,
                "issued": following.seconds,
                "began": machine.begins(bucket, following.seconds, state),
                "finished": flight.finish,
                "behind": last_in_queue.get(bucket.queue, ()),
                "num_bytes": bucket.num_bytes,
                "seconds": bucket.seconds,
            }
            last_in_queue[bucket.queue] = step.members
        else:
            flights = [flight for flight in state.flights if flight.bucket.members == step.members]
            if not flights:
                raise PlanError(f"{_names(problem, step.members)} is waited for but not in flight (rule 2)")
            runs[step.members]["wait"] = step.position
            runs[step.members]["needed"] = state.seconds
            runs[step.members]["resumed"] = machine.resumes(state, flights[0])
            following = machine.wait(state, flights[0])
            assert following is not None, "there is no budget"
        state = following
    advance(machine.end)
    if not machine.is_done(state):
        missing = [i for i in range(len(problem.collectives)) if not state.waited >> i & 1]
        raise PlanError(f"{_names(problem, missing)} is never waited for (rule 2)")
    return Simulation(
        seconds=state.seconds,
        runs=tuple(BucketRun(members=members, **values) for members, values in runs.items()),
        task_seconds=tuple(task_seconds),
        peak_bytes=state.peak_bytes,
        live_bytes=tuple(live),
        end=state,
    )


def cost_of(problem: Problem, steps: Sequence[Step], machine: Machine) -> tuple[float, int]:
    """Seconds, rounded to what a sum of them is sure of, and bytes at the peak: schedules compare by it."""
    simulation = simulate(problem, steps, machine=machine)
    return float(f"{simulation.seconds:.9g}"), simulation.peak_bytes


def _why_not_run(machine: Machine, state: State) -> str:
    due = machine.must_wait(state)
    if due:
        names = [index for index in range(due.bit_length()) if due >> index & 1]
        return f"{_names(machine.problem, names)} is read but not waited for (rule 8)"
    return "a prefetch that the user asked for has not started (rule 7)"


def _names(problem: Problem, members: Sequence[int]) -> str:
    return ", ".join(problem.collectives[index].name for index in members)
