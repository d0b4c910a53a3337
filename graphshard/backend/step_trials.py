"""Trials of choices for both halves: each cuts a copy of the joint graph, and plans the halves.

The cost of keeping a unit's gathered parameters shows only in both halves: the backward has one gather less, memory is
held in between, and both schedules change. The same is true of activations that are recomputed. So a trial runs
``keep_gathered``, ``recompute_activations``, the partitioner, the passes on halves and the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import fx
from torch._ops import OpOverload

from ..cost import GraphPrices
from ..errors import InfeasibleBudgetError
from ..ir import UNSHARD, UnshardCall, argument, copy_graph, output_values, tensor_bytes
from ..memory import resident_bytes
from ..passes import KeepGathered, PlanCollectives
from ..pipeline import KnownPlan, PassContext, Pipeline, context_from_shard_ops, pieces_of
from ..planner import SHARES, KeepingCost, PlannedGraph, choose_saved, default_peak, extend_kept
from ..planner.search import EXACT_STATES
from ..progress import say_nothing
from .inductor import partition_as_inductor, saved_share, type_rng_states
from .step_choice import StepChoice

#: The default's plan and one trial take about so many times what cutting and lowering the default's halves takes. GPT
#: of 4 layers is cut in 2.2 s (for a later trial in 0.9 s) and planned in 1.3 s; of 8 layers in 4.3, 2.0 and 3.5 s.
_TRIAL_CUTTINGS = 1.2

#: Gives the bytes that may be live in a half, from the half and its context.
BudgetOf = Callable[[fx.GraphModule, PassContext], int | str]


#: Gives the cost of a choice; raises InfeasibleBudgetError if no plan keeps the budget.
CostOf = Callable[[StepChoice], KeepingCost]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTrials:
    """The joint graph that choices are tried on, and the passes to try them with.

    Attributes:
        gm: a joint graph at level 1; it is not changed.
        context: what passes on it know.
        tag: the joint passes behind ``keep_gathered``.
        lower: the passes on a half in front of the planner.
        place: the planning pass. Trials change its budget and search for a shorter time: the choice is planned again.
        prices: gives the prices of a half.
        recomputes: activations may be recomputed.
        tell: takes lines of progress.
    """

    gm: fx.GraphModule
    context: PassContext
    tag: Pipeline
    lower: Pipeline
    place: PlanCollectives
    prices: Callable[[fx.GraphModule], GraphPrices]
    recomputes: bool = True
    tell: Callable[[str], None] = say_nothing

    def open_units(self) -> list[str]:
        """Units for which the user left open whether they keep their parameters, in the order of their last use."""
        calls = [call for call in self._calls() if not call.reshard_fixed and call.group_size > 1]
        return list(dict.fromkeys(call.unit for call in reversed(calls)))[::-1]

    def default(self) -> list[str]:
        """Units that keep their parameters by default."""
        return list(dict.fromkeys(call.unit for call in self._calls() if call.reshard == 1))

    def choose(self, budget_of: BudgetOf | None, *, extends: bool = True) -> StepChoice:
        """Chooses for the open units; without a budget there must be some.

        Args:
            budget_of: the user's budget; activations may be recomputed to keep it. Without one, no half holds more than
                the halves of the default choice with one unit gathered ahead.
            extends: without a budget, units beside the default ones may be kept.

        Raises:
            InfeasibleBudgetError: no choice keeps the user's budget.
        """
        units, default = self.open_units(), self.default()
        if budget_of is not None:
            return self.choose_by(lambda choice: self._cost(choice, budget_of))
        limit = self.context.limit
        began = limit.spent()
        by_default = list(self._halves(None))
        cutting = limit.spent() - began
        peak = max(default_peak(half, ctx) - resident_bytes(half) for half, ctx in by_default)

        def within(half: fx.GraphModule, ctx: PassContext) -> int:
            return peak + resident_bytes(half)

        kept = tuple(unit for unit in units if unit in default)

        first: list[KeepingCost] = []

        def cost(choice: StepChoice) -> KeepingCost:
            if first:  # units are kept by the backward: the forward's collectives are those of the default
                return self._cost_of(self._halves(choice), within, first[0].plans[:1])
            first.append(self._cost_of(by_default, within))
            return first[0]

        told, plans = self._told(cost), ()

        # Without a choice, halves are not cut again. The default's halves are planned only to compare, so not if the
        # time will end before another choice is planned, too.
        has_others = extends and any(unit not in kept for unit in units)
        if has_others and not limit.is_over(_TRIAL_CUTTINGS * cutting):
            with suppress(InfeasibleBudgetError):  # the plan of the default's halves takes a little more
                found = extend_kept(units, kept, lambda chosen: told(StepChoice(kept=chosen)), limit)
                kept, plans = found.units, found.cost.plans
        return StepChoice(kept=kept, peak_bytes=peak, input_bytes=self.input_bytes(), plans=plans)

    def _told(self, cost_of: CostOf) -> CostOf:
        """The same function, which tells what it tries and the best so far."""
        found: list[float] = []
        num_tried = 0

        def told(choice: StepChoice) -> KeepingCost:
            nonlocal num_tried
            num_tried += 1
            best = f", best so far {1e3 * min(found):.0f} ms" if found else ""
            self.tell(f"trial {num_tried}, {len(choice.kept)} units keep their parameters{best}")
            cost = cost_of(choice)
            found.append(cost.seconds)
            return cost

        return told

    def input_bytes(self) -> int:
        """Bytes of all inputs of the joint graph, tangents included."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        return sum(tensor_bytes(node.meta.get("val")) for node in inputs)

    def _calls(self) -> list[UnshardCall]:
        return [
            UnshardCall(*node.args) for node in self.gm.graph.find_nodes(op="call_function", target=UNSHARD)
        ]

    def choose_by(self, cost_of: CostOf) -> StepChoice:
        """Chooses kept units and saved activations within the user's budget.

        Args:
            cost_of: gives the cost of a choice; raises ``InfeasibleBudgetError`` if no plan keeps the budget.

        Raises:
            InfeasibleBudgetError: no choice keeps the budget.
        """
        default = StepChoice(kept=tuple(self.default()), input_bytes=self.input_bytes())
        with_share: dict[float | None, StepChoice] = {None: default}
        tried: dict[tuple[float | None, tuple[str, ...]], KeepingCost] = {}
        cost_of = self._told(cost_of)

        def cost(kept: tuple[str, ...], share: float | None) -> KeepingCost:
            if share not in with_share:
                with_share[share] = self._saving(share)
            tried[share, kept] = cost_of(replace(with_share[share], kept=kept))
            return tried[share, kept]

        may_recompute = self.recomputes and saved_share() == 1.0 and not draws_random_numbers(self.gm.graph)
        shares = SHARES if may_recompute else ()
        share, kept = choose_saved(self.open_units(), default.kept, cost, shares, self.context.limit)
        plans = tried[share, kept].plans
        return replace(with_share[share], kept=kept, input_bytes=default.input_bytes, plans=plans)

    def _saving(self, share: float | None) -> StepChoice:
        """What the partitioner recomputes if it saves a share of the activations, with the default units."""
        trial = copy_graph(self.gm)
        forward, backward = self._partitioned(trial, self.tag, share)
        ops = {
            node.name
            for node in forward.graph.nodes
            if node.op == "call_function" and node.target is not UNSHARD
        }
        behind_results = output_values(forward.graph)[self.context.first_gradient :]
        saved = [value.name for value in behind_results if isinstance(value, fx.Node)]
        return StepChoice(
            kept=(),
            saved_share=share,
            recomputed=tuple(node.name for node in backward.graph.nodes if node.name in ops),
            saved=tuple(name for name in saved if name in ops),
        )

    def _cost(self, choice: StepChoice, budget_of: BudgetOf) -> KeepingCost:
        """The cost of both halves with this choice.

        Raises:
            InfeasibleBudgetError: no plan keeps the budget; of two errors, the one of the half that needs more.
        """
        return self._cost_of(self._halves(choice), budget_of)

    def _cost_of(
        self,
        halves: Iterable[tuple[fx.GraphModule, PassContext]],
        budget_of: BudgetOf,
        starts: Sequence[KnownPlan] = (),
    ) -> KeepingCost:
        """The cost of some halves; the plans of the first ones start from ``starts``."""
        found: list[PlannedGraph] = []
        refused: list[InfeasibleBudgetError] = []
        for (half, ctx), start in zip_longest(halves, starts):
            try:
                found.append(self.plan(half, replace(ctx, start=start), budget_of(half, ctx)))
            except InfeasibleBudgetError as error:
                refused.append(error)
        if refused:
            raise max(refused, key=lambda error: error.smallest_bytes)
        return KeepingCost(
            seconds=sum(planned.plan.seconds for planned in found),
            peak_bytes=max(planned.plan.peak_bytes for planned in found),
            plans=tuple(planned.known for planned in found),
        )

    def plan(self, half: fx.GraphModule, ctx: PassContext, memory_budget: int | str) -> PlannedGraph:
        """Plans a half at level 2, in place.

        Raises:
            InfeasibleBudgetError: no plan keeps the budget.
        """
        place = replace(self.place, memory_budget=memory_budget, exact_states=EXACT_STATES, polishes=False)
        planned = place.run(half, replace(ctx, prices=self.prices(half))).planned
        assert isinstance(planned, PlannedGraph)
        return planned

    def _halves(self, choice: StepChoice | None) -> Iterator[tuple[fx.GraphModule, PassContext]]:
        """Forward and backward at level 2 with a choice; None for the default."""
        for half, ctx in self.cut(choice):
            self.lower.run_unchecked(half, ctx)
            yield half, ctx

    def cut(self, choice: StepChoice | None) -> Iterator[tuple[fx.GraphModule, PassContext]]:
        """Forward and backward at level 1 with a choice; None for the default."""
        trial, tag = copy_graph(self.gm), self.tag
        if choice is not None:
            Pipeline(KeepGathered(units=choice.kept), given=self.tag.given).run_unchecked(trial, self.context)
            tag = choice.extended(tag)
        context = replace(
            context_from_shard_ops(trial, extended=self.context.extended),
            device_type=self.context.device_type,
            scratch=self.context.scratch,
            resident_bytes=self.context.resident_bytes,
            limit=self.context.limit,
            pieces=pieces_of(trial),
        )
        forward, backward = self._partitioned(trial, tag)
        yield forward, context.for_forward()
        yield backward, context.for_backward()

    def _partitioned(
        self, trial: fx.GraphModule, tag: Pipeline, share: float | None = None
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Tags a joint graph and cuts it; ``share`` as for ``partition_as_inductor``."""
        known = self.context
        found = context_from_shard_ops(trial, extended=known.extended)
        context = replace(found, device_type=known.device_type)
        tag.run_unchecked(trial, context)
        assert context.first_gradient is not None
        parameters = [binding.position for binding in context.parameters]
        halves = partition_as_inductor(trial, context.first_gradient, parameters, lambda _: None, share)
        for half in (halves.forward, halves.backward):
            type_rng_states(half)
        return halves.forward, halves.backward


def draws_random_numbers(graph: fx.Graph) -> bool:
    """Whether an op without a recompute tag may draw random numbers; attention without dropout does not.

    torch's partitioner restores the random state of tagged ops only (github.com/pytorch/pytorch/issues/190758).
    """
    return any(
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and "recompute" not in node.meta
        and argument(node, "dropout_p") != 0.0
        for node in graph.nodes
    )
