"""Solves a problem: exactly if it is small, else with the best of a few beam searches and list schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...errors import InfeasibleBudgetError, PlanError, ProblemError
from ...progress import TimeLimit
from .beam import Beam, good_schedule
from .bound import gap, lower_bounds
from .condense import condense, expand
from .exact import TooLargeError, best_schedule, least_peak
from .feasible import constrained_schedules
from .large_buckets import in_large_buckets
from .list_schedule import Rule, schedule_in_turn
from .local_search import polished
from .machine import Machine, Step
from .plan import Plan, make_plan
from .problem import Problem, RememberedPrices
from .searches import BEAMS, FIXED_SEARCHES, MANY, RULES, is_hopeless, promising
from .simulate import cost_of, simulate

#: A problem of at most so many collectives, and tasks after condensing, is solved exactly.
EXACT_COLLECTIVES, EXACT_TASKS = 10, 40

#: States that the exact search looks at before the local search, and (for seconds) after it. If there are more
#: states, the result of the other searches stays.
EXACT_STATES, MOST_EXACT_STATES = 30_000, 400_000

#: States that the exact search looks at in a second, roughly.
_STATES_A_SECOND = 10_000

_TOO_MANY_WISHES = (
    "no schedule is found that keeps the buckets, prefetches and limits that were asked for, whatever the "
    "budget; ask for fewer of them"
)

#: Where few buckets are preferred: the largest are taken that are predicted at most ``LARGE_WORTH`` slower than the
#: fastest of those with a least size. Buckets of any size are taken if they are faster by more than ``SMALL_WORTH``.
LARGE_WORTH, SMALL_WORTH = 0.01, 0.05

#: A schedule this close to the bound ends the search.
CLOSE_ENOUGH = 2e-3

#: If no schedule is that close, and the problem has at most ``MANY`` collectives: ``NUM_AGAIN`` of the best searches
#: run again with these shares of the budget (what a beam drops for lack of memory depends on chance), and
#: ``NUM_POLISHED`` of the best schedules go through the local search.
SHARES, NUM_AGAIN, NUM_POLISHED = (0.98, 0.96), 6, 3

#: Without a budget, the schedule with the lowest peak is taken among those slower by at most this than the fastest:
#: a difference that no model of a machine can tell.
HARDLY_SLOWER = 1e-3

#: A schedule that was given stays if none faster is found and its memory is at most this much of the best one's.
HARDLY_LEANER = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search.

    Attributes:
        exact_states: the most states that the exact search may look at.
        polishes: whether the best schedules are improved by small changes.
        limit: when the search ends with the best schedule so far. The first two searches always run.
    """

    exact_states: int = MOST_EXACT_STATES
    polishes: bool = True
    limit: TimeLimit = field(default_factory=TimeLimit)

    def states(self, most: int) -> int:
        """The most states that an exact search of at most so many may look at in the time that is left."""
        allowed, left = min(most, self.exact_states), self.limit.left()
        in_time = allowed if math.isinf(left) else max(int(left * _STATES_A_SECOND), 0)
        self.limit.was_reached = self.limit.was_reached or in_time < allowed
        return min(allowed, in_time)


def plan(
    problem: Problem,
    *,
    unplanned: Sequence[Step] | None = None,
    start: Sequence[Step] | None = None,
    notes: Sequence[str] = (),
    effort: Effort | None = None,
) -> Plan:
    """The best schedule found for a problem.

    Args:
        problem: what is planned.
        unplanned: a known schedule. The plan is no slower, if this one keeps the budget and the user's constraints.
        start: a schedule that a search has found. If it fits, it is improved (kept if large buckets are preferred).
        notes: sentences to keep in the plan.
        effort: how hard to search; None for no limit.

    Raises:
        InfeasibleBudgetError: no schedule is found within the budget.
        ProblemError: no schedule is found that keeps the user's constraints.
    """
    effort = effort or Effort()
    problem = replace(problem, prices=RememberedPrices(problem.prices))
    known = [list(unplanned)] if unplanned is not None else []
    before = simulate(problem.without_wishes(), known[0]).seconds if known else None
    bearable = before if before is not None else math.inf
    known = [steps for steps in known if is_possible(problem, steps)]
    first = list(start) if start is not None and can_start(problem, start) else None
    if problem.prefers_large and first is not None:
        return make_plan(problem, first, solver="followed", unplanned_seconds=before, notes=notes)
    large = _in_large_buckets(problem, bearable, effort) if problem.prefers_large else None
    solver, best = large or _solved(problem, known, bearable, effort, first)
    best = _known_unless_better(problem, known, best)
    return make_plan(problem, best, solver=solver, unplanned_seconds=before, notes=notes)


