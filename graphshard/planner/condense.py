"""The same problem with fewer tasks: those between which nothing needs to happen become one.

A gap matters where a collective's input appears or its result is read. Between such gaps tasks are
joined, up to a share of the whole time, so that collectives may also start within a long stretch. A
joined task counts the most that is live in any of its tasks, so a schedule that keeps a budget here
keeps it in the original problem, and takes the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from .problem import Problem, Task
from .simulate import Step

#: Into how many pieces the whole time is cut, at least, where there are that many tasks.
PIECES = 400


def condense(problem: Problem) -> tuple[Problem, list[int]]:
    """The smaller problem, and the original gap of each of its gaps."""
    matter = {0, len(problem.tasks)}
    for one in problem.collectives:
        matter.update((one.earliest, one.deadline))
    longest = sum(task.seconds for task in problem.tasks) / PIECES
    gaps, seconds = [], 0.0
    for position, task in enumerate(problem.tasks):
        if position in matter or seconds + task.seconds > longest:
            gaps.append(position)
            seconds = 0.0
        seconds += task.seconds
    gaps.append(len(problem.tasks))
    place = {gap: index for index, gap in enumerate(gaps)}
    tasks = []
    for start, end in itertools.pairwise(gaps):
        joined = problem.tasks[start:end]
        tasks.append(
            Task(
                seconds=sum(task.seconds for task in joined),
                live_bytes=max(task.live_bytes for task in joined),
                before_bytes=joined[0].before_bytes,
            )
        )
    collectives = [
        replace(one, earliest=place[one.earliest], deadline=place[one.deadline])
        for one in problem.collectives
    ]
    return replace(problem, tasks=tasks, collectives=collectives, position_names=()), gaps


def expand(steps: Sequence[Step], gaps: Sequence[int]) -> list[Step]:
    """The steps of a condensed problem, in the gaps of the original."""
    return [step._replace(position=gaps[step.position]) for step in steps]
