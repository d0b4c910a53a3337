"""Which units keep gathered parameters in an inspected step: the backend's choice, without ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import fx, nn

from .backend import half_pipeline
from .capture import CapturedStep
from .context import PassContext
from .inspection_settings import Settings
from .joint_trials import JointTrials
from .options import BackendOptions
from .persistent_bytes import always_bytes, persistent_bytes_of_joint
from .pipeline import Pipeline
from .planner.plan import InfeasibleBudgetError
from .report.categories import kept_bytes_by_category


class InspectedChoice:
    """Chooses where the step is planned by cost, and ``reshard_after_forward`` is left open.

    Args:
        settings: what was asked for.
        module: the model.

    Attributes:
        peak_bytes: what a half may take where there is no budget; None before the choice, and with a budget.
    """

    def __init__(self, settings: Settings, module: nn.Module) -> None:
        self._settings, self._module = settings, module
        self.peak_bytes: int | None = None

    def known_to(self, captured: CapturedStep) -> CapturedStep:
        """A step that was captured with this choice, whose halves know what they may take."""
        context = replace(captured.context, default_peak_bytes=self.peak_bytes)
        return replace(captured, context=context)

    def __call__(self, gm: fx.GraphModule, context: PassContext, tag: Pipeline) -> tuple[str, ...] | None:
        """The units that keep their parameters; None for what the settings say.

        Args:
            gm: the joint graph at level 1; it is not changed.
            context: what passes on it know.
            tag: the joint passes that follow.
        """
        settings = self._settings
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
            step = trials.choose(None)
            self.peak_bytes = step.peak_bytes
            return step.kept
        persistent = persistent_bytes_of_joint(self._module, gm, context, settings.optimizer)
        always = sum(always_bytes(persistent, settings.micro_batches).values())

        def left(half: fx.GraphModule, ctx: PassContext) -> int:
            return max(budget - always + sum(kept_bytes_by_category(half, ctx)), 1)

        try:
            return trials.choose(left).kept
        except InfeasibleBudgetError:
            return None  # the plans of the halves will say what they need
