"""Lower bounds on the time of any schedule of a problem, its tasks in their order.

- *compute*: the sum on one stream of all tasks, of the casts and layouts around collectives, and of the least that
  collectives take of the core.
- *queue*: take a set of collectives of one process group or shared link. Let ``a`` be the soonest time at which an
  input of the set exists, and ``b`` the least that is left to do after any of them. They run one after the other, so
  all is over no sooner than ``a`` + their work + ``b``. If latencies may overlap, the smallest overlap counts once.
  The bound is the best of many such sets: the bound of one machine with heads and tails (Carlier, "The one-machine
  sequencing problem", 1982). It covers the critical path (sets of one), and the first gather and the last reduction,
  which nothing can hide.
- *windows*: a collective that may start in gap ``e`` and is read in gap ``d`` delays compute by its own time less
  that of the tasks in between. Delays of windows that do not overlap add up. The bound takes the heaviest choice of
  such windows (weighted interval scheduling). The queue bound counts in ``a`` the delays before an input exists, and
  in ``b`` those after the first reader.

The work of a set is the least that any merging costs. If prices are concave in bytes, as latency + bytes / bandwidth
is, that is one bucket for each merge key. Otherwise the best price per byte counts.

Assumptions: prices do not fall when bytes grow, and a merged collective takes no more of the core than its parts.
The spread of ends is ignored: an expected wait is no shorter than one for a collective that ends on time.

With a budget the bound is *memory-aware*. A collective that would not fit beside a task has not started before that
task. If neither its input nor what a bucket packs of it fits, it is done before the task. Heads and tails grow
accordingly.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .problem import Collective, Problem

#: How many thresholds of the soonest time are tried.
THRESHOLDS = 64

#: Ratio of neighbouring sizes at which a price that is not concave is sampled.
_GRID = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds in seconds, with and without the budget.

    Attributes:
        compute: tasks, casts, layouts and the core's part of collectives.
        queue: the best bound of any process group, memory aside.
        windows: tasks and the delays that add up, memory aside.
        memory: the best of ``queue`` and ``windows`` with the budget; equal to these where it does not bind.
    """

    compute: float
    queue: float
    windows: float
    memory: float

    @property
    def seconds(self) -> float:
        """The best of them."""
        return max(self.compute, self.queue, self.windows, self.memory)


def lower_bounds(problem: Problem) -> Bounds:
    """Bounds on the time of any schedule that keeps the problem's budget."""
    surely = sum(one.before_seconds + one.after_seconds for one in problem.collectives)
    compute = sum(task.seconds for task in problem.tasks) + surely + _least_core_seconds(problem)
    windows = _windows(problem)
    queue = _queue_bound(problem, windows)
    delays = _window_bound(problem, windows)
    memory = max(queue, delays)
    if problem.budget_bytes is not None:
        narrowed = _windows_in_budget(problem, problem.budget_bytes)
        if narrowed != windows:
            memory = max(memory, _queue_bound(problem, narrowed), _window_bound(problem, narrowed))
    return Bounds(compute=compute, queue=queue, windows=delays, memory=memory)


def _least_core_seconds(problem: Problem) -> float:
    """The core's part with one bucket for each merge key: merging never takes more of the core."""
    num_bytes: dict[tuple, int] = {}
    first: dict[tuple, Collective] = {}
    for index, one in enumerate(problem.collectives):
        key = one.merge_key or (index,)
        num_bytes[key] = num_bytes.get(key, 0) + one.num_bytes
        first.setdefault(key, one)
    prices = problem.prices
    return sum(prices.core_seconds(one.kind, num_bytes[key], one.queue) for key, one in first.items())


def gap(seconds: float, bounds: Bounds) -> float:
    """How far ``seconds`` is above the bound, as a share of the bound."""
    return seconds / bounds.seconds - 1.0 if bounds.seconds > 0 else 0.0


