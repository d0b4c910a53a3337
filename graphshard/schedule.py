"""``schedule_graph``: plan the collectives of any captured graph, and put the plan into it.

The planner's model of memory is exact for the graph as it came and close elsewhere; the memory model
itself has the last word. If it measures more than the budget on the planned graph, the graph is
planned again, with more memory where a task took more than planned, else for a smaller budget.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx

from ._compat import group_by_name
from .calls import call_arguments
from .collectives import group_name, is_collective, merge_waits, repeated_waits, short_name
from .context import KnownPlan
from .cost import CollectiveTables, CostModel, GroupTopology, HardwareCard, card_of, tables_of
from .errors import OptionError, OptionTypeError
from .memory import MemoryModel, kept_inputs
from .planner.apply import planned_graph
from .planner.bound import lower_bounds
from .planner.follow import ways_to_follow
from .planner.from_graph import GraphProblem, problem_of_graph
from .planner.plan import InfeasibleBudgetError, Plan, make_plan
from .planner.problem import Problem
from .planner.simulate import PlanError, Step, simulate
from .planner.solve import MOST_EXACT_STATES, is_possible, leanest_schedule, plan
from .planner.splits import WORTH, splits_to_try
from .planner.wishes import NO_WISHES, Wishes
from .prices import GraphPrices
from .rows import RowPlace
from .splitting import num_rows, split_graph

_UNITS = {"": 1, "b": 1, **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}} | {
    f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)
}

#: No budget: 8 EiB.
_TOO_MANY_BYTES = 2**63

#: So often a graph is planned again because the memory model measured more than the budget.
_ATTEMPTS = 6


def schedule_graph(
    gm: fx.GraphModule,
    *,
    hardware: str | Path | HardwareCard,
    tables: str | Path | CollectiveTables | None = None,
    memory_budget: int | str | None = None,
    groups: Mapping[str, int | GroupTopology] | None = None,
    shared_links: Sequence[tuple[str, ...]] = (),
    buckets: Sequence[Sequence[fx.Node]] = (),
    prefetch: Sequence[tuple[fx.Node, fx.Node]] = (),
    max_gathers: int = 0,
    max_reductions: int = 0,
) -> Plan:
    """Merges, splits and orders the collectives of any captured graph, in place; on an error nothing is changed.

    Args:
        gm: a forward, inference or backward graph with ``_c10d_functional`` collectives and
            ``meta["val"]`` on its values; fake tensors and groups that exist only by name will do.
        hardware: a card: its name, its file or itself.
        tables: measured times of collectives (CSV), used where they have rows.
        memory_budget: the most that may be live while the graph runs, inputs that its caller keeps
            included: bytes, or a text like "60GiB" or "500MB". None for no limit.
        groups: ranks, or topology, of process groups by name. Left out, those of a group that torch
            knows, and otherwise what gathers and reduce-scatters of the graph say of their group;
            the ranks of a group then lie side by side, as many to a node as the card has.
        shared_links: names of groups that share a link, ``[("replicate", "shard")]`` for instance: their
            collectives then run one after the other. Left out, groups do not slow each other down.
        buckets: nodes that start collectives, of which each group of nodes is to be one bucket.
        prefetch: pairs of such nodes (a, b): b starts right after the wait for a.
        max_gathers: all-gathers of inputs that may be in flight at a time, a bucket counting once; 0 for any number.
        max_reductions: the same for collectives whose results compute does not read.

    Returns:
        The plan, with predicted times, bounds and reasons.

    Raises:
        CardError, TableError, OptionError, OptionTypeError: a card, table, budget, group or shared link that cannot be
            read; ranks of a group that contradict its collectives; links of groups that are not known.
        InfeasibleBudgetError: no plan keeps the budget; names one that a plan keeps.
        ProblemError: buckets, prefetches or limits that contradict each other, or name other nodes.
        UnpricedGroupError: nothing says how many ranks a group has.
        UntypedGraphError: a collective without ``meta["val"]``.

    Warns (UserWarning), once each, of what ``tables`` lack.
    """
    card = card_of(hardware)
    measured = tables_of(tables)
    told: list[str] = []
    model = CostModel(card=card, tables=measured, groups=topologies(gm, card, groups or {}), told=told)
    _check_links(shared_links, model.groups)
    planned = plan_graph(
        gm,
        model,
        memory_budget=memory_budget,
        wishes=Wishes(
            shared_links=shared_links,
            fixed_buckets=buckets,
            prefetch=prefetch,
            max_gathers=max_gathers,
            max_reductions=max_reductions,
        ),
        device_type=card.device_type,
    )
    for message in told:
        warnings.warn(message, UserWarning, stacklevel=2)
    return _put(gm, planned)


def _check_links(shared_links: Any, groups: Mapping[str, GroupTopology]) -> None:
    is_list = isinstance(shared_links, Sequence) and not isinstance(shared_links, str)
    if not is_list or any(
        isinstance(names, str) or not isinstance(names, Collection) for names in shared_links
    ):
        raise OptionTypeError(
            f"shared_links={shared_links!r} must be a list with the names of the groups on each link, "
            '[("replicate", "shard")] for instance'
        )
    if unknown := [name for names in shared_links for name in names if name not in groups]:
        raise OptionError(
            f"shared_links names {', '.join(map(repr, unknown))}, but the graph and groups= have "
            f"{', '.join(map(repr, groups)) or 'no group'}"
        )


def topologies(
    gm: fx.GraphModule, card: HardwareCard, given: Mapping[str, int | GroupTopology]
) -> dict[str, GroupTopology]:
    """The groups of a graph's collectives: ``given`` ones, then torch's, then as the collectives say.

    Ranks of groups that torch does not know lie side by side, as many to a node as the card has.

    Raises:
        OptionTypeError: ``given`` is no mapping to numbers or topologies.
        OptionError: numbers below 1, or others than a collective of the group says.
    """
    per_node = int(card.ranks_per_node)
    found = _given_topologies(given, per_node)
    collectives = list(filter(is_collective, gm.graph.nodes))
    _check_sizes(collectives, found)
    for name in dict.fromkeys(map(group_name, collectives)):
        if name not in found and (ranks := _ranks_of(name)):
            found[name] = GroupTopology.of_ranks(ranks, per_node)
    for node in collectives:
        name = group_name(node)
        group_size = call_arguments(node).get("group_size")
        if name not in found and group_size is not None:
            found[name] = _side_by_side(group_size, per_node)
    return found


def _given_topologies(given: object, per_node: int) -> dict[str, GroupTopology]:
    if not isinstance(given, Mapping):
        raise OptionTypeError(
            f"groups={given!r} must be ranks, or topologies, by the names of process groups"
        )
    found = {}
    for name, value in given.items():
        if isinstance(value, GroupTopology):
            found[name] = value
        elif isinstance(value, bool) or not isinstance(value, int):
            raise OptionTypeError(
                f"groups[{name!r}]={value!r} must be a number of ranks (an int) or a GroupTopology"
            )
        elif value < 1:
            raise OptionError(f"groups[{name!r}]={value} must be the number of ranks, 1 or more")
        else:
            found[name] = _side_by_side(value, per_node)
    return found


def _check_sizes(collectives: Sequence[fx.Node], given: Mapping[str, GroupTopology]) -> None:
    wrong: dict[str, str] = {}
    for node in collectives:
        name, size = group_name(node), call_arguments(node).get("group_size")
        if name in given and isinstance(size, int) and size != given[name].num_ranks:
            ranks = given[name].num_ranks
            wrong.setdefault(
                name,
                f"groups[{name!r}] has {ranks} ranks, but {node.name} ({short_name(node)}) has group_size={size}",
            )
    if wrong:
        raise OptionError(
            f"{'; '.join(wrong.values())}: give as many as the graph says, or leave the group out"
        )


def _side_by_side(num_ranks: int, per_node: int) -> GroupTopology:
    return GroupTopology(num_ranks=num_ranks, ranks_per_node=min(num_ranks, per_node))


def _ranks_of(name: str) -> list[int]:
    """The ranks of a process group that exists here; none of one that does not."""
    if not dist.is_initialized():
        return []
    try:
        return dist.get_process_group_ranks(group_by_name(name))
    except (RuntimeError, KeyError, ValueError):
        return []


def schedule_with_prices(
    gm: fx.GraphModule,
    prices: GraphPrices,
    *,
    memory_budget: int | str | None = None,
    wishes: Wishes = NO_WISHES,
    device_type: str | None = None,
) -> Plan:
    """Plans and changes a graph in place; on an error nothing is changed.

    Args and errors are those of :func:`plan_graph`.
    """
    planned = plan_graph(
        gm,
        prices,
        memory_budget=memory_budget,
        wishes=wishes,
        device_type=device_type,
    )
    return _put(gm, planned)


def _put(gm: fx.GraphModule, planned: PlannedGraph) -> Plan:
    """Changes the graph that was planned."""
    gm.graph = planned.gm.graph
    gm.recompile()
    return planned.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGraph:
    """A plan, and the graph it makes.

    Attributes:
        gm: a changed copy, or the graph itself where its own order is the plan.
        plan: with predicted times, bounds and reasons.
        known: the plan as another rank can follow it.
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
    places: Mapping[fx.Node, RowPlace] | None = None,
    device_type: str | None = None,
    exact_states: int = MOST_EXACT_STATES,
) -> PlannedGraph:
    """Plans a graph, which stays as it is.

    Args:
        gm: a forward, inference or backward graph with ``_c10d_functional`` collectives and
            ``meta["val"]`` on its values; fake tensors and groups that exist only by name will do.
        prices: seconds of compute, collectives and copies.
        memory_budget: the most that may be live while the graph runs, inputs that its caller keeps
            included: bytes, or a text like "60GiB" or "500MB". None for no limit.
        wishes: what the user insists on: buckets, prefetches, limits, links.
        known: a plan of another rank to follow: its parts, its buckets and their order, and where they stand as
            far as this graph allows.
        places: where the shards lie that these gathers send (``provenance.row_places``).
        device_type: where the graph will run; None for where its values are.
        exact_states: states that the exact search, of a small graph, may look at.

    Raises:
        OptionError, OptionTypeError: a budget that cannot be read.
        InfeasibleBudgetError: no plan keeps the budget; names one that a plan keeps.
        ProblemError: buckets, prefetches or limits that cannot be kept.
        UnpricedGroupError: a collective runs on a group without a price.
        PlanError: ``known`` is no plan of this graph.
    """
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    gm, wishes, places = _with_one_wait_each(gm, wishes, places or {})

    def planned(splits: Mapping[fx.Node, int]) -> tuple[GraphProblem, PlannedGraph]:
        parts, wanted, lying = _with_splits(gm, splits, wishes, places)
        found = problem_of_graph(
            parts, prices, budget_bytes=budget, wishes=wanted, places=lying, device_type=device_type
        )
        if known is None:
            graph, result = _within_budget(parts, found, budget, device_type, exact_states)
        else:
            graph, result = _followed(parts, found, known, budget, device_type)
        return found, _with_known(gm, splits, graph, found, result)

    if known is not None:
        return planned(_known_splits(gm, known))[1]
    found, best = planned({})
    for splits in _splits_to_try(found, best.plan, wishes):
        try:
            _, tried = planned(splits)
        except InfeasibleBudgetError:
            continue
        if tried.plan.seconds <= WORTH * best.plan.seconds:
            return replace(tried, plan=replace(tried.plan, unplanned_seconds=best.plan.unplanned_seconds))
    return best


