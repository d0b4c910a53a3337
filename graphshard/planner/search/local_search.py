"""Improves a schedule by small changes, each of which is simulated: local search after the beams.

It goes bucket by bucket, in the order of their starts, and tries these changes: move a start or a wait by a few
gaps, or past another step of its gap; merge two buckets; move a member to the neighbouring bucket; split a bucket in
two. It keeps a change that makes the schedule faster, or as fast with a lower peak. It ends when no change of any
bucket helps, or when the work limit is reached.

A changed schedule is simulated from its first changed step on. The simulation stops where the state is no better in
anything than that of the schedule before, ahead of the same steps: a later clock never makes a later step sooner.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from ...progress import TimeLimit
from .machine import Machine, State, Step
from .problem import Problem

#: The most gaps by which a step moves at a time.
_REACH = 4

#: The work limit: steps and tasks of all schedules that are simulated.
_MOST_WORK = 200_000

Schedule = list[Step]


def polished(problem: Problem, steps: Sequence[Step], limit: TimeLimit | None = None) -> Schedule:
    """An improved schedule, no slower than ``steps``. It keeps what they keep: budget, user's constraints."""
    best = list(steps)
    run = _Run.of(Machine(problem, budget_bytes=problem.budget_bytes), best)
    if run is None:
        return best
    work = _MOST_WORK
    is_better = True
    while is_better:
        is_better = False
        for bucket in [step.members for step in best if step.is_start]:
            for changed in _changes(problem, best, bucket):
                work -= len(changed) + len(problem.tasks)
                if work < 0 or (limit is not None and limit.is_over()):
                    return best
                better = run.improved(changed)
                if better is not None:
                    best, run, is_better = changed, better, True
                    break
    return best


class _Run:
    """A schedule that keeps the budget, with its states."""

    def __init__(self, machine: Machine, steps: Schedule, states: list[State], behind: list[State]) -> None:
        self._machine, self._steps = machine, steps
        #: States in front of each step, the tasks before it done, and at the end; and states after each step, and at
        #: first.
        self._states, self._behind = states, behind

    @staticmethod
    def of(machine: Machine, steps: Schedule) -> _Run | None:
        """The run of a schedule; None if it is not possible."""
        begun = machine.begin()
        if machine.budget_bytes is not None and begun.peak_bytes > machine.budget_bytes:
            return None
        return _Run(machine, [], [], [begun])._continued(steps, 0, None)

    def improved(self, steps: Schedule) -> _Run | None:
        """The run of ``steps`` if it is faster, or as fast with a lower peak; else None."""
        first = next(
            (
                place
                for place, (one, other) in enumerate(zip(steps, self._steps, strict=False))
                if one != other
            ),
            min(len(steps), len(self._steps)),
        )
        found = self._continued(steps, first, self)
        return found if found is not None and found._cost < self._cost else None

    @property
    def _cost(self) -> tuple[float, int]:
        end = self._states[-1]
        return float(f"{end.seconds:.7g}"), end.peak_bytes

    def _continued(self, steps: Schedule, first: int, other: _Run | None) -> _Run | None:
        """The run of ``steps``, equal to this one's up to ``first``; None if it is impossible or ends no better."""
        machine = self._machine
        states, behind = self._states[:first], self._behind[: first + 1]
        state: State | None = behind[-1]
        alike = _equal_end(steps, other._steps, first) if other is not None else 0
        for place in range(first, len(steps) + 1):
            is_end = place == len(steps)
            state = _run_to(machine, behind[-1], machine.end if is_end else steps[place].position)
            if state is None or (
                other is not None
                and len(steps) - place <= alike
                and _is_no_better(state, other._states[len(other._steps) - len(steps) + place])
            ):
                return None
            states.append(state)
            if is_end:
                return _Run(machine, steps, states, behind) if machine.is_done(state) else None
            following = _taken(machine, state, steps[place])
            if following is None:
                return None
            behind.append(following)
        return None


def _equal_end(steps: Schedule, others: Schedule, first: int) -> int:
    """The number of equal steps at the end of two schedules, not counting the ``first`` ones."""
    most = min(len(steps), len(others)) - first
    count = 0
    while count < most and steps[-1 - count] == others[-1 - count]:
        count += 1
    return count


def _run_to(machine: Machine, state: State, position: int) -> State | None:
    """The state after the tasks in front of a gap; None if one cannot run, or the gap has passed."""
    if position < state.position:
        return None
    while state.position < position:
        following = machine.run(state)
        if following is None:
            return None
        state = following
    return state


def _taken(machine: Machine, state: State, step: Step) -> State | None:
    """The state after a step; None if the step is impossible."""
    if step.is_start:
        return machine.start(state, machine.bucket(step.members))
    for flight in state.flights:
        if flight.bucket.members == step.members:
            return machine.wait(state, flight)
    return None


