"""Follows a plan that another rank made of the same graph.

Buckets and their order must be equal on all ranks, and are taken as they are. Their places among compute may differ:
a rank with another batch may have a few more nodes, or less memory to spare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import PlanError
from ..pipeline import KnownPlan
from .search import Problem, Step, simulate


def ways_to_follow(problem: Problem, known: KnownPlan) -> Iterator[list[Step]]:
    """Schedules with the buckets and the sequence of ``known``, the closest to it first.

    The last one holds the least memory: starts as late, and waits as early, as the sequence allows. Prefetches that the
    user named stay right behind the wait they name where this graph has a gap for both; the sequence keeps them near.

    Raises:
        PlanError: ``known`` has other collectives than ``problem``, or an order that is impossible here.
    """
    steps = [Step(*step) for step in known.steps]
    members = sorted(index for step in steps if step.is_start for index in step.members)
    if members != list(range(len(problem.collectives))):
        raise PlanError(
            f"the plan to follow is one of {len(members)} collectives, but there are {len(problem.collectives)}; "
            "compile the same graph with the same options on every rank"
        )
    runs = list(_tied(problem, steps))
    problem = replace(problem, prefetch=())
    if known.num_tasks == len(problem.tasks):
        yield steps
    scale = len(problem.tasks) / max(1, known.num_tasks)
    wanted = [round(step.position * scale) for step in steps]
    yield _placed(problem, steps, runs, wanted)
    leanest = [problem.num_positions if step.is_start else 0 for step in steps]
    yield _placed(problem, steps, runs, leanest)


def _tied(problem: Problem, steps: list[Step]) -> Iterator[range]:
    """The steps, by their places, that stand in one gap: from a wait to what the user has start right after it."""
    place = {(step.is_start, index): number for number, step in enumerate(steps) for index in step.members}
    pairs = sorted((place[False, first], place[True, then]) for first, then in problem.prefetch)
    begin = end = -1
    for first, last in pairs:
        if first > end:
            yield range(begin, end + 1)
            begin = first
        end = max(end, last)
    yield range(begin, end + 1)


def _placed(problem: Problem, steps: list[Step], runs: list[range], wanted: list[int]) -> list[Step]:
    """The steps in their order, each as near to its wanted position as the others allow.

    Those of a run stay together, as near as possible to the last of their positions, if there is a gap for all.
    """
    wanted = list(wanted)
    limits = [_limits(problem, step) for step in steps]
    for run in filter(None, runs):
        first, last = max(limits[index][0] for index in run), min(limits[index][1] for index in run)
        if first <= last:
            farthest = max(wanted[index] for index in run)
            for index in run:
                limits[index], wanted[index] = (first, last), farthest
    latest = [last for _, last in limits]
    for index in range(len(steps) - 2, -1, -1):
        latest[index] = min(latest[index], latest[index + 1])
    placed, position = [], 0
    for step, (first, _), last, near in zip(steps, limits, latest, wanted, strict=True):
        position = max(position, first, min(near, last))
        placed.append(Step(position, step.is_start, step.members))
    simulate(problem, placed)
    return placed


def _limits(problem: Problem, step: Step) -> tuple[int, int]:
    ones = [problem.collectives[index] for index in step.members]
    first = max(one.earliest for one in ones)
    return first, min(one.deadline for one in ones)