def _with_one_wait_each(
    gm: fx.GraphModule, wishes: Wishes, places: Mapping[fx.Node, RowPlace]
) -> tuple[fx.GraphModule, Wishes, Mapping[fx.Node, RowPlace]]:
    """A copy without second waits for one result, and what is said of its nodes; without any, as they are."""
    if not repeated_waits(gm.graph):
        return gm, wishes, places
    copied, twin = split_graph(gm, {})
    merge_waits(copied.graph)
    return copied, wishes.on(twin), {twin[node]: place for node, place in places.items()}


def _with_splits(
    gm: fx.GraphModule,
    splits: Mapping[fx.Node, int],
    wishes: Wishes,
    places: Mapping[fx.Node, RowPlace],
) -> tuple[fx.GraphModule, Wishes, Mapping[fx.Node, RowPlace]]:
    """The graph with some collectives split, and what is said of its nodes; without any, as they are."""
    if not splits:
        return gm, wishes, places
    copied, twin = split_graph(gm, splits)
    return copied, wishes.on(twin), {twin[node]: place for node, place in places.items() if node in twin}


def _with_known(
    gm: fx.GraphModule,
    splits: Mapping[fx.Node, int],
    planned: fx.GraphModule,
    found: GraphProblem,
    result: Plan,
) -> PlannedGraph:
    index = {node: number for number, node in enumerate(filter(is_collective, gm.graph.nodes))}
    return PlannedGraph(
        gm=planned,
        plan=replace(result, splits=tuple((node.name, num_parts) for node, num_parts in splits.items())),
        known=KnownPlan(
            num_tasks=len(found.problem.tasks),
            steps=tuple((step.position, step.is_start, step.members) for step in result.steps),
            splits=tuple((index[node], num_parts) for node, num_parts in splits.items()),
        ),
    )


