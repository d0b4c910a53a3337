"""A joint graph cut into halves and planned, with one choice of kept units after the other.

What it costs that a unit keeps its gathered parameters shows only in both halves: a gather less in the backward,
memory in between, and another schedule on either side. So a choice is tried on a copy of the joint graph:
``keep_gathered``, the partitioner, the passes on halves, the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import fx

from .context import PassContext, context_from_shard_ops, pieces_of
from .inductor import drop_rng_states, partition_as_inductor
from .keeping import KeepingCost, choose_kept, extend_kept
from .memory import tensor_bytes
from .ops import UNSHARD
from .params import UnshardCall
from .passes import KeepGathered, PlanCollectives
from .passes.plan_collectives import default_peak, resident_bytes
from .pipeline import Pipeline
from .planner.plan import InfeasibleBudgetError
from .prices import GraphPrices
from .rewrite import copy_graph

#: Bytes that may be live in a half, from the half and its context.
BudgetOf = Callable[[fx.GraphModule, PassContext], int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """What was chosen for both halves.

    Attributes:
        kept: the units that keep their parameters.
        peak_bytes: the most that a half holds with the default choice, its units gathered one ahead, beside inputs that
            live through the step (each half reads only some of those), where nothing else limits the plans.
        input_bytes: of all inputs of the joint graph: for steps of other sizes ``peak_bytes`` says nothing.
    """

    kept: tuple[str, ...]
    peak_bytes: int | None = None
    input_bytes: int = 0

    def to_dict(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {"kept": self.kept, "peak_bytes": self.peak_bytes, "input_bytes": self.input_bytes}

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> StepChoice:
        """Reads :meth:`to_dict` back."""
        kept, peak, size = data["kept"], data["peak_bytes"], data["input_bytes"]
        assert isinstance(kept, (list, tuple)) and isinstance(size, int)
        assert peak is None or isinstance(peak, int)
        return StepChoice(kept=tuple(kept), peak_bytes=peak, input_bytes=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointTrials:
    """What is tried, and with what.

    Attributes:
        gm: a joint graph at level 1; it is not changed.
        context: what passes on it know.
        tag: the joint passes behind ``keep_gathered``.
        lower: the passes on a half in front of the planner.
        merge: whether the planner may merge collectives.
        prices: of a half.
    """

    gm: fx.GraphModule
    context: PassContext
    tag: Pipeline
    lower: Pipeline
    merge: bool
    prices: Callable[[fx.GraphModule], GraphPrices]

    def open_units(self) -> list[str]:
        """Units whose user left it open whether they keep their parameters, in the order of their last use."""
        calls = [call for call in self._calls() if not call.reshard_fixed and call.group_size > 1]
        return list(dict.fromkeys(call.unit for call in reversed(calls)))[::-1]

    def default(self) -> list[str]:
        """Units that keep their parameters if nothing is chosen."""
        return list(dict.fromkeys(call.unit for call in self._calls() if call.reshard == 1))

    def choose(self, budget_of: BudgetOf | None) -> StepChoice:
        """The choice for the open units, of which there must be some.

        Args:
            budget_of: the user's budget; without one the halves of all choices hold no more than those of the default
                choice do at most with units gathered one ahead.

        Raises:
            InfeasibleBudgetError: no choice keeps the user's budget.
        """
        units, default = self.open_units(), self.default()
        if budget_of is not None:
            given = budget_of
            return StepChoice(kept=choose_kept(units, default, lambda kept: self._cost(kept, given)).units)
        peak = max(default_peak(half, ctx) - resident_bytes(half) for half, ctx in self._halves(None))

        def within(half: fx.GraphModule, ctx: PassContext) -> int:
            return peak + resident_bytes(half)

        kept = tuple(unit for unit in units if unit in default)
        with suppress(
            InfeasibleBudgetError
        ):  # if so the default, whose halves are planned with a little more
            kept = extend_kept(units, kept, lambda kept: self._cost(kept, within)).units
        return StepChoice(kept=kept, peak_bytes=peak, input_bytes=self.input_bytes())

    def input_bytes(self) -> int:
        """Bytes of all inputs of the joint graph, tangents included."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        return sum(tensor_bytes(node.meta.get("val")) for node in inputs)

    def _calls(self) -> list[UnshardCall]:
        return [
            UnshardCall(*node.args) for node in self.gm.graph.find_nodes(op="call_function", target=UNSHARD)
        ]

    def _cost(self, kept: tuple[str, ...], budget_of: BudgetOf) -> KeepingCost:
        """Both halves, planned with these units kept; the error of the half that needs more, if one does."""
        seconds, peak = 0.0, 0
        refused: list[InfeasibleBudgetError] = []
        for half, ctx in self._halves(kept):
            place = PlanCollectives(merge=self.merge, memory_budget=budget_of(half, ctx))
            ctx = replace(ctx, prices=self.prices(half))
            try:
                (record,) = Pipeline(place, given=self.lower.facts_at_end).run(half, ctx)
            except InfeasibleBudgetError as error:
                refused.append(error)
                continue
            planned = record.report.planned
            assert planned is not None
            seconds, peak = seconds + planned.plan.seconds, max(peak, planned.plan.peak_bytes)
        if refused:
            raise max(refused, key=lambda error: error.smallest_bytes)
        return KeepingCost(seconds=seconds, peak_bytes=peak)

    def _halves(self, kept: tuple[str, ...] | None) -> Iterator[tuple[fx.GraphModule, PassContext]]:
        """Forward and backward at level 2 with these units kept; None for the default."""
        trial = copy_graph(self.gm)
        if kept is not None:
            Pipeline(KeepGathered(units=kept), given=self.tag.given).run(trial, self.context)
        context = replace(context_from_shard_ops(trial), device_type=self.context.device_type)
        self.tag.run(trial, context)
        context = replace(context, pieces=pieces_of(trial))
        assert context.first_gradient is not None
        parameters = [binding.position for binding in context.parameters]
        forward, backward = partition_as_inductor(trial, context.first_gradient, parameters, lambda _: None)
        drop_rng_states(forward, backward)
        for half, ctx in ((forward, context.for_forward()), (backward, context.for_backward())):
            self.lower.run(half, ctx)
            yield half, ctx
