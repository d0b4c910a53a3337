"""Which units keep their gathered parameters between micro-batches, within the user's memory budget.

While gradients are not reduced (``set_requires_gradient_sync(False)``), parameters do not change before the next
micro-batch. A unit that keeps its parameters gathered until its gradients are reduced gathers once a step, not once or
twice a micro-batch. The price is memory: they are held all the time, beside the full gradients that wait. A choice is
priced by planning the halves of micro-batches in each state in which they will run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import fx

from ..errors import InfeasibleBudgetError
from ..ir import UNSHARD, tensor_bytes
from ..pipeline import PassContext
from ..planner import KeepingCost, choose_kept, held_beside
from .halves import Selection, shard_ops, specialise_graph
from .step_choice import StepChoice
from .step_trials import JointTrials


def choose_kept_between(
    trials: JointTrials, choice: StepChoice, waiting: Collection[str], budget_bytes: int
) -> tuple[str, ...]:
    """The units that keep their parameters between micro-batches; none if no choice keeps the budget.

    Args:
        trials: of the joint graph.
        choice: what was chosen for a step of one micro-batch.
        waiting: units whose gradients wait for a later micro-batch. Those whose user left ``reshard_after_forward``
            unset may keep their parameters.
        budget_bytes: the most that may be live in a half and in the gradients that wait beside it.
    """
    units = [unit for unit in trials.open_units() if unit in waiting]
    if not units:
        return ()
    try:
        return choose_kept(units, (), _Accumulation.of(trials, choice, waiting, budget_bytes).cost).units
    except InfeasibleBudgetError:
        return ()


def accumulation_cost(
    trials: JointTrials, choice: StepChoice, waiting: Collection[str], budget_bytes: int
) -> KeepingCost:
    """The cost of a choice for a step while gradients of some units wait and no unit stays gathered.

    Args:
        trials, waiting, budget_bytes: as for :func:`choose_kept_between`.
        choice: of kept units and saved activations.

    Raises:
        InfeasibleBudgetError: in some micro-batch no plan keeps the budget.
    """
    return _Accumulation.of(trials, choice, waiting, budget_bytes).cost(())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accumulation:
    """Micro-batches between two steps of the optimizer: their halves at level 1, with what passes on them know."""

    trials: JointTrials
    forward: tuple[fx.GraphModule, PassContext]
    backward: tuple[fx.GraphModule, PassContext]
    waiting: frozenset[str]
    budget_bytes: int

    @staticmethod
    def of(
        trials: JointTrials, choice: StepChoice, waiting: Collection[str], budget_bytes: int
    ) -> _Accumulation:
        """The micro-batches with a choice for a step of one micro-batch."""
        forward, backward = trials.cut(choice)
        return _Accumulation(
            trials=trials,
            forward=forward,
            backward=backward,
            waiting=frozenset(waiting),
            budget_bytes=budget_bytes,
        )

    def cost(self, kept: tuple[str, ...]) -> KeepingCost:
        """The seconds of a micro-batch that is neither the first nor the last, and the peak of all micro-batches.

        Args:
            kept: units that keep their parameters.

        Raises:
            InfeasibleBudgetError: in one of the states no plan keeps the budget.
        """
        gathered = self._gathers(self.forward, kept)
        regathered, reductions = self._gathers(self.backward, kept), self._reductions()
        last = self._state(self.backward, Selection(supplied=regathered, with_unreduced=reductions))
        waiting = last.waiting_bytes
        # Gathered parameters that the backward does not take as inputs are held all the same.
        held = waiting + self._bytes(self.forward, gathered) - self._bytes(self.backward, regathered)
        first = self._state(self.forward, Selection(kept=gathered))
        forward = self._state(self.forward, Selection(supplied=gathered), waiting)
        backward = self._state(self.backward, Selection(supplied=regathered, unreduced=reductions), held)
        seconds, peaks, refused = {}, [], []
        for state in (last, first, forward, backward):
            try:
                plan = self.trials.plan(state.gm, state.context, self.budget_bytes).plan
            except InfeasibleBudgetError as error:
                refused.append(error)
                continue
            seconds[state] = plan.seconds
            peaks.append(held_beside(state.gm, state.context) + plan.peak_bytes)
        if refused:
            raise max(refused, key=lambda error: error.smallest_bytes)
        return KeepingCost(seconds=seconds[forward] + seconds[backward], peak_bytes=max(peaks))

    def _bytes(self, half: tuple[fx.GraphModule, PassContext], gathers: tuple[int, ...]) -> int:
        """Bytes of the full parameters that some gathers of a half give."""
        nodes = list(half[0].graph.find_nodes(op="call_function", target=UNSHARD))
        return sum(tensor_bytes(nodes[index].meta["val"]) for index in gathers)

    def _gathers(self, half: tuple[fx.GraphModule, PassContext], kept: tuple[str, ...]) -> tuple[int, ...]:
        gm, ctx = half
        gathers, _ = shard_ops(gm, frozenset(piece.placeholder for piece in ctx.pieces))
        return tuple(
            index for index, gather in enumerate(gathers) if gather.unit in kept and gather.shard >= 0
        )

    def _reductions(self) -> tuple[int, ...]:
        _, reductions = shard_ops(self.backward[0], frozenset())
        return tuple(
            index
            for index, reduction in enumerate(reductions)
            if reduction.unit in self.waiting and reduction.output >= 0
        )

    def _state(
        self, half: tuple[fx.GraphModule, PassContext], selection: Selection, held_bytes: int = 0
    ) -> _State:
        gm, ctx = half
        _, reductions = shard_ops(gm, frozenset())
        unreduced = frozenset(reductions[index].output for index in selection.unreduced)
        state, values = specialise_graph(gm, selection)
        ctx = replace(ctx, unreduced=unreduced, held_bytes=held_bytes)
        self.trials.lower.run(state, ctx)
        waiting_bytes = sum(map(tensor_bytes, values[len(selection.supplied) :]))
        return _State(gm=state, context=ctx, waiting_bytes=waiting_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _State:
    """A half at level 2 as it runs in some micro-batch.

    Attributes:
        gm: the half.
        context: what passes on it know.
        waiting_bytes: of the gradients of earlier micro-batches that it takes as inputs.
    """

    gm: fx.GraphModule
    context: PassContext
    waiting_bytes: int