def _known_splits(gm: fx.GraphModule, known: KnownPlan) -> dict[fx.Node, int]:
    collectives = list(filter(is_collective, gm.graph.nodes))
    for index, num_parts in known.splits:
        if index >= len(collectives) or num_parts > num_rows(collectives[index]):
            raise PlanError(
                f"the plan to follow has collective {index} in {num_parts} parts, which it cannot have here"
            )
    return {collectives[index]: num_parts for index, num_parts in known.splits}


def _splits_to_try(found: GraphProblem, result: Plan, wishes: Wishes) -> list[dict[fx.Node, int]]:
    """What the user names stays whole, and so do reductions where the user limits how many are open."""
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
    gm: fx.GraphModule, found: GraphProblem, known: KnownPlan, budget: int | None, device_type: str | None
) -> tuple[fx.GraphModule, Plan]:
    """The graph with the buckets and the sequence of a known plan, within the budget."""
    before = simulate(found.problem.without_wishes(), found.unplanned).seconds
    peaks = []
    for steps in ways_to_follow(found.problem, known):
        planned = planned_graph(gm, found, steps)
        peaks.append(measured_peak(planned, device_type))
        if budget is None or peaks[-1] <= budget:
            result = make_plan(
                found.problem, steps, solver="followed", unplanned_seconds=before, notes=found.notes
            )
            return planned, replace(result, peak_bytes=peaks[-1], budget_bytes=budget)
    assert budget is not None
    raise InfeasibleBudgetError(budget, min(peaks), is_smallest=False)


