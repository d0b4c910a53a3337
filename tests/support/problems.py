"""Random planning problems, and prices for them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from graphshard.planner.search.problem import Collective, Problem, Task


@dataclass(frozen=True)
class LinePrices:
    """Latency + bytes / bandwidth; of the second a share of ``turns`` overlaps beside ``overlapped``."""

    latency: float = 2.0
    bandwidth: float = 4.0
    copies: float = 64.0
    core: float = 0.0
    overlapped: float = 0.0
    turns: float = 0.0
    spread: float = 0.0

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return self.latency + num_bytes / self.bandwidth

    def overlapped_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        overlapped = self.overlapped + self.turns * num_bytes / self.bandwidth
        return min(overlapped, self.collective_seconds(kind, num_bytes, group))

    def spread_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return self.spread

    def core_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return self.core * (1.0 + num_bytes / 16)

    def copy_seconds(self, num_bytes: int) -> float:
        return num_bytes / self.copies


def random_problem(
    seed: int,
    *,
    most: int = 5,
    num_tasks: int = 4,
    is_tight: bool = False,
    with_memory: bool = False,
    is_long: bool = False,
    **changes,
) -> Problem:
    """A problem with gathers, reductions, all-reduces of them, and collectives of another group.

    Args:
        seed: equal seeds give equal problems.
        most: so many collectives at most.
        num_tasks: of compute.
        is_tight: collectives have at most one task between their input and their reader.
        with_memory: tasks and collectives hold memory.
        is_long: the collectives follow each other along the tasks, so that few overlap; at least 8.
        changes: to the problem's attributes.
    """
    dice = random.Random(seed)
    tasks = [Task(seconds=float(dice.choice([0, 1, 2, 3, 5, 8]))) for _ in range(num_tasks)]
    if with_memory:
        live = [dice.randrange(8, 40) for _ in tasks]
        between = [min(pair) - dice.randrange(4) for pair in zip([40, *live], [*live, 40], strict=True)]
        tasks = [
            Task(seconds=task.seconds, live_bytes=most_live, before_bytes=before)
            for task, most_live, before in zip(tasks, live, between[:-1], strict=True)
        ]
        changes.setdefault("end_bytes", between[-1])
    found: list[Collective] = []
    wanted = dice.randrange(8 if is_long else 1, most + 1)
    while len(found) < wanted:
        near = (len(found) * num_tasks // wanted, (len(found) + 1) * num_tasks // wanted)
        places = range(near[0], near[1] + 1) if is_long else range(num_tasks + 1)
        some = _some(dice, len(found), num_tasks, places, is_tight, with_memory)
        found += some[: wanted - len(found)]
    return Problem(tasks=tasks, collectives=found, prices=changes.pop("prices", LinePrices()), **changes)


def _some(dice, count, end, places, is_tight, with_memory):
    size = dice.choice([4, 8, 12, 24])
    shard = size // 4
    held = 1 if with_memory else 0
    kind = dice.randrange(4)
    name = f"c{count}"
    if kind == 0 or kind == 1:
        deadline = dice.choice(places)
        return [
            Collective(
                name=name, kind="all_gather", queue="shard", in_bytes=shard, out_bytes=size,
                earliest=max(0, deadline - 1) if is_tight else 0, deadline=deadline,
                merge_key=("gather", dice.choice("ab") if is_tight else "a"),
                kept_bytes=held * size, limit="gather", copy_bytes=held * dice.choice([0, size]),
                staged_bytes=held * dice.choice([0, shard]), before_seconds=dice.choice([0.0, 0.5]),
            )
        ]  # fmt: skip
    earliest = dice.choice(places)
    deadline = min(end, earliest + 1) if is_tight else end
    if kind == 2:
        scatter = Collective(
            name=name, kind="reduce_scatter", queue="shard", in_bytes=size, out_bytes=shard,
            earliest=earliest, deadline=deadline, merge_key=("reduction",), ready_bytes=held * size,
            kept_bytes=0, limit="reduction", views_result=True, after_seconds=dice.choice([0.0, 0.25]),
        )  # fmt: skip
        queue = dice.choice(["copies", "shard"])
        total = Collective(
            name=f"c{count + 1}", kind="all_reduce", queue=queue, in_bytes=shard,
            out_bytes=shard, earliest=earliest, deadline=deadline, merge_key=("sum", queue), after=(count,),
            ready_bytes=held * shard, kept_bytes=held * shard, limit="reduction", views_result=True,
        )  # fmt: skip
        return [scatter, total]
    later = dice.randrange(earliest, end + 1)
    return [
        Collective(
            name=name, kind="all_reduce", queue="tensor", in_bytes=size, out_bytes=size, earliest=earliest,
            deadline=min(later, earliest + 1) if is_tight else later, ready_bytes=held * size,
            kept_bytes=held * size,
        )
    ]  # fmt: skip
