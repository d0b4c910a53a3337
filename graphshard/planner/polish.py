"""A schedule made better by small changes, each of which is simulated: local search behind the beams.

Bucket by bucket, in the order of their starts: a start or a wait moves a few gaps, or past another step of its gap; two
buckets become one; one member goes over to the bucket next to its own; a bucket falls in two. What makes the
schedule faster, or as fast with a lower peak, stays. The search ends when no change of any bucket helps, or when it
has simulated enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .problem import Problem
from .simulate import Machine, PlanError, Step, simulate

#: How many gaps a step moves at most at a time.
_REACH = 4

#: Steps and tasks that all simulations together go through; a third of a second.
_MOST_WORK = 200_000

Schedule = list[Step]


def polished(problem: Problem, steps: Sequence[Step]) -> Schedule:
    """A schedule that keeps what ``steps`` keep (the budget, what the user insists on), and is no slower."""
    machine = Machine(problem, budget_bytes=None)
    best = list(steps)
    cost = _cost(problem, best, machine)
    if cost is None:
        return best
    work = _MOST_WORK
    is_better = True
    while is_better:
        is_better = False
        for bucket in [step.members for step in best if step.is_start]:
            for changed in _changes(problem, best, bucket):
                work -= len(changed) + len(problem.tasks)
                if work < 0:
                    return best
                found = _cost(problem, changed, machine)
                if found is not None and found < cost:
                    best, cost, is_better = changed, found, True
                    break
    return best


def _cost(problem: Problem, steps: Schedule, machine: Machine) -> tuple[float, int] | None:
    try:
        simulation = simulate(problem, steps, machine=machine)
    except PlanError:
        return None
    if problem.budget_bytes is not None and simulation.peak_bytes > problem.budget_bytes:
        return None
    return float(f"{simulation.seconds:.7g}"), simulation.peak_bytes


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
    """The parts where the bucket stood, one after the other; each waited for at its reader; each started when ready."""
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
    """The bucket that starts next of those that this one may be merged with."""
    key = problem.collectives[bucket[0]].merge_key
    alike = [
        step.members
        for step in steps
        if step.is_start and problem.collectives[step.members[0]].merge_key == key
    ]
    following = alike[alike.index(bucket) + 1 :]
    return following[0] if following and key is not None else None


def _merged(steps: Schedule, one: tuple[int, ...], other: tuple[int, ...]) -> Iterator[Schedule]:
    """Both as one bucket that starts where either does, and is waited for where either is."""
    both = tuple(sorted(one + other))
    for started in (one, other):
        for waited in (one, other):
            dropped = {(step.members, step.is_start) for step in steps if step.members in (one, other)}
            dropped -= {(started, True), (waited, False)}
            kept = [step for step in steps if (step.members, step.is_start) not in dropped]
            yield _renamed(kept, {one: both, other: both})


def _renamed(steps: Schedule, names: dict[tuple[int, ...], tuple[int, ...]]) -> Schedule:
    return [Step(step.position, step.is_start, names.get(step.members, step.members)) for step in steps]