def _windows_in_budget(problem: Problem, budget_bytes: int) -> list[tuple[int, int]]:
    """Earliest start and latest wait of each collective, as far as the memory of tasks limits them."""
    tight: dict[int, list[int]] = {}

    def positions_without_room(num_bytes: int) -> list[int]:
        if num_bytes not in tight:
            tight[num_bytes] = [
                position
                for position, task in enumerate(problem.tasks)
                if task.live_bytes + num_bytes > budget_bytes
            ]
        return tight[num_bytes]

    windows = []
    for one in problem.collectives:
        earliest, deadline = one.earliest, one.deadline
        held = min(one.out_bytes + one.copy_bytes, one.kept_bytes)  # in flight, or waited for early
        running = positions_without_room(held)
        index = bisect_left(running, deadline) - 1
        if one.limit == "gather" and index >= 0:
            earliest = max(earliest, running[index] + 1)
        if not one.after and one.ready_bytes:
            full = positions_without_room(_unread_bytes(one))
            index = bisect_left(full, one.earliest)
            if index < len(full):
                deadline = min(deadline, full[index])
        windows.append((min(earliest, deadline), max(deadline, one.earliest)))
    return windows


def _unread_bytes(one: Collective) -> int:
    """What a collective certainly holds from when its input exists until its wait.

    A bucket may free the input, which can be a small piece of a large tensor, but then holds what it has packed.
    """
    packed = one.in_bytes + one.out_bytes + one.copy_bytes
    return one.ready_bytes if one.merge_key is None else min(one.ready_bytes, packed)


def _delays(problem: Problem, windows: Sequence[tuple[int, int]]) -> list[tuple[int, int, float]]:
    """The windows in which a collective takes longer than the tasks, and by how much."""
    elapsed = _elapsed(problem)
    found = []
    for one, (earliest, deadline) in zip(problem.collectives, windows, strict=True):
        seconds = problem.prices.collective_seconds(one.kind, one.num_bytes, one.queue)
        delay = seconds - (elapsed[deadline] - elapsed[earliest])
        if delay > 0:
            found.append((earliest, deadline, delay))
    return found


def _added_up(delays: Sequence[tuple[int, int, float]], num_positions: int) -> list[float]:
    """For each gap, and for the end: the largest delay of windows that end before it and do not overlap."""
    most = [0.0] * (num_positions + 1)
    position = 0
    for deadline, earliest, delay in sorted((last, first, delay) for first, last, delay in delays):
        while position <= deadline:
            most[position + 1] = most[position]
            position += 1
        most[deadline + 1] = max(most[deadline + 1], most[earliest] + delay)
    while position < num_positions:
        most[position + 1] = most[position]
        position += 1
    return most


def _window_bound(problem: Problem, windows: Sequence[tuple[int, int]]) -> float:
    return _elapsed(problem)[-1] + _added_up(_delays(problem, windows), problem.num_positions)[-1]


def _elapsed(problem: Problem) -> list[float]:
    return [0.0, *itertools.accumulate(task.seconds for task in problem.tasks)]


def expected_clock(problem: Problem) -> list[float]:
    """For each gap: the soonest start of the task after it, or of the end, as far as windows tell."""
    delays = _added_up(_delays(problem, _windows(problem)), problem.num_positions)
    return [seconds + delays[gap + 1] for gap, seconds in enumerate(_elapsed(problem))]


def _windows(problem: Problem) -> list[tuple[int, int]]:
    return [(one.earliest, one.deadline) for one in problem.collectives]


def _entered_and_left(
    problem: Problem, windows: Sequence[tuple[int, int]]
) -> tuple[list[float], list[float]]:
    """For each gap: the soonest time of its first step, and the least that is left to do after its last one."""
    elapsed, delays, end = _elapsed(problem), _delays(problem, windows), len(problem.tasks)
    before = _added_up(delays, problem.num_positions)
    mirrored = [(end - last, end - first, delay) for first, last, delay in delays]
    behind = _added_up(mirrored, problem.num_positions)
    entered = [seconds + before[gap] for gap, seconds in enumerate(elapsed)]
    left = [elapsed[-1] - seconds + behind[end - gap] for gap, seconds in enumerate(elapsed)]
    return entered, left


def _queue_bound(problem: Problem, windows: Sequence[tuple[int, int]]) -> float:
    entered, left = _entered_and_left(problem, windows)
    ones = problem.collectives
    alone = [problem.prices.collective_seconds(one.kind, one.num_bytes, one.queue) for one in ones]
    heads: list[float] = []
    for one, (earliest, _) in zip(ones, windows, strict=True):
        after = [heads[other] + alone[other] + ones[other].after_seconds for other in one.after]
        heads.append(max([entered[earliest], *after]) + one.before_seconds)
    dependents: dict[int, list[int]] = {}
    for index, one in enumerate(ones):
        for other in one.after:
            dependents.setdefault(other, []).append(index)
    tails = [0.0] * len(ones)
    for index in reversed(range(len(ones))):
        one, (_, deadline) = ones[index], windows[index]
        later = [
            tails[other] + alone[other] + ones[other].before_seconds for other in dependents.get(index, ())
        ]
        tails[index] = max([left[deadline], *later]) + one.after_seconds
    return links_bound(problem, heads, tails)


