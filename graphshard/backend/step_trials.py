"""A joint graph cut into halves and planned, with one choice of kept units and saved activations after the other.

What it costs that a unit keeps its gathered parameters shows only in both halves: a gather less in the backward,
memory in between, and another schedule on either side; so it is with activations that are computed again. So a choice
is tried on a copy of the joint graph: ``keep_gathered``, ``recompute_activations``, the partitioner, the passes on
halves, the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..cost import GraphPrices
from ..errors import InfeasibleBudgetError
from ..ir import UNSHARD, UnshardCall, argument, copy_graph, output_values, tensor_bytes
from ..memory import resident_bytes
from ..passes import KeepGathered, PlanCollectives, RecomputeActivations
from ..pipeline import PassContext, Pipeline, context_from_shard_ops, pieces_of
from ..planner import SHARES, KeepingCost, PlannedGraph, choose_saved, default_peak, extend_kept
from ..planner.search import EXACT_STATES, Plan
from .inductor_config import partition_as_inductor, saved_share, type_rng_states

#: Bytes that may be live in a half, from the half and its context.
BudgetOf = Callable[[fx.GraphModule, PassContext], int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """What was chosen for both halves.

    Attributes:
        kept: the units that keep their parameters.
        peak_bytes: the most that a half holds with the default choice, its units gathered one ahead, beside inputs
            that live through the step (each half reads only some of those), where nothing else limits the plans.
        input_bytes: of all inputs of the joint graph: for steps of other sizes ``peak_bytes`` says nothing.
        kept_between: the units whose parameters stay gathered between micro-batches, while gradients are not reduced.
        saved_share: of the activations that the partitioner would save by itself; None if all of these are saved.
        recomputed, saved: what that share comes to, by the names of nodes; see ``recompute_activations``.
    """

    kept: tuple[str, ...]
    peak_bytes: int | None = None
    input_bytes: int = 0
    kept_between: tuple[str, ...] = ()
    saved_share: float | None = None
    recomputed: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            [f"units that keep their parameters: {', '.join(self.kept) or 'none'}", *self.notes()]
        )

    def notes(self) -> list[str]:
        """For people: what stays between micro-batches, and that activations are computed again."""
        between = f"units that keep their parameters between micro-batches: {', '.join(self.kept_between)}"
        found = [between] if self.kept_between else []
        if self.saved_share is None:
            return found
        return [
            *found,
            f"{len(self.recomputed)} ops of the forward are computed again in the backward, to keep the memory budget: "
            f"{self.saved_share:g} of the activations that torch would save by itself is saved.",
        ]

    def extended(self, tag: Pipeline) -> Pipeline:
        """The passes that tag a joint graph for the partitioner, with the choice of activations."""
        if self.saved_share is None:
            return tag
        step = RecomputeActivations(recomputed=self.recomputed, saved=self.saved)
        return Pipeline(*tag.passes, step, given=tag.given)

    def to_dict(self) -> dict[str, object]:
        """As JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> StepChoice:
        """Reads :meth:`to_dict` back."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return StepChoice(**values)


#: What a choice costs; raises InfeasibleBudgetError where no plan keeps the budget.
CostOf = Callable[[StepChoice], KeepingCost]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTrials:
    """What is tried, and with what.

    Attributes:
        gm: a joint graph at level 1; it is not changed.
        context: what passes on it know.
        tag: the joint passes behind ``keep_gathered``.
        lower: the passes on a half in front of the planner.
        place: the planning pass, of which trials change the budget, and how long it may search: what is chosen is
            planned again.
        prices: of a half.
        recomputes: whether activations may be computed again.
    """

    gm: fx.GraphModule
    context: PassContext
    tag: Pipeline
    lower: Pipeline
    place: PlanCollectives
    prices: Callable[[fx.GraphModule], GraphPrices]
    recomputes: bool = True

    def open_units(self) -> list[str]:
        """Units whose user left it open whether they keep their parameters, in the order of their last use."""
        calls = [call for call in self._calls() if not call.reshard_fixed and call.group_size > 1]
        return list(dict.fromkeys(call.unit for call in reversed(calls)))[::-1]

    def default(self) -> list[str]:
        """Units that keep their parameters if nothing is chosen."""
        return list(dict.fromkeys(call.unit for call in self._calls() if call.reshard == 1))

    def choose(self, budget_of: BudgetOf | None, *, extends: bool = True) -> StepChoice:
        """The choice for the open units, of which there must be some if there is no budget.

        Args:
            budget_of: the user's budget, for which activations may be computed again; without one the halves of all
                choices hold no more than those of the default choice do at most with units gathered one ahead.
            extends: without a budget, units beside the default ones may be kept.

        Raises:
            InfeasibleBudgetError: no choice keeps the user's budget.
        """
        units, default = self.open_units(), self.default()
        if budget_of is not None:
            return self.choose_by(lambda choice: self._cost(choice, budget_of))
        peak = max(default_peak(half, ctx) - resident_bytes(half) for half, ctx in self._halves(None))

        def within(half: fx.GraphModule, ctx: PassContext) -> int:
            return peak + resident_bytes(half)

        kept = tuple(unit for unit in units if unit in default)
        if extends:
            with suppress(InfeasibleBudgetError):  # the default's halves are planned with a little more
                kept = extend_kept(units, kept, lambda kept: self._cost(StepChoice(kept=kept), within)).units
        return StepChoice(kept=kept, peak_bytes=peak, input_bytes=self.input_bytes())

    def input_bytes(self) -> int:
        """Bytes of all inputs of the joint graph, tangents included."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        return sum(tensor_bytes(node.meta.get("val")) for node in inputs)

    def _calls(self) -> list[UnshardCall]:
        return [
            UnshardCall(*node.args) for node in self.gm.graph.find_nodes(op="call_function", target=UNSHARD)
        ]

    def choose_by(self, cost_of: CostOf) -> StepChoice:
        """Kept units and saved activations within the user's budget.

        Args:
            cost_of: what a choice costs; raises ``InfeasibleBudgetError`` where no plan keeps the budget.

        Raises:
            InfeasibleBudgetError: no choice keeps the budget.
        """
        default = StepChoice(kept=tuple(self.default()), input_bytes=self.input_bytes())
        with_share: dict[float | None, StepChoice] = {None: default}

        def cost(kept: tuple[str, ...], share: float | None) -> KeepingCost:
            if share not in with_share:
                with_share[share] = self._saving(share)
            return cost_of(replace(with_share[share], kept=kept))

        may_recompute = self.recomputes and saved_share() == 1.0 and not draws_random_numbers(self.gm.graph)
        shares = SHARES if may_recompute else ()
        share, kept = choose_saved(self.open_units(), default.kept, cost, shares)
        return replace(with_share[share], kept=kept, input_bytes=default.input_bytes)

    def _saving(self, share: float | None) -> StepChoice:
        """What the partitioner computes again where it saves a share of the activations, with the default units."""
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
        """Both halves, planned with this choice; the error of the half that needs more, if one does."""
        seconds, peak = 0.0, 0
        refused: list[InfeasibleBudgetError] = []
        for half, ctx in self._halves(choice):
            try:
                found = self.plan(half, ctx, budget_of(half, ctx))
            except InfeasibleBudgetError as error:
                refused.append(error)
                continue
            seconds, peak = seconds + found.seconds, max(peak, found.peak_bytes)
        if refused:
            raise max(refused, key=lambda error: error.smallest_bytes)
        return KeepingCost(seconds=seconds, peak_bytes=peak)

    def plan(self, half: fx.GraphModule, ctx: PassContext, memory_budget: int | str) -> Plan:
        """Plans a half at level 2, in place.

        Raises:
            InfeasibleBudgetError: no plan keeps the budget.
        """
        place = replace(self.place, memory_budget=memory_budget, exact_states=EXACT_STATES)
        ctx = replace(ctx, prices=self.prices(half))
        (record,) = Pipeline(place, given=self.lower.facts_at_end).run(half, ctx)
        planned = record.report.planned
        assert isinstance(planned, PlannedGraph)
        return planned.plan

    def _halves(self, choice: StepChoice | None) -> Iterator[tuple[fx.GraphModule, PassContext]]:
        """Forward and backward at level 2 with a choice; None for the default."""
        for half, ctx in self.cut(choice):
            self.lower.run(half, ctx)
            yield half, ctx

    def cut(self, choice: StepChoice | None) -> Iterator[tuple[fx.GraphModule, PassContext]]:
        """Forward and backward at level 1 with a choice; None for the default."""
        trial, tag = copy_graph(self.gm), self.tag
        if choice is not None:
            Pipeline(KeepGathered(units=choice.kept), given=self.tag.given).run(trial, self.context)
            tag = choice.extended(tag)
        context = replace(
            context_from_shard_ops(trial),
            device_type=self.context.device_type,
            resident_bytes=self.context.resident_bytes,
            pieces=pieces_of(trial),
        )
        forward, backward = self._partitioned(trial, tag)
        yield forward, context.for_forward()
        yield backward, context.for_backward()

    def _partitioned(
        self, trial: fx.GraphModule, tag: Pipeline, share: float | None = None
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The halves of a joint graph that is tagged here; ``share`` is as for ``partition_as_inductor``."""
        context = replace(context_from_shard_ops(trial), device_type=self.context.device_type)
        tag.run(trial, context)
        assert context.first_gradient is not None
        parameters = [binding.position for binding in context.parameters]
        halves = partition_as_inductor(trial, context.first_gradient, parameters, lambda _: None, share)
        for half in halves:
            type_rng_states(half)
        return halves


def draws_random_numbers(graph: fx.Graph) -> bool:
    """Whether an op without a tag may draw random numbers: attention without dropout does not.

    torch's partitioner restores the random state only of what has a tag (github.com/pytorch/pytorch/issues/190758).
    """
    return any(
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and "recompute" not in node.meta
        and argument(node, "dropout_p") != 0.0
        for node in graph.nodes
    )