def _solved(
    problem: Problem,
    known: Sequence[list[Step]],
    bearable: float,
    effort: Effort,
    start: list[Step] | None = None,
) -> tuple[str, list[Step]]:
    """The solver and the best schedule found, the known ones included; with ``start`` it is that one, improved.

    Raises:
        InfeasibleBudgetError, ProblemError: as for :func:`plan`.
    """
    if start is None:
        searched = list(_searched(problem, limit=effort.limit))
        placed = [steps for steps in [in_place(problem)] if is_possible(problem, steps)]
        found = [*known, *placed, *(steps for _, steps in searched)] or [_leanest_in_budget(problem)]
    else:
        searched, found = [], [start]
    best = _best(problem, [*known, *found], bearable)
    exact = _exactly(problem, best, effort.states(EXACT_STATES))
    if exact is None:
        if effort.polishes and not effort.limit.is_over() and _is_worth_more(problem, best):
            improved = _improved(problem, found, searched, best, effort.limit)
            best = _best(problem, [best, *improved], bearable)
        if effort.exact_states > EXACT_STATES:
            exact = _exactly(problem, best, effort.states(effort.exact_states))
    return ("beam", best) if exact is None else ("exact", exact or best)


def _in_large_buckets(problem: Problem, bearable: float, effort: Effort) -> tuple[str, list[Step]] | None:
    """The schedule with the largest buckets that is hardly slower than others with large buckets.

    None if buckets of any size are worth their number: none of the others keeps the budget, or comes near the bound.
    """
    bounds = lower_bounds(problem)
    tried: list[tuple[float, list[Step]]] = []
    for restricted in in_large_buckets(problem):
        if tried and effort.limit.is_over():
            break
        found = [steps for _, steps in _searched(restricted, FIXED_SEARCHES, limit=effort.limit)]
        if not found:
            continue
        best = _best(restricted, found, bearable)
        tried.append((simulate(problem, best).seconds, best))
        if gap(tried[-1][0], bounds) < LARGE_WORTH:
            break
    if not tried:
        return None
    fastest = min(seconds for seconds, _ in tried)
    if gap(fastest, bounds) > SMALL_WORTH and not effort.limit.is_over():
        solver, best = _solved(problem, [], bearable, effort)
        if simulate(problem, best).seconds * (1 + SMALL_WORTH) < fastest:
            return solver, best
    return next(("large", best) for seconds, best in tried if seconds <= (1 + LARGE_WORTH) * fastest)


def in_place(problem: Problem) -> list[Step]:
    """Each collective, or fixed bucket, where its position is forced: gathers at their deadline, the rest at once."""
    buckets = {tuple(sorted(bucket)) for bucket in problem.fixed_buckets}
    fixed = {index for bucket in buckets for index in bucket}
    buckets |= {(index,) for index in range(len(problem.collectives)) if index not in fixed}
    placed = []
    for bucket in buckets:
        ones = [problem.collectives[index] for index in bucket]
        earliest, deadline = max(one.earliest for one in ones), min(one.deadline for one in ones)
        placed.append((deadline if ones[0].limit == "gather" else earliest, bucket))
    steps = []
    for position, bucket in sorted(placed):
        steps += [Step(position, True, bucket), Step(position, False, bucket)]
    return steps