def links_bound(problem: Problem, heads: Sequence[float], tails: Sequence[float]) -> float:
    """The queue bound: for the collectives of each process group or shared link.

    Args:
        problem: whose collectives these are.
        heads: the soonest time at which each can begin.
        tails: the least that is left to do after the end of each.
    """
    ones = problem.collectives
    alone = [problem.prices.collective_seconds(one.kind, one.num_bytes, one.queue) for one in ones]
    overlaps = [problem.prices.overlapped_seconds(one.kind, one.num_bytes, one.queue) for one in ones]
    best = 0.0
    links = [problem.link_of(one.queue) for one in ones]
    for link in sorted(set(links)):
        members = [index for index, other in enumerate(links) if other == link]
        longest = max(heads[index] + alone[index] + tails[index] for index in members)
        # The first collective of a queue overlaps with nothing; all later ones may overlap.
        first = min(overlaps[index] for index in members)
        begun = [head + first for head in heads]
        moving = [seconds - overlap for seconds, overlap in zip(alone, overlaps, strict=True)]
        best = max(best, longest, _heads_and_tails(problem, members, begun, tails, moving))
    return best


def _heads_and_tails(
    problem: Problem, members: list[int], heads: Sequence[float], tails: Sequence[float], moving: list[float]
) -> float:
    ones = problem.collectives
    keys = {index: ones[index].merge_key or (index,) for index in members}
    groups: dict[tuple, list[int]] = {}
    for index in members:
        groups.setdefault(keys[index], []).append(index)
    work = {
        key: LeastWork(problem, [ones[index] for index in group])
        for key, group in groups.items()
        if len(group) > 1
    }
    by_tail = sorted(members, key=lambda index: (-tails[index], index))
    distinct = sorted({heads[index] for index in members})
    step = max(1, len(distinct) // THRESHOLDS)
    best = 0.0
    for head in {*distinct[::step], *distinct[:8]}:
        seconds: dict[tuple, float] = {}
        num_bytes: dict[tuple, int] = {}
        total = 0.0
        for index in by_tail:
            if heads[index] < head:
                continue
            key = keys[index]
            num_bytes[key] = num_bytes.get(key, 0) + ones[index].num_bytes
            known = seconds.get(key, 0.0)
            least = max(known, moving[index], work[key].least(num_bytes[key]) if key in work else 0.0)
            seconds[key] = least
            total += least - known
            best = max(best, head + total + tails[index])
    return best


class LeastWork:
    """The least time for which collectives of one merge key keep their queue busy, however they are merged."""

    def __init__(self, problem: Problem, ones: list[Collective]) -> None:
        first = ones[0]
        prices, kind, queue = problem.prices, first.kind, first.queue
        self._price: Callable[[int], float] = lambda size: (
            prices.collective_seconds(kind, size, queue) - prices.overlapped_seconds(kind, size, queue)
        )
        smallest = max(1, min(one.num_bytes for one in ones))
        total = max(smallest, sum(one.num_bytes for one in ones))  # empty ones are priced, too
        self._per_byte: float | None = None
        if not self._is_concave(smallest, total):
            self._per_byte = self._best_rate(smallest, total)

    def least(self, num_bytes: int) -> float:
        """The least time for so many bytes."""
        return self._price(num_bytes) if self._per_byte is None else num_bytes * self._per_byte

    def _is_concave(self, smallest: int, total: int) -> bool:
        points = sorted({smallest + (total - smallest) * k // 64 for k in range(65)})
        slopes, before = [], (0, 0.0)
        for size in points:
            now = (size, self._price(size))
            slopes.append((now[1] - before[1]) / (now[0] - before[0]))
            before = now
        return all(later <= earlier * (1 + 1e-9) + 1e-30 for earlier, later in itertools.pairwise(slopes))

    def _best_rate(self, smallest: int, total: int) -> float:
        """Seconds per byte: between two sizes a price is at least that of the smaller one."""
        rate, size = float("inf"), smallest
        while size <= total:
            following = max(size + 1, int(size * _GRID))
            rate = min(rate, self._price(size) / following)
            size = following
        return rate
