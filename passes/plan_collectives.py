"""plan_collectives: merge, split and place all collectives as the planner finds best under the cost model.

This is :func:`graphshard.schedule_graph` as a pass; docs/reference/planning.md has the model and algorithm. Prices come
from the context, and so does a plan of another rank to follow. Compute keeps its order, except what moves beside
collectives that compute reads soon (``move_compute``). Memory as the memory model counts it stays within
``memory_budget``. If the user named the units that a unit prefetches, the unit is one bucket a group, and
their gathers start right after its wait. In a backward for which the unit has kept its parameters, they start no sooner
than the backward comes to the unit. Collectives and hooks of the user's own are called once per unit.

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

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

from torch import fx

from graphshard.budget_text import parse_bytes
from graphshard.errors import OptionError, PassError
from graphshard.ir import (
    ALL_REDUCE_HOOK,
    CUSTOM_ALL_GATHER,
    CUSTOM_REDUCE_SCATTER,
    GATHERS,
    copy_graph,
    group_name,
    output_values,
)
from graphshard.memory import resident_bytes, waiting_bytes
from graphshard.pipeline import (
    KINDS,
    Fact,
    PassContext,
    PassReport,
    bucket_keys,
    prepared_nodes,
    reduced_parameters,
    row_places,
    shards_behind,
    ungathered_readers,
)
from graphshard.planner import (
    Movable,
    PlannedGraph,
    Wishes,
    default_peak,
    held_beside,
    merge_by_unit,
    plan_graph,
    plan_near,
    plan_within,
)
from graphshard.planner.search import MOST_EXACT_STATES

#: The budget "default": the peak of units gathered one ahead.
DEFAULT = "default"

#: Values of ``backward_prefetch``.
BACKWARD_PREFETCHES = ("", "pre", "post")

#: Calls of objects that the user gave a unit.
OWN_COLLECTIVES = (CUSTOM_ALL_GATHER, CUSTOM_REDUCE_SCATTER, ALL_REDUCE_HOOK)


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
            after the wait for the unit before, whose parameters are one bucket a group; if they were kept, not before
            the backward comes to that unit. "post": not before the gradients of that unit exist; if it has none, not
            before its parameters were read. "": where the plan is best. Prefetches that the user named take precedence.
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
        source = _with_own_by_unit(gm, ctx) if self.merge else gm
        prices, wishes, places = ctx.prices, self._wishes(source, ctx), row_places(source, ctx)
        prepared = prepared_nodes(source, ctx)

        def plan(memory_budget: int | str | None) -> PlannedGraph:
            return plan_graph(
                source,
                prices,
                memory_budget=memory_budget,
                wishes=wishes,
                known=ctx.known_plan,
                start=ctx.start,
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
        gathers = Movable(gm, ctx).gathers
        units, ends = _units(gathers, ctx), _ends(gm, gathers, ctx)
        order = _with_kept(list(units), ends)
        named = _named(order, units, ctx)
        said = {other for _, other in named}
        by_rule = [
            (unit, other)
            for unit, other in pairwise(order)
            if other in units and other not in said and not ctx.prefetched_after(unit)
        ]
        rule = self.forward_prefetch if ctx.first_gradient is None else self.backward_prefetch
        wanted = [*named, *by_rule] if rule == "pre" else named
        entered = _entered(gm, ends)
        behind = [([entered[unit]], other) for unit, other in wanted if unit not in units and unit in entered]
        if rule == "post":
            behind += [(ends[unit], other) for unit, other in by_rule if unit in ends]
        fixed = {unit: units[unit] for unit in chain(*wanted) if unit in units}
        return Wishes(
            fixed_buckets=list(chain(*fixed.values())) if self.merge else [],
            prefetch=[
                pair
                for unit, other in wanted
                if unit in units
                for pair in self._pairs(units[unit], units[other])
            ],
            behind=[
                (end, gather) for nodes, other in behind for end in nodes for gather in chain(*units[other])
            ],
            max_gathers=self.max_gathers,
            max_reductions=ctx.max_reductions,
            merge=self.merge,
        )

    def _pairs(self, first: list[list[fx.Node]], then: list[list[fx.Node]]) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs that start the gathers of one unit after the last of another; of merged gathers, one is enough."""
        last = first[-1][-1]
        return [(last, gather) for bucket in then for gather in (bucket[:1] if self.merge else bucket)]


