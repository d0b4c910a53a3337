"""What the tasks of a problem hold in memory, measured on the graph as it came.

The memory model counts what is live at each node. From this comes off what the problem says that collectives hold
there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..memory import KernelScratch, MemoryModel, kept_inputs
from .search import Problem, Step, simulate


def with_memory(
    gm: fx.GraphModule,
    problem: Problem,
    tasks: list[fx.Node],
    unplanned: list[Step],
    device_type: str | None,
    scratch: KernelScratch,
) -> Problem:
    """The problem with ``live_bytes``, ``before_bytes`` and ``end_bytes`` filled in.

    Args:
        gm: the graph as it came.
        problem: without memory.
        tasks: the node of each task.
        unplanned: the schedule of the graph as it came.
        device_type: where the graph will run; None for where its values are.
        scratch: what kernels allocate there for themselves.
    """
    order = list(gm.graph.nodes)
    model = MemoryModel(gm, kept=kept_inputs(gm), device_type=device_type, scratch=scratch)
    timeline = model.timeline(order)
    live_at = dict(zip(order, timeline.live_bytes, strict=True))
    modelled = simulate(problem.without_wishes(), unplanned).live_bytes
    kept = timeline.kept_bytes
    live = [max(0, live_at[node] - held) + kept for node, held in zip(tasks, modelled, strict=True)]
    between = _live_between(order, tasks, model.lifetimes(order))
    for gap, held in enumerate(_held_across(problem, unplanned)):
        between[gap] = max(0, between[gap] - held) + kept
    return replace(
        problem,
        tasks=[
            replace(task, live_bytes=max(most, before), before_bytes=before)
            for task, most, before in zip(problem.tasks, live, between[:-1], strict=True)
        ],
        end_bytes=between[-1],
    )


def _live_between(
    order: list[fx.Node], tasks: list[fx.Node], lifetimes: list[tuple[int, int, int]]
) -> list[int]:
    """Bytes of the values that live across each gap: made before it, freed after it."""
    position = {node: index for index, node in enumerate(order)}
    behind = [position[node] for node in tasks] + [len(order) - 1]
    before = [0, *behind[:-1]]
    changes = [0] * (len(behind) + 1)
    for start, end, num_bytes in lifetimes:
        first, last = bisect_left(before, start), bisect_right(behind, end)
        if first < last:
            changes[first] += num_bytes
            changes[last] -= num_bytes
    return list(itertools.accumulate(changes))[:-1]


def _held_across(problem: Problem, steps: Sequence[Step]) -> list[int]:
    """Bytes that collectives hold across each gap of a schedule that merges none of them."""
    changes = [0] * (problem.num_positions + 1)

    def hold(num_bytes: int, first: int, last: int) -> None:
        if first <= last:
            changes[first] += num_bytes
            changes[last + 1] -= num_bytes

    start = {step.members[0]: step.position for step in steps if step.is_start}
    wait = {step.members[0]: step.position for step in steps if not step.is_start}
    for index, one in enumerate(problem.collectives):
        begun, ended = start[index], wait[index]
        exists = max([one.earliest, *(wait[other] + 1 for other in one.after)])
        hold(one.ready_bytes, exists, ended - 1)
        hold(one.out_bytes + one.copy_bytes + one.staged_bytes, begun + 1, ended - 1)
        hold(one.kept_bytes, ended if begun < ended and not one.fresh_bytes else ended + 1, one.deadline)
    return list(itertools.accumulate(changes))[:-1]
