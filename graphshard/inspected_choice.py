"""Which units keep gathered parameters in an inspected step: the backend's choice, without ranks."""

from __future__ import annotations

from torch import fx, nn

from .backend import half_pipeline
from .context import PassContext
from .inspection_settings import Settings
from .joint_trials import JointTrials, StepChoice
from .options import BackendOptions
from .persistent_bytes import always_bytes, persistent_bytes_of_joint
from .pipeline import Pipeline
from .planner.plan import InfeasibleBudgetError
from .report.categories import kept_bytes_by_category


def choose_inspected(
    settings: Settings, module: nn.Module, gm: fx.GraphModule, context: PassContext, tag: Pipeline
) -> StepChoice | None:
    """The choice where the step is planned by cost; None where units keep what the settings say.

    Args:
        settings: what was asked for.
        module: the model.
        gm: the joint graph at level 1; it is not changed.
        context: what passes on it know.
        tag: the joint passes that follow.
    """
    if settings.plan != "auto":
        return None
    steps = half_pipeline(BackendOptions())
    trials = JointTrials(
        gm=gm,
        context=context,
        tag=tag,
        lower=Pipeline(*steps.passes[:1], given=steps.given),
        merge=True,
        prices=lambda _: settings.prices(context.mesh),
    )
    if not trials.open_units():
        return None
    budget = settings.budget_bytes
    if budget is None:
        return trials.choose(None)
    persistent = persistent_bytes_of_joint(module, gm, context, settings.optimizer)
    always = sum(always_bytes(persistent, settings.micro_batches).values())

    def left(half: fx.GraphModule, ctx: PassContext) -> int:
        return max(budget - always + sum(kept_bytes_by_category(half, ctx)), 1)

    try:
        return trials.choose(left)
    except InfeasibleBudgetError:
        return None  # the plans of the halves will say what they need
