"""Which large collectives are worth a trial in parts.

Splitting can only hide what a plan leaves exposed. A part of a gather may fit in a budget where the whole does not.
An urgent collective need not wait for all of a long one. On some backends parts overlap by more than the whole does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .machine import Step
from .problem import Collective, Problem
from .simulate import simulate

#: The smallest collective that is split, in bytes.
OVER_LARGE = 8 * 2**20

#: Numbers of parts to try. The fastest is taken; if none is faster than the whole, the second.
NUM_PARTS = (2, 4, 8)

#: A problem may have at most ``MANY`` collectives with the parts. If it has more without any, which makes planning
#: slow, one collective is split, and only if the plan is slower than the bound by the share ``FAR``.
MANY, FAR = 150, 0.05

#: A plan with parts is taken if it takes at most this share of the time without.
SPLIT_WORTH = 0.99


def splits_to_try(
    problem: Problem, steps: Sequence[Step], most_parts: Callable[[int], int], *, least_seconds: float
) -> list[list[tuple[int, int]]]:
    """The trials, in their order: in each, the collectives to split by index, with their numbers of parts.

    The first trial splits all that compute waits for; if these are too many, those with the longest waits. The
    second splits the first of them alone. The caller stops at the first trial that is worth it.

    Args:
        problem: what was planned.
        steps: the plan.
        most_parts: the most parts of a collective, by index; less than 2 for one that must stay whole.
        least_seconds: a bound on the time of any plan, without a budget.
    """
    simulation = simulate(problem, steps)
    least_gain = (1 - SPLIT_WORTH) * simulation.seconds
    is_large = len(problem.collectives) > MANY
    if simulation.exposed_seconds <= least_gain or (
        is_large and simulation.seconds <= (1 + FAR) * least_seconds
    ):
        return []
    is_close = simulation.seconds - least_seconds <= least_gain
    exposed: dict[int, float] = {}
    for run in simulation.runs:
        is_queue_busy = run.began > run.issued
        for index in (*run.members, *(run.behind if is_queue_busy else ())):
            exposed[index] = exposed.get(index, 0.0) + run.exposed_seconds
    found: list[tuple[int, int]] = []
    for index in sorted(exposed, key=lambda index: (-exposed[index], index)):
        one = problem.collectives[index]
        numbers = [number for number in NUM_PARTS if number <= most_parts(index)]
        if exposed[index] <= 0.0 or one.num_bytes < OVER_LARGE or not numbers:
            continue
        fastest = min(numbers, key=lambda number: seconds_in_a_row(problem, one, number))
        if seconds_in_a_row(problem, one, fastest) < seconds_in_a_row(problem, one, 1):
            found.append((index, fastest))
        elif not is_close:  # parts that are not faster themselves beat no bound
            found.append((index, numbers[:2][-1]))
    together, room = [], MANY - len(problem.collectives)
    for index, number in found:
        if number <= room + 1:
            together.append((index, number))
            room -= number - 1
    first = found[:1] if found[:1] != together else []
    return [trial for trial in (together, first) if trial]


def seconds_in_a_row(problem: Problem, one: Collective, number: int) -> float:
    """How long so many equal parts of a collective take, one right after the other."""
    num_bytes = -(-one.num_bytes // number)
    each = problem.prices.collective_seconds(one.kind, num_bytes, one.queue)
    return number * each - (number - 1) * problem.prices.overlapped_seconds(one.kind, num_bytes, one.queue)