def _within_budget(
    gm: fx.GraphModule, found: GraphProblem, budget: int | None, device_type: str | None, exact_states: int
) -> tuple[fx.GraphModule, Plan]:
    """The graph with the fastest plan that the memory model lets pass, the order in which it came included."""
    before = measured_peak(gm, device_type)
    came = simulate(found.problem.without_wishes(), found.unplanned).seconds
    may_stay = is_possible(replace(found.problem, budget_bytes=None), found.unplanned)
    fits = may_stay and (budget is None or before <= budget)
    problem = found.problem
    for _ in range(_ATTEMPTS):
        try:
            result = plan(problem, unplanned=found.unplanned, notes=found.notes, exact_states=exact_states)
        except InfeasibleBudgetError:
            break
        planned = planned_graph(gm, found, result.steps)
        live = measured_live(planned, device_type)
        peak = max(live.values(), default=0)
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
    peak = measured_peak(planned, device_type)
    if peak <= budget:
        return planned, replace(
            _plan_of(found, leanest, "leanest", came), peak_bytes=peak, budget_bytes=budget
        )
    raise InfeasibleBudgetError(budget, min(peak, before) if may_stay else peak, is_smallest=False)


def _plan_of(found: GraphProblem, steps: Sequence[Step], solver: str, unplanned_seconds: float) -> Plan:
    """The plan for steps that were not found for this problem and its budget, with its own bounds.

    Where the problem counts more for the steps than the budget, which the memory model does not, the bounds allow that.
    """
    problem = replace(found.problem, budget_bytes=None)
    if found.problem.budget_bytes is not None:
        most = max(found.problem.budget_bytes, simulate(problem, steps).peak_bytes)
        problem = replace(problem, budget_bytes=most)
    return make_plan(problem, steps, solver=solver, unplanned_seconds=unplanned_seconds, notes=found.notes)


def _with_excess(problem: Problem, result: Plan, live: Mapping[str, int], budget: int) -> Problem:
    """The problem with more memory in the tasks that took more than planned, if one took more than the budget.

    If none did, it was a copy or a collective: the problem with a budget smaller by the excess.
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


def measured_live(gm: fx.GraphModule, device_type: str | None) -> dict[str, int]:
    """Bytes live at each node, by the memory model, inputs that the caller keeps included."""
    model = MemoryModel(gm, kept=kept_inputs(gm), device_type=device_type)
    nodes = list(gm.graph.nodes)
    timeline = model.timeline(nodes)
    return {
        node.name: live + timeline.kept_bytes for node, live in zip(nodes, timeline.live_bytes, strict=True)
    }


def measured_peak(gm: fx.GraphModule, device_type: str | None) -> int:
    """The most of :func:`measured_live`."""
    return max(measured_live(gm, device_type).values(), default=0)


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from a text like "60GiB" (1024) or "2GB" (1000).

    Raises:
        OptionError: it cannot be read, is not positive, or more than any machine has.
        OptionTypeError: it is neither a number of bytes nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise OptionTypeError(f"memory_budget={value!r} must be bytes (an int) or a text like '60GiB'")
    num_bytes = value if isinstance(value, int) else _read_bytes(value)
    if num_bytes <= 0:
        raise OptionError(f"memory_budget={value!r} must be positive")
    if num_bytes >= _TOO_MANY_BYTES:
        raise OptionError(
            "memory_budget is 8 EiB or more; write what a rank has, or leave it out for no more than FSDP2 holds"
        )
    return num_bytes


def _read_bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = _UNITS.get(match.group(2)) if match else None
    if match is None or unit is None:
        raise OptionError(
            f"memory_budget={text!r} cannot be read; write bytes, or a text like '60GiB' or '2GB'"
        )
    return int(Decimal(match.group(1)) * unit)