def _leanest_in_budget(problem: Problem) -> list[Step]:
    """The schedule with the lowest peak that is found, for problems of which no search finds any.

    Raises:
        InfeasibleBudgetError: it does not keep the budget.
        ProblemError: none is found that keeps the user's constraints.
    """
    steps, is_leanest = leanest_schedule(problem)
    peak = simulate(replace(problem, budget_bytes=None), steps).peak_bytes
    if problem.budget_bytes is not None and peak > problem.budget_bytes:
        raise InfeasibleBudgetError(problem.budget_bytes, peak, is_smallest=is_leanest)
    return steps


def is_possible(problem: Problem, steps: Sequence[Step]) -> bool:
    """Whether a schedule keeps the rules, the user's constraints and the budget."""
    try:
        peak = simulate(problem, steps).peak_bytes
    except PlanError:
        return False
    return problem.budget_bytes is None or peak <= problem.budget_bytes


def can_start(problem: Problem, steps: Sequence[Step]) -> bool:
    """Whether a schedule of a like problem fits this one: its buckets may be merged here, and it is possible."""
    fixed = {frozenset(bucket) for bucket in problem.fixed_buckets}
    for step in steps:
        keys = {problem.collectives[index].merge_key for index in step.members}
        if len(step.members) > 1 and frozenset(step.members) not in fixed and (len(keys) > 1 or None in keys):
            return False
    return is_possible(problem, steps)


def _best(problem: Problem, schedules: Sequence[list[Step]], bearable: float) -> list[Step]:
    """The fastest; without a budget, the leanest of those hardly slower and within ``bearable`` seconds."""
    machine = Machine(problem, budget_bytes=None)
    costs = [cost_of(problem, steps, machine) for steps in schedules]
    fastest = most = min(costs)[0]
    if problem.budget_bytes is None:
        most = max(fastest, min(bearable, fastest * (1 + HARDLY_SLOWER)))
    tied = [place for place, (seconds, _) in enumerate(costs) if seconds <= most]
    return schedules[min(tied, key=lambda place: costs[place][::-1])]


def _searched(
    problem: Problem, searches: Iterable[Beam | Rule] | None = None, *, limit: TimeLimit
) -> Iterator[tuple[Beam | Rule, list[Step]]]:
    """Runs all searches, or these, and yields the schedules found.

    Stops at one that is close enough to the bound, and at the time limit, but not before two have found a schedule.
    """
    small, gaps = condense(problem)
    bounds = lower_bounds(problem)
    machine = Machine(small, budget_bytes=small.budget_bytes)
    free = Machine(small, budget_bytes=None)
    every: Iterator[Beam | Rule] = itertools.chain(promising(small), RULES)
    found: dict[Beam | Rule, float] = {}
    for search in every if searches is None else searches:
        if len(found) > 1 and limit.is_over():
            return
        if searches is None and is_hopeless(search, found):
            continue
        steps = (
            good_schedule(small, search, machine=machine)
            if isinstance(search, Beam)
            else schedule_in_turn(small, search, machine=machine)
        )
        if steps is not None:
            yield search, expand(steps, gaps)
            found[search] = simulate(small, steps, machine=free).seconds
            if gap(found[search], bounds) < CLOSE_ENOUGH:
                return


def _known_unless_better(problem: Problem, known: list[list[Step]], best: list[Step]) -> list[Step]:
    """A known schedule if the best is no faster and hardly leaner (replanning changes nothing), else the best."""
    machine = Machine(problem, budget_bytes=None)
    seconds, peak = cost_of(problem, best, machine)
    for steps in known:
        found = cost_of(problem, steps, machine)
        if found[0] <= seconds and found[1] <= HARDLY_LEANER * peak:
            return steps
    return best


def _is_worth_more(problem: Problem, best: Sequence[Step]) -> bool:
    """Whether to improve a schedule: it may be far from the best, and improving it does not take long."""
    is_small = len(problem.collectives) <= EXACT_COLLECTIVES
    if len(problem.collectives) > MANY or (
        is_small and len(_searched_exactly(problem)[0].tasks) > EXACT_TASKS
    ):
        return False
    return gap(simulate(problem, best).seconds, lower_bounds(problem)) >= CLOSE_ENOUGH


