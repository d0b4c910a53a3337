"""Plans a graph with collectives, and makes the planned graph.

The problem's account of memory is exact for the graph as it came and close elsewhere; the memory model has the last
word. If it measures more than the budget on the planned graph, the graph is planned again: with more memory in the
tasks that took more than planned or, if none did, for a smaller budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..budget_text import parse_bytes
from ..cost import GraphPrices
from ..errors import InfeasibleBudgetError, PlanError, ProblemError
from ..ir import RowPlace, is_collective, merge_waits, repeated_waits
from ..memory import UNMEASURED, KernelScratch, MemoryModel, kept_inputs
from ..pipeline import KnownPlan, PassResult
from ..progress import TimeLimit
from .any_order_bound import any_order_seconds
from .choose_moves import WORTH, moved_compute
from .follow_plan import ways_to_follow
from .from_graph import GraphProblem, problem_of_graph
from .move_compute import Move, Moving
from .search import (
    MOST_EXACT_STATES,
    SPLIT_WORTH,
    Effort,
    Plan,
    Problem,
    Step,
    can_start,
    is_possible,
    leanest_schedule,
    lower_bounds,
    make_plan,
    plan,
    simulate,
    splits_to_try,
)
from .split_collectives import num_rows, split_graph
from .to_graph import planned_graph
from .user_constraints import NO_WISHES, Wishes

#: Gives the bytes live at each node of a graph, by name.
LiveIn = Callable[[fx.GraphModule], dict[str, int]]

#: How often a graph is planned again because the memory model measured more than the budget.
_ATTEMPTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGraph(PassResult):
    """A plan, and the graph it makes.

    Attributes:
        gm: a changed copy, or the graph itself if its own order is the plan.
        plan: with predicted times, bounds and reasons.
        known: the plan in a form that another rank can follow.
    """

    gm: fx.GraphModule
    plan: Plan
    known: KnownPlan


def plan_graph(
    gm: fx.GraphModule,
    prices: GraphPrices,
    *,
    memory_budget: int | str | None = None,
    wishes: Wishes = NO_WISHES,
    known: KnownPlan | None = None,
    start: KnownPlan | None = None,
    places: Mapping[fx.Node, RowPlace] | None = None,
    prepared: Set[fx.Node] = frozenset(),
    device_type: str | None = None,
    scratch: KernelScratch = UNMEASURED,
    move_compute: bool = True,
    exact_states: int = MOST_EXACT_STATES,
    polishes: bool = True,
    limit: TimeLimit | None = None,
) -> PlannedGraph:
    """Plans a graph, which stays as it is.

    Args:
        gm: a forward, inference or backward graph with ``_c10d_functional`` collectives and ``meta["val"]`` on its
            values. Fake tensors, and groups that exist only by name, will do.
        prices: seconds of compute, collectives and copies.
        memory_budget: the most that may be live while the graph runs, inputs that its caller keeps included: bytes,
            or a text like "60GiB" or "500MB". None for no limit.
        wishes: the user's constraints: buckets, prefetches, limits, links.
        known: the plan of another rank to follow. Its parts, its buckets and their order are kept; their places
            among compute are kept as far as this graph allows.
        start: a plan of a like graph. If it can be followed within the budget, it is only improved.
        places: where the shards that gathers send lie in memory (``provenance.row_places``).
        prepared: what is computed of shards for their gathers (``provenance.prepared_nodes``).
        device_type: where the graph will run; None for where its values are.
        scratch: what kernels allocate there for themselves.
        move_compute: whether compute may move beside collectives that compute reads soon.
        exact_states: the most states that the exact search, of a small graph, may look at.
        polishes: whether the best schedules are improved by small changes.
        limit: when the search ends with the best plan so far; None for no limit.

    Raises:
        OptionError, OptionTypeError: the budget cannot be read.
        InfeasibleBudgetError: no plan keeps the budget; names one that a plan keeps.
        ProblemError: buckets, prefetches or limits cannot be kept.
        UnpricedGroupError: a collective runs on a group without a price.
        PlanError: ``known`` is no plan of this graph.
    """
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    effort = Effort(exact_states=exact_states, polishes=polishes, limit=limit or TimeLimit())
    planner = _Planner(prices=prices, budget=budget, device_type=device_type, scratch=scratch, effort=effort)
    source = _with_one_wait_each(_Source(gm=gm, wishes=wishes, places=places or {}, prepared=prepared))
    if known is not None:
        return planner.followed(source, known)
    if start is not None and (started := planner.started(source, start)) is not None:
        return started
    source, found, best = planner.in_best_order(source, move_compute)
    for splits in _splits_to_try(found, best.plan, source.wishes):
        if effort.limit.is_over():
            break
        parts = source.split(splits)
        try:
            read, tried = planner.planned(parts)
        except InfeasibleBudgetError:
            continue
        if tried.plan.seconds <= SPLIT_WORTH * best.plan.seconds:
            tried = replace(tried, plan=replace(tried.plan, unplanned_seconds=best.plan.unplanned_seconds))
            source, found, best = parts, read, tried
            break
    return replace(best, plan=replace(best.plan, any_order_seconds=any_order_seconds(source.gm, found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A graph to plan, with what is said of its nodes.

    Attributes:
        gm, wishes, places, prepared: as for :func:`plan_graph`.
        moves: the moves that were made in the graph that came.
        splits: for each collective that was split: its index in the graph with its compute moved, its name, and the
            number of parts.
    """

    gm: fx.GraphModule
    wishes: Wishes
    places: Mapping[fx.Node, RowPlace]
    prepared: Set[fx.Node] = frozenset()
    moves: tuple[Move, ...] = ()
    splits: tuple[tuple[int, str, int], ...] = ()

    def on(self, gm: fx.GraphModule, twin: Mapping[fx.Node, fx.Node], **changes: Any) -> _Source:
        """The same for a changed copy of the graph."""
        places = {twin[node]: place for node, place in self.places.items() if node in twin}
        prepared = {twin[node] for node in self.prepared if node in twin}
        return replace(self, gm=gm, wishes=self.wishes.on(twin), places=places, prepared=prepared, **changes)

    def moved(self, moving: Moving, moves: Sequence[Move]) -> _Source:
        """The same with its compute moved."""
        return self.on(moving.gm, moving.twin, moves=tuple(moves))

    def split(self, splits: Mapping[fx.Node, int]) -> _Source:
        """The same with some collectives split."""
        if not splits:
            return self
        index = {node: number for number, node in enumerate(filter(is_collective, self.gm.graph.nodes))}
        named = tuple((index[node], node.name, num_parts) for node, num_parts in splits.items())
        return self.on(*split_graph(self.gm, splits), splits=named)


