"""What is chosen for both halves of a step: units that keep their parameters, and activations that are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..passes import RecomputeActivations
from ..pipeline import KnownPlan, Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """What was chosen for both halves.

    Attributes:
        kept: the units that keep their parameters for the backward.
        peak_bytes: the most that a half holds with the default choice and one unit gathered ahead, without the inputs
            that live through the step (each half reads only some of those). It limits the plans if nothing else does.
        input_bytes: of all inputs of the joint graph; ``peak_bytes`` holds for steps of this size only.
        kept_between: the units that keep their parameters between micro-batches whose gradients are not reduced.
        saved_share: of the activations that the partitioner would save by itself; None if all of them are saved.
        recomputed, saved: names of the nodes that this share comes to; see ``recompute_activations``.
        plans: the plans of forward and backward as they were tried, on the rank that has tried them; () elsewhere. They
            are no part of what is chosen.
    """

    kept: tuple[str, ...]
    peak_bytes: int | None = None
    input_bytes: int = 0
    kept_between: tuple[str, ...] = ()
    saved_share: float | None = None
    recomputed: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    plans: tuple[KnownPlan, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(
            [f"units that keep their parameters: {', '.join(self.kept) or 'none'}", *self.notes()]
        )

    def notes(self) -> list[str]:
        """Sentences for a reader: what stays between micro-batches, and whether activations are recomputed."""
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
        """The passes ``tag``, and behind them the one that tags the chosen activations for the partitioner."""
        if self.saved_share is None:
            return tag
        step = RecomputeActivations(recomputed=self.recomputed, saved=self.saved)
        return Pipeline(*tag.passes, step, given=tag.given)

    def to_dict(self) -> dict[str, object]:
        """What was chosen, as JSON can hold it."""
        return asdict(replace(self, plans=()))

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> StepChoice:
        """Reads :meth:`to_dict` back."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return StepChoice(**values)