def _improved(
    problem: Problem,
    found: Sequence[list[Step]],
    searched: Sequence[tuple[Beam | Rule, list[Step]]],
    best: list[Step],
    limit: TimeLimit,
) -> list[list[Step]]:
    """Schedules found by the best searches with less memory, and by small changes."""
    machine = Machine(problem, budget_bytes=None)
    costs = {cost_of(problem, steps, machine): steps for steps in [*found, best]}
    budget, peak = problem.budget_bytes, cost_of(problem, best, machine)[1]
    if budget is not None and peak > SHARES[-1] * budget:
        ranked = sorted(searched, key=lambda one: cost_of(problem, one[1], machine))
        searches = [search for search, _ in ranked[:NUM_AGAIN]]
        for share in SHARES:
            less = replace(problem, budget_bytes=round(share * budget))
            costs |= {
                cost_of(problem, steps, machine): steps for _, steps in _searched(less, searches, limit=limit)
            }
    first = [costs[cost] for cost in sorted(costs)[:NUM_POLISHED]]
    return [polished(problem, steps, limit) for steps in first if not limit.is_over()]


def _exactly(problem: Problem, best: list[Step], max_states: int) -> list[Step] | None:
    """The steps of a faster schedule, or [] if ``best`` is the fastest; None if neither can be shown."""
    small, gaps = _searched_exactly(problem)
    if len(problem.collectives) > EXACT_COLLECTIVES or len(small.tasks) > EXACT_TASKS or max_states < 1:
        return None
    try:
        steps = best_schedule(small, below_seconds=simulate(problem, best).seconds, max_states=max_states)
    except TooLargeError:
        return None
    return [] if steps is None else expand(steps, gaps)


def _searched_exactly(problem: Problem) -> tuple[Problem, Sequence[int]]:
    """The problem given to the exact search, and the original gap of each of its gaps."""
    return condense(problem) if problem.budget_bytes is None else (problem, range(len(problem.tasks) + 1))


def smallest_budget(problem: Problem) -> tuple[int, bool]:
    """A budget that some schedule keeps, and whether it is the smallest that any keeps.

    Raises:
        ProblemError: no schedule is found that keeps the user's constraints.
    """
    steps, is_leanest = leanest_schedule(problem)
    return simulate(replace(problem, budget_bytes=None), steps).peak_bytes, is_leanest


def leanest_schedule(problem: Problem) -> tuple[list[Step], bool]:
    """The schedule with the lowest peak that is found, and whether none has a lower one.

    Raises:
        ProblemError: no schedule is found that keeps the user's constraints.
    """
    free = replace(problem, budget_bytes=None)
    if len(problem.collectives) <= EXACT_COLLECTIVES and len(problem.tasks) <= EXACT_TASKS:
        try:
            least = least_peak(free, max_states=EXACT_STATES)
            if least is None:
                raise ProblemError(_TOO_MANY_WISHES)
            steps = best_schedule(replace(problem, budget_bytes=least), max_states=EXACT_STATES)
        except TooLargeError:
            pass
        else:
            assert steps is not None, "a schedule has the least peak"
            return steps, True
    small, gaps = condense(free)
    made = (in_place(free), *constrained_schedules(free))
    candidates = [steps for steps in made if is_possible(free, steps)]
    candidates += [expand(steps, gaps) for steps in [good_schedule(small, BEAMS[0])] if steps is not None]
    if not candidates:
        raise ProblemError(_TOO_MANY_WISHES)
    smallest, _, leanest = min(
        (simulate(free, steps).peak_bytes, place, steps) for place, steps in enumerate(candidates)
    )
    floor = max([task.live_bytes for task in problem.tasks], default=0)
    while smallest - floor > max(1, smallest // 1000):
        middle = (smallest + floor) // 2
        steps = good_schedule(replace(small, budget_bytes=middle), BEAMS[0])
        if steps is None:
            floor = middle
            continue
        found = expand(steps, gaps)
        peak = simulate(free, found).peak_bytes
        leanest = found if peak < smallest else leanest
        smallest = min(middle, peak)
    return leanest, False
