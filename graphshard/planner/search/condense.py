"""Smaller problems that stand for a large one.

``condense`` joins tasks between which nothing needs to happen. A gap is kept if the input of a collective appears
there or its result is read there. Tasks between such gaps are joined up to a share of the whole time, so that
collectives may still start within a long stretch. A joined task counts the most that is live in any of its tasks. So
a schedule that keeps a budget here keeps it in the original problem, and takes the same time.

``both_ends`` leaves out the middle. Models repeat their blocks, so a search that does well on the ends does well on
the whole. Its schedules have no further use.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from .machine import Step
from .problem import Collective, Problem, Task

#: The least number of pieces into which the whole time is cut, if there are as many tasks.
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
    """The steps of a condensed problem in the gaps of the original."""
    return [step._replace(position=gaps[step.position]) for step in steps]


def both_ends(problem: Problem, most: int) -> Problem:
    """The first and the last tasks, with about ``most`` of the collectives between them.

    A collective is kept if its input appears, and its result is read, in the tasks that are kept, and if all that it
    comes after is kept. Inputs of the graph appear at its beginning, and its results are read at its end.
    """
    end = len(problem.tasks)
    half = max(1, int(end * most / max(1, 2 * len(problem.collectives))))
    if 2 * half >= end:
        return problem

    def place(gap: int) -> int | None:
        return gap if gap <= half else gap - (end - 2 * half) if gap >= end - half else None

    index: dict[int, int] = {}
    kept: list[Collective] = []
    for number, one in enumerate(problem.collectives):
        earliest, deadline = place(one.earliest), place(one.deadline)
        if earliest is None or deadline is None or any(other not in index for other in one.after):
            continue
        index[number] = len(kept)
        after = tuple(index[other] for other in one.after)
        kept.append(replace(one, earliest=earliest, deadline=deadline, after=after))
    buckets = [
        tuple(index[number] for number in bucket if number in index) for bucket in problem.fixed_buckets
    ]
    return replace(
        problem,
        tasks=[*problem.tasks[:half], *problem.tasks[end - half :]],
        collectives=kept,
        fixed_buckets=[bucket for bucket in buckets if bucket],
        prefetch=[
            (index[first], index[then])
            for first, then in problem.prefetch
            if first in index and then in index
        ],
        position_names=(),
    )