def _is_no_better(state: State, other: State) -> bool:
    """Whether a state can end neither sooner nor with a lower peak than another that has done the same."""
    if (
        state.seconds < other.seconds
        or state.peak_bytes < other.peak_bytes
        or state.held_bytes < other.held_bytes
        or state.started != other.started
        or state.waited != other.waited
        or state.linked != other.linked
        or any(map(operator.lt, state.free, other.free))
        or any(map(operator.lt, state.opens, other.opens))
    ):
        return False
    flying = {flight.bucket.members: flight for flight in other.flights}
    for flight in state.flights:
        twin = flying.get(flight.bucket.members)
        if twin is None or flight.finish < twin.finish or flight.held_bytes != twin.held_bytes:
            return False
    return True


def _changes(problem: Problem, steps: Schedule, bucket: tuple[int, ...]) -> Iterator[Schedule]:
    """Schedules in which one thing about a bucket is different; not all are possible."""
    if not any(step.members == bucket for step in steps):
        return  # it was merged, or has fallen in two
    yield from _moved(problem, steps, bucket)
    neighbour = _next_like(problem, steps, bucket)
    if neighbour is not None:
        yield from _merged(steps, bucket, neighbour)
        for giving, taking in ((bucket, neighbour), (neighbour, bucket)):
            for member in dict.fromkeys((giving[0], giving[-1])) if len(giving) > 1 else ():
                rest = tuple(each for each in giving if each != member)
                yield _renamed(steps, {giving: rest, taking: tuple(sorted((*taking, member)))})
    for cut in range(1, len(bucket)):
        yield from _cut(problem, steps, bucket, (bucket[:cut], bucket[cut:]))
        yield from _cut(problem, steps, bucket, (bucket[cut:], bucket[:cut]))


def _cut(
    problem: Problem, steps: Schedule, bucket: tuple[int, ...], parts: tuple[tuple[int, ...], ...]
) -> Iterator[Schedule]:
    """Three ways to place the two parts of a bucket.

    One right after the other where the bucket stood; each waited for at its reader; each started when it is ready.
    """
    ones = problem.collectives
    read = {part: min(ones[index].deadline for index in part) for part in parts}
    ready = {part: max(ones[index].earliest for index in part) for part in parts}
    nowhere: dict[tuple[int, ...], int] = {}
    for starts, waits in ((nowhere, nowhere), (nowhere, read), (ready, nowhere)):
        changed = [
            Step((starts if step.is_start else waits).get(part, step.position), step.is_start, part)
            for step in steps
            for part in (parts if step.members == bucket else (step.members,))
        ]
        yield sorted(changed, key=lambda step: step.position)


def _moved(problem: Problem, steps: Schedule, bucket: tuple[int, ...]) -> Iterator[Schedule]:
    ones = [problem.collectives[index] for index in bucket]
    earliest, deadline = max(one.earliest for one in ones), min(one.deadline for one in ones)
    for index, step in enumerate(steps):
        if step.members != bucket:
            continue
        rest = steps[:index] + steps[index + 1 :]
        nearest = max(earliest, step.position - _REACH)
        for position in range(nearest, min(deadline, step.position + _REACH) + 1):
            moved = Step(position, step.is_start, bucket)
            for place in range(len(rest) + 1):
                before = rest[place - 1].position if place else 0
                after = rest[place].position if place < len(rest) else len(problem.tasks)
                if before <= position <= after and (place, position) != (index, step.position):
                    yield [*rest[:place], moved, *rest[place:]]


def _next_like(problem: Problem, steps: Schedule, bucket: tuple[int, ...]) -> tuple[int, ...] | None:
    """The bucket that starts next among those that this one may be merged with."""
    key = problem.collectives[bucket[0]].merge_key
    alike = [
        step.members
        for step in steps
        if step.is_start and problem.collectives[step.members[0]].merge_key == key
    ]
    following = alike[alike.index(bucket) + 1 :]
    return following[0] if following and key is not None else None


def _merged(steps: Schedule, one: tuple[int, ...], other: tuple[int, ...]) -> Iterator[Schedule]:
    """Both as one bucket, which starts where either did, and is waited for where either was."""
    both = tuple(sorted(one + other))
    for started in (one, other):
        for waited in (one, other):
            dropped = {(step.members, step.is_start) for step in steps if step.members in (one, other)}
            dropped -= {(started, True), (waited, False)}
            kept = [step for step in steps if (step.members, step.is_start) not in dropped]
            yield _renamed(kept, {one: both, other: both})


def _renamed(steps: Schedule, names: dict[tuple[int, ...], tuple[int, ...]]) -> Schedule:
    return [Step(step.position, step.is_start, names.get(step.members, step.members)) for step in steps]
