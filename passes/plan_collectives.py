"""plan_collectives: merge, split and place all collectives as the planner finds best under the cost model.

This is :func:`graphshard.schedule_graph` as a pass; docs/reference/planning.md has the model and algorithm. Prices come
from the context, and so does a plan of another rank to follow. Compute keeps its order, except what moves beside
collectives that compute reads soon (``move_compute``). Memory as the memory model counts it stays within
``memory_budget``. If the user named the units that a unit prefetches, the unit is one bucket a group, and
their gathers start right after its wait.

Before (latency is expensive)::

    %all_gather_into_tensor_0 = all_gather_into_tensor(%a)
    %wait_tensor_0 = wait_tensor(%all_gather_into_tensor_0)
    %mm_0 = mm(%x, %wait_tensor_0)
    %all_gather_into_tensor_1 = all_gather_into_tensor(%b)
    %wait_tensor_1 = wait_tensor(%all_gather_into_tensor_1)
    %mm_1 = mm(%mm_0, %wait_tensor_1)

After::

    %pack_0 = pack([%a, %b], 1)
    %all_gather_into_tensor_0 = all_gather_into_tensor(%pack_0)
    %wait_tensor_0 = wait_tensor(%all_gather_into_tensor_0)
    %unpack_0 = unpack(%wait_tensor_0, 2, [8, 8])
    %getitem_0 = getitem(%unpack_0, 0)
    %mm_0 = mm(%x, %getitem_0)
    ...

Numerics: bitwise exact for gathers. A reduction keeps the operands of each element, and their order as far as the
algorithm of the process group does not depend on the size or the position in the buffer.

Does not handle:

- collectives that cannot move (:mod:`graphshard.planner.movable_nodes`), such as messages between two ranks and
  results that another op writes to: they stay, and are reported as skipped;
- merging of collectives with symbolic sizes: each is placed alone;
- groups without a price: these are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

from torch import fx

from graphshard.budget_text import parse_bytes
from graphshard.errors import OptionError, PassError
from graphshard.ir import group_name, is_collective
from graphshard.memory import resident_bytes, waiting_bytes
from graphshard.pipeline import (
    Fact,
    PassContext,
    PassReport,
    prepared_nodes,
    reduced_parameters,
    row_places,
    shards_behind,
)
from graphshard.planner import (
    Movable,
    PlannedGraph,
    Wishes,
    default_peak,
    held_beside,
    plan_graph,
    plan_near,
    plan_within,
)
from graphshard.planner.search import MOST_EXACT_STATES

#: The budget "default": the peak of units gathered one ahead.
DEFAULT = "default"

#: Values of ``backward_prefetch``.
BACKWARD_PREFETCHES = ("", "pre", "post")


@dataclass(frozen=True, kw_only=True)
class PlanCollectives:
    """Options of the pass; see the module docstring.

    Attributes:
        merge: whether collectives may be merged or split; if not, they are only placed.
        memory_budget: the most that may be live while the graph runs, with inputs that its caller keeps and what
            else is held meanwhile (:func:`~graphshard.planner.half_budget.held_beside`): bytes, or a text like
            "60GiB". None for no limit. "default" for the peak of units gathered one ahead
            (:func:`~graphshard.planner.half_budget.default_peak`; of both halves of a step, if the context knows
            it), or a little more if no plan is found within it.
        max_gathers: buckets of gathers that may be in flight at a time; 0 for any number.
        backward_prefetch: when a backward gathers the next unit, in the order in which it reads them. "pre": right
            after the wait for the unit before, whose parameters are one bucket a group. "post": not before
            the gradients of that unit exist. "": where the plan is best. Prefetches that the user named take
            precedence.
        forward_prefetch: the same for a forward: "pre" or "".
        move_compute: whether compute may move beside collectives that compute reads soon (tensor parallelism's).
        exact_states: the most states that the exact search, of a small graph, may look at: some 10,000 take a
            second.
        polishes: whether the best schedules are improved by small changes.

    Raises:
        OptionError: a budget or a prefetch is not one of these.
    """

    name: ClassVar[str] = "plan_collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED, Fact.SCHEDULED})

    merge: bool = True
    memory_budget: int | str | None = None
    max_gathers: int = 0
    backward_prefetch: str = ""
    forward_prefetch: str = ""
    move_compute: bool = True
    exact_states: int = MOST_EXACT_STATES
    polishes: bool = True

    def __post_init__(self) -> None:
        if self.backward_prefetch not in BACKWARD_PREFETCHES:
            known = ", ".join(map(repr, BACKWARD_PREFETCHES))
            raise OptionError(f"backward_prefetch={self.backward_prefetch!r} must be one of {known}")
        if self.forward_prefetch not in ("", "pre"):
            raise OptionError(f"forward_prefetch={self.forward_prefetch!r} must be '' or 'pre'")
        if self.memory_budget not in (None, DEFAULT):
            parse_bytes(self.memory_budget)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "collectives" and "buckets"; the report holds the plan, with its predicted times.

        Raises:
            PassError: the context has no prices.
            InfeasibleBudgetError: no plan keeps the budget; names one that a plan keeps.
            UnpricedGroupError: a collective runs on a group without a price.
        """
        if ctx.prices is None:
            raise PassError(
                "plan_collectives: the context has no prices; give PassContext(prices=CostModel(...))"
            )
        prices, wishes, places = ctx.prices, self._wishes(gm, ctx), row_places(gm, ctx)
        prepared = prepared_nodes(gm, ctx)

        def plan(memory_budget: int | str | None) -> PlannedGraph:
            return plan_graph(
                gm,
                prices,
                memory_budget=memory_budget,
                wishes=wishes,
                known=ctx.known_plan,
                places=places,
                prepared=prepared,
                device_type=ctx.device_type,
                scratch=ctx.scratch,
                move_compute=self.move_compute,
                exact_states=self.exact_states,
                polishes=self.polishes,
                limit=ctx.limit,
            )

        notes: list[str] = []
        if self.memory_budget is None:
            planned = plan(None)
        elif self.memory_budget != DEFAULT:
            planned = plan_within(plan, parse_bytes(self.memory_budget), held_beside(gm, ctx))
        elif ctx.known_plan is not None:
            planned = plan(None)  # the rank that planned has seen to it
        else:
            beside = ctx.default_peak_bytes
            peak = (
                default_peak(gm, ctx) if beside is None else beside + resident_bytes(gm) + waiting_bytes(gm)
            )
            planned = plan_near(plan, peak, notes)
        changed = _names(planned.gm) != _names(gm)
        if changed:
            gm.graph = planned.gm.graph
        buckets = planned.plan.buckets
        return PassReport(
            changed=changed,
            counts={"collectives": sum(len(bucket.names) for bucket in buckets), "buckets": len(buckets)},
            skipped=(*planned.plan.notes, *notes),
            planned=planned,
        )

    def _wishes(self, gm: fx.GraphModule, ctx: PassContext) -> Wishes:
        """The user's limits and prefetches; a prefetch becomes pairs of gathers, and its units become buckets."""
        units = _units(gm, ctx)
        order = list(units)
        named = [
            (unit, other)
            for index, unit in enumerate(order)
            for other in ctx.prefetched_after(unit)
            if other in order[index + 1 :]
        ]
        said = {other for _, other in named}
        reduced = _reductions(gm, ctx)

        def by_rule(order: list[str]) -> list[tuple[str, str]]:
            pairs = pairwise(order)
            return [
                (unit, other) for unit, other in pairs if not ctx.prefetched_after(unit) and other not in said
            ]

        rule = self.forward_prefetch if ctx.first_gradient is None else self.backward_prefetch
        if rule == "pre":
            named += by_rule(order)
        fixed = {unit: units[unit] for unit in chain(*named)}
        return Wishes(
            fixed_buckets=list(chain(*fixed.values())) if self.merge else [],
            prefetch=[pair for unit, other in named for pair in self._pairs(units[unit], units[other])],
            behind=[
                (reduction, gather)
                for unit, other in (by_rule(_with_kept(order, reduced)) if rule == "post" else ())
                for reduction in reduced.get(unit, ())
                for gather in chain(*units.get(other, ()))
            ],
            max_gathers=self.max_gathers,
            max_reductions=ctx.max_reductions,
            merge=self.merge,
        )

    def _pairs(self, first: list[list[fx.Node]], then: list[list[fx.Node]]) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs that start the gathers of one unit after the last of another; of merged gathers, one is enough."""
        last = first[-1][-1]
        return [(last, gather) for bucket in then for gather in (bucket[:1] if self.merge else bucket)]


def _units(gm: fx.GraphModule, ctx: PassContext) -> dict[str, list[list[fx.Node]]]:
    """The gathers of each unit by group; units in the order in which compute needs them."""
    units: dict[str, dict[str, list[fx.Node]]] = {}
    for gather in Movable(gm, ctx).gathers:
        binding = shards_behind(gather, ctx)[0]
        of_unit = units.setdefault(binding.unit, {})
        of_unit.setdefault(group_name(gather), []).append(gather)
    return {unit: list(of_unit.values()) for unit, of_unit in units.items()}


def _reductions(gm: fx.GraphModule, ctx: PassContext) -> dict[str, list[fx.Node]]:
    """The reductions of the gradients of each unit, in graph order."""
    served = reduced_parameters(gm, ctx)
    reductions: dict[str, list[fx.Node]] = {}
    for node in filter(is_collective, gm.graph.nodes):
        if bindings := served.get(node):
            reductions.setdefault(bindings[0].unit, []).append(node)
    return reductions


def _with_kept(order: list[str], reduced: dict[str, list[fx.Node]]) -> list[str]:
    """The units that gather, and between them those whose gathered parameters were kept, by their first gradients."""
    place = {unit: number for number, unit in enumerate(reduced)}
    found = list(order)
    for kept in (unit for unit in reduced if unit not in order):
        later = (index for index, unit in enumerate(found) if place.get(unit, -1) > place[kept])
        found.insert(next(later, len(found)), kept)
    return found


def _names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]
