"""Chooses which units keep gathered parameters in an inspected step, and which activations it saves, without ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx, nn

from ..backend import JointTrials, StepChoice
from ..errors import BudgetError, InfeasibleBudgetError
from ..passes import PlanCollectives
from ..pipeline import PassContext, Pipeline
from .memory_categories import kept_bytes_by_category
from .persistent_bytes import always_bytes, persistent_bytes_of_joint
from .settings import Settings


def choose_inspected(
    settings: Settings, module: nn.Module, gm: fx.GraphModule, context: PassContext, tag: Pipeline
) -> StepChoice | None:
    """The choice for a step that is planned by cost; None for a step that follows the settings.

    Args:
        settings: the settings.
        module: the model.
        gm: the joint graph at level 1; it is not changed.
        context: the context of passes on it.
        tag: the joint passes that follow.

    Raises:
        BudgetError: no choice keeps the budget.
    """
    if settings.plan != "auto":
        return None
    trials = JointTrials(
        gm=gm,
        context=replace(context, scratch=settings.scratch(gm)),
        tag=tag,
        lower=settings.pipelines().lowering,
        place=PlanCollectives(),
        prices=lambda _: settings.prices(context.mesh),
    )
    budget = settings.budget_bytes
    if budget is None:
        return trials.choose(None) if trials.open_units() else None
    persistent = persistent_bytes_of_joint(module, gm, context, settings.optimizer)
    always = sum(always_bytes(persistent, settings.micro_batches).values())

    room = _Room(budget_bytes=budget, always_bytes=always)
    try:
        return trials.choose(room.left)
    except InfeasibleBudgetError as error:
        needed = error.smallest_bytes + room.most_beside
        raise BudgetError(budget, needed, "the leanest plan that was found") from error


@dataclass(slots=True, kw_only=True)
class _Room:
    """What a budget leaves for a half, beside what lives through the whole step and is no input of it.

    Attributes:
        most_beside: the most bytes beside a half that was asked for.
    """

    budget_bytes: int
    always_bytes: int
    most_beside: int = 0

    def left(self, half: fx.GraphModule, ctx: PassContext) -> int:
        """Bytes for a half; at least 1."""
        beside = self.always_bytes - sum(kept_bytes_by_category(half, ctx))
        self.most_beside = max(self.most_beside, beside)
        return max(self.budget_bytes - beside, 1)