def _with_own_by_unit(gm: fx.GraphModule, ctx: PassContext) -> fx.GraphModule:
    """A copy in which the user's own collectives and hooks are called once per unit; the graph itself without any.

    The hook of a unit gets all of its reduced gradients, so these are reduced in one bucket, too.
    """
    if not any(node.target in OWN_COLLECTIVES for node in gm.graph.nodes):
        return gm
    copied = copy_graph(gm)
    keys = bucket_keys(copied, ctx)
    hooked = {unit for kind, unit, *_ in keys.values() if kind == KINDS[ALL_REDUCE_HOOK]}
    own = {
        node: key
        for node, key in keys.items()
        if node.target in OWN_COLLECTIVES or (key[1] in hooked and node.target not in GATHERS)
    }
    merge_by_unit(copied, own, row_places(copied, ctx))
    return copied


def _units(gathers: list[fx.Node], ctx: PassContext) -> dict[str, list[list[fx.Node]]]:
    """The gathers of each unit by group; units in the order in which compute needs them, as ``gathers`` are."""
    units: dict[str, dict[str, list[fx.Node]]] = {}
    for gather in gathers:
        binding = shards_behind(gather, ctx)[0]
        of_unit = units.setdefault(binding.unit, {})
        of_unit.setdefault(group_name(gather), []).append(gather)
    return {unit: list(of_unit.values()) for unit, of_unit in units.items()}


def _named(
    order: list[str], units: Mapping[str, list[list[fx.Node]]], ctx: PassContext
) -> list[tuple[str, str]]:
    """The prefetches that the user named. Of several that name one unit the first counts: it gathers it already."""
    found: dict[str, str] = {}
    for index, unit in enumerate(order):
        for other in ctx.prefetched_after(unit):
            if other in units and other in order[index + 1 :]:
                found.setdefault(other, unit)
    return [(unit, other) for other, unit in found.items()]


def _ends(gm: fx.GraphModule, gathers: list[fx.Node], ctx: PassContext) -> dict[str, list[fx.Node]]:
    """What the backward of each unit ends with, in graph order.

    These are the reductions of its gradients, and gradients that wait for a later micro-batch. Of a unit without any
    they are the nodes that compute with its gathered parameters. Units are in the order of their first such node.
    """
    if ctx.first_gradient is None:
        return {}
    unit_of = {node: bindings[0].unit for node, bindings in reduced_parameters(gm, ctx).items()}
    outputs = output_values(gm.graph)
    for binding in ctx.parameters:
        gradient = ctx.gradient_of(binding, outputs) if binding.gradient in ctx.unreduced else None
        if gradient is not None:
            unit_of[gradient] = binding.unit
    with_gradients = set(unit_of.values())
    for gather in gathers:
        unit = shards_behind(gather, ctx)[0].unit
        if unit not in with_gradients:
            readers = chain.from_iterable(map(ungathered_readers, gather.users))
            unit_of |= dict.fromkeys(readers, unit)
    ends: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node in unit_of:
            ends.setdefault(unit_of[node], []).append(node)
    return ends


def _with_kept(order: list[str], ends: Mapping[str, list[fx.Node]]) -> list[str]:
    """The units that gather, and between them those whose gathered parameters were kept, by their first gradients."""
    place = {unit: number for number, unit in enumerate(ends)}
    found = list(order)
    for kept in (unit for unit in ends if unit not in order):
        later = (index for index, unit in enumerate(found) if place.get(unit, -1) > place[kept])
        found.insert(next(later, len(found)), kept)
    return found


def _entered(gm: fx.GraphModule, ends: Mapping[str, list[fx.Node]]) -> dict[str, fx.Node]:
    """The last of ``ends`` in front of the first one of each unit: the backward goes on with that unit then."""
    unit_of = {node: unit for unit, nodes in ends.items() for node in nodes}
    found: dict[str, fx.Node | None] = {}
    last: fx.Node | None = None
    for node in filter(unit_of.__contains__, gm.graph.nodes):
        found.setdefault(unit_of[node], last)
        last = node
    return {unit: node for unit, node in found.items() if node is not None}


def _names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]