def _with_one_wait_each(source: _Source) -> _Source:
    """The same with one wait for each result."""
    if not repeated_waits(source.gm.graph):
        return source
    copied, twin = split_graph(source.gm, {})
    merge_waits(copied.graph)
    return source.on(copied, twin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """The settings that all plans of a graph share: see :func:`plan_graph`."""

    prices: GraphPrices
    budget: int | None
    device_type: str | None
    scratch: KernelScratch
    effort: Effort

    def planned(
        self, source: _Source, found: GraphProblem | None = None
    ) -> tuple[GraphProblem, PlannedGraph]:
        """The plan of a graph as it stands, and the problem read from it."""
        found = found or self._read(source)
        graph, result = _within_budget(source.gm, found, self.budget, self._live, self.effort)
        return found, _planned_graph(source, graph, found, result)

    def started(self, source: _Source, start: KnownPlan) -> PlannedGraph | None:
        """The plan of a like graph, improved; None if it cannot be followed here within the budget."""
        try:
            changed = self._changed_as(source, start)
            found = self._read(changed)
            steps = next(ways_to_follow(found.problem, start))
            came = self._read(source, measures_memory=False) if changed is not source else found
            graph, result = _within_budget(changed.gm, found, self.budget, self._live, self.effort, steps)
        except (PlanError, ProblemError, InfeasibleBudgetError):
            return None
        if result.solver in ("none", "leanest"):
            return None
        before = simulate(came.problem.without_wishes(), came.unplanned).seconds
        bound = any_order_seconds(changed.gm, found)
        result = replace(result, unplanned_seconds=before, any_order_seconds=bound)
        return _planned_graph(changed, graph, found, result)

    def _changed_as(self, source: _Source, known: KnownPlan) -> _Source:
        """The graph with the moves and splits of a known plan."""
        if known.moves:
            moving = Moving(source.gm, self._read(source, measures_memory=False))
            moves = [Move(*move) for move in known.moves]
            moving.follow(moves)
            source = source.moved(moving, moves)
        return source.split(_known_splits(source.gm, known))

    def followed(self, source: _Source, known: KnownPlan) -> PlannedGraph:
        """The plan that follows another rank's."""
        source = self._changed_as(source, known)
        found = self._read(source)
        graph, result = _followed(source.gm, found, known, self.budget, self._live)
        return _planned_graph(source, graph, found, result)

    def in_best_order(
        self, source: _Source, move_compute: bool
    ) -> tuple[_Source, GraphProblem, PlannedGraph]:
        """The plan of the graph, or of the graph with its compute moved if that is faster."""
        found = self._read(source)
        tried = moved_compute(source.gm, found) if move_compute and not self.effort.limit.is_over() else None
        if tried is None:
            return source, *self.planned(source, found)
        moved = source.moved(*tried)
        read, least = self._read(moved), _free_bound(found)
        if _free_bound(read) > WORTH * least:  # something else limits the graph
            return source, *self.planned(source, found)
        try:
            read, best = self.planned(moved, read)
        except InfeasibleBudgetError:
            return source, *self.planned(source, found)
        if best.plan.seconds > WORTH * least:  # not faster than any plan in the order that came
            with suppress(InfeasibleBudgetError):
                found, other = self.planned(source, found)
                if best.plan.seconds > WORTH * other.plan.seconds:
                    return source, found, other
        came = simulate(found.problem.without_wishes(), found.unplanned).seconds
        return moved, read, replace(best, plan=replace(best.plan, unplanned_seconds=came))

    def _read(self, source: _Source, *, measures_memory: bool = True) -> GraphProblem:
        return problem_of_graph(
            source.gm,
            self.prices,
            budget_bytes=self.budget,
            wishes=source.wishes,
            places=source.places,
            prepared=source.prepared,
            device_type=self.device_type,
            scratch=self.scratch,
            measures_memory=measures_memory,
        )

    def _live(self, gm: fx.GraphModule) -> dict[str, int]:
        return measured_live(gm, self.device_type, self.scratch)


def _free_bound(found: GraphProblem) -> float:
    """A lower bound on the time of any schedule of these tasks, memory aside."""
    return lower_bounds(replace(found.problem, budget_bytes=None)).seconds


def _planned_graph(
    source: _Source, planned: fx.GraphModule, found: GraphProblem, result: Plan
) -> PlannedGraph:
    splits = tuple((name, num_parts) for _, name, num_parts in source.splits)
    return PlannedGraph(
        gm=planned,
        plan=replace(result, splits=splits, num_moved=len(source.moves)),
        known=KnownPlan(
            num_tasks=len(found.problem.tasks),
            steps=tuple((step.position, step.is_start, step.members) for step in result.steps),
            splits=tuple((index, num_parts) for index, _, num_parts in source.splits),
            moves=source.moves,
        ),
    )


def _known_splits(gm: fx.GraphModule, known: KnownPlan) -> dict[fx.Node, int]:
    collectives = list(filter(is_collective, gm.graph.nodes))
    for index, num_parts in known.splits:
        if index >= len(collectives) or num_parts > num_rows(collectives[index]):
            raise PlanError(
                f"the plan to follow has collective {index} in {num_parts} parts, which it cannot have here; "
                "compile the same graph with the same options on every rank"
            )
    return {collectives[index]: num_parts for index, num_parts in known.splits}


def _splits_to_try(found: GraphProblem, result: Plan, wishes: Wishes) -> list[dict[fx.Node, int]]:
    """The splits to try. Collectives that the user names stay whole, and so do reductions if the user limits them."""
    if not wishes.merge:
        return []
    named = wishes.named()

    def most_parts(index: int) -> int:
        node, one = found.starts[index], found.problem.collectives[index]
        is_limited = one.limit == "reduction" and wishes.max_reductions
        return 1 if node in named or is_limited else num_rows(node)

    is_free = found.problem.budget_bytes is None
    bounds = result.bounds if is_free else lower_bounds(replace(found.problem, budget_bytes=None))
    trials = splits_to_try(found.problem, result.steps, most_parts, least_seconds=bounds.seconds)
    return [{found.starts[index]: number for index, number in trial} for trial in trials]


def _followed(
    gm: fx.GraphModule, found: GraphProblem, known: KnownPlan, budget: int | None, live_in: LiveIn
) -> tuple[fx.GraphModule, Plan]:
    """The graph with the buckets and the sequence of a known plan, within the budget."""
    before = simulate(found.problem.without_wishes(), found.unplanned).seconds
    peaks = []
    ways = ways_to_follow(found.problem, known)
    # The rank that planned has kept prefetches; here another size may leave no gap for one.
    found = replace(found, problem=replace(found.problem, prefetch=()))
    for steps in ways:
        planned = planned_graph(gm, found, steps)
        peaks.append(_most(live_in(planned)))
        if budget is None or peaks[-1] <= budget:
            result = make_plan(
                found.problem, steps, solver="followed", unplanned_seconds=before, notes=found.notes
            )
            return planned, replace(result, peak_bytes=peaks[-1], budget_bytes=budget)
    assert budget is not None
    raise InfeasibleBudgetError(budget, min(peaks), is_smallest=False)


def _within_budget(
    gm: fx.GraphModule,
    found: GraphProblem,
    budget: int | None,
    live_in: LiveIn,
    effort: Effort,
    start: Sequence[Step] | None = None,
) -> tuple[fx.GraphModule, Plan]:
    """The graph with the fastest plan that the memory model accepts, the order in which it came included.

    A plan that starts from ``start`` is that one, improved; ``PlanError`` if it does not fit.
    """
    before = _most(live_in(gm))
    came = simulate(found.problem.without_wishes(), found.unplanned).seconds
    may_stay = is_possible(replace(found.problem, budget_bytes=None), found.unplanned)
    fits = may_stay and (budget is None or before <= budget)
    problem = found.problem
    for _ in range(_ATTEMPTS):
        if start is not None and not can_start(problem, start):
            raise PlanError("the plan to start from does not fit this graph")
        try:
            result = plan(problem, unplanned=found.unplanned, start=start, notes=found.notes, effort=effort)
        except InfeasibleBudgetError:
            break
        planned = planned_graph(gm, found, result.steps)
        live = live_in(planned)
        peak = _most(live)
        if budget is None:
            return planned, replace(result, peak_bytes=peak)
        if peak <= budget:
            if fits and came < result.seconds:
                break
            if problem is not found.problem:
                result = _plan_of(found, result.steps, "beam", came)
            return planned, replace(result, peak_bytes=peak, budget_bytes=budget)
        problem = _with_excess(problem, result, live, budget)
    assert budget is not None
    if fits:  # it keeps the budget, whatever the problem's account of memory says
        return gm, replace(
            _plan_of(found, found.unplanned, "none", came), peak_bytes=before, budget_bytes=budget
        )
    leanest, _ = leanest_schedule(found.problem)
    planned = planned_graph(gm, found, leanest)
    peak = _most(live_in(planned))
    if peak <= budget:
        return planned, replace(
            _plan_of(found, leanest, "leanest", came), peak_bytes=peak, budget_bytes=budget
        )
    raise InfeasibleBudgetError(budget, min(peak, before) if may_stay else peak, is_smallest=False)


def _plan_of(found: GraphProblem, steps: Sequence[Step], solver: str, unplanned_seconds: float) -> Plan:
    """The plan for steps that were not found for this problem and its budget, with bounds that hold for them.

    If the problem counts more memory for the steps than the budget, though the memory model does not, the bounds
    allow that much.
    """
    problem = replace(found.problem, budget_bytes=None)
    if found.problem.budget_bytes is not None:
        most = max(found.problem.budget_bytes, simulate(problem, steps).peak_bytes)
        problem = replace(problem, budget_bytes=most)
    return make_plan(problem, steps, solver=solver, unplanned_seconds=unplanned_seconds, notes=found.notes)


def _with_excess(problem: Problem, result: Plan, live: Mapping[str, int], budget: int) -> Problem:
    """The problem with more memory in the tasks that took more than planned, if one of them exceeds the budget.

    If none does, a copy or a collective took it: the problem then gets a budget smaller by the excess.
    """
    planned = simulate(problem, result.steps).live_bytes
    taken = [live[name] for name in problem.position_names]
    if not any(most > budget for most in taken):
        assert problem.budget_bytes is not None
        excess = max(live.values()) - budget
        return replace(problem, budget_bytes=min(problem.budget_bytes, result.peak_bytes) - excess)
    tasks = [
        replace(task, live_bytes=task.live_bytes + max(0, most - expected))
        for task, most, expected in zip(problem.tasks, taken, planned, strict=True)
    ]
    return replace(problem, tasks=tasks)


def measured_live(
    gm: fx.GraphModule, device_type: str | None, scratch: KernelScratch = UNMEASURED
) -> dict[str, int]:
    """Bytes live at each node by the memory model, inputs that the caller keeps included."""
    model = MemoryModel(gm, kept=kept_inputs(gm), device_type=device_type, scratch=scratch)
    nodes = list(gm.graph.nodes)
    timeline = model.timeline(nodes)
    return {
        node.name: live + timeline.kept_bytes for node, live in zip(nodes, timeline.live_bytes, strict=True)
    }


def measured_peak(gm: fx.GraphModule, device_type: str | None, scratch: KernelScratch = UNMEASURED) -> int:
    """The largest of :func:`measured_live`."""
    return _most(measured_live(gm, device_type, scratch))


def _most(live: Mapping[str, int]) -> int:
    return max(live.values(), default=0)
