"""Chooses placements on the further axis of a mesh by predicted time and memory: ``placements="auto"``.

Candidates are the ready plans that fit the model, and no placements at all. Each is predicted as ``inspect`` predicts
a step. A model of many equal blocks is predicted with one and with two of them, and the difference counts for each
further block. The fastest candidate that fits the memory is chosen; if none fits, the one that needs the least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from ..capture import num_repeated_blocks, with_blocks
from ..errors import GraphShardError
from ..parallel import Stated, fitting_plans
from ..report import PlacementCandidate, Report, size_text
from .settings import Settings

#: Predicts a step of a model, in brief.
Predict = Callable[[Settings, nn.Module], Report]

#: The name of no placements at all.
REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """The placements that were chosen.

    Attributes:
        placements: as ``inspect`` takes them: the name of a ready plan, or what it states.
        stated: what they state.
        candidates: all that were compared, the cheapest first.
        note: how they were predicted.
    """

    placements: str | Stated
    stated: Stated
    candidates: tuple[PlacementCandidate, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Predicted numbers of one candidate."""

    step_seconds: float
    exposed_seconds: float
    peak_bytes: int


@dataclass(slots=True, kw_only=True)
class StepPredictor:
    """Predicts steps of one model with any placements, under the schedule of training and without a budget.

    Attributes:
        settings: of the inspection.
        module: the model.
        predict: predicts a step.
        num_blocks: equal blocks of the model of which two are predicted; 0 to predict it as it is.
    """

    settings: Settings
    module: nn.Module
    predict: Predict
    num_blocks: int

    @staticmethod
    def of(settings: Settings, module: nn.Module, predict: Predict) -> StepPredictor:
        """A predictor for the blocks of a model."""
        return StepPredictor(
            settings=replace(settings, budget_bytes=None, plan="unit"), module=module, predict=predict,
            num_blocks=num_repeated_blocks(module),
        )  # fmt: skip

    def numbers(self, placements: Stated) -> Numbers:
        """The numbers of the model with placements.

        Raises:
            GraphShardError: as :func:`graphshard.inspect`.
        """
        if self.num_blocks:
            try:
                one, two = (_parts(self._report(placements, number)) for number in (1, 2))
                return _numbers(
                    {name: one[name] + (self.num_blocks - 1) * (two[name] - one[name]) for name in one}
                )
            except GraphShardError:  # patterns of units may name later blocks; the model may need all of them
                self.num_blocks = 0
        return _numbers(_parts(self._report(placements, 0)))

    def note(self) -> str:
        """How steps are predicted, for the report."""
        if not self.num_blocks:
            return "Placements were compared under the schedule of training (plan='unit')."
        return (
            "Placements were compared under the schedule of training (plan='unit'), predicted from one and from two "
            f"of {self.num_blocks} equal blocks."
        )

    def _report(self, placements: Stated, num_blocks: int) -> Report:
        module = with_blocks(self.module, num_blocks) if num_blocks else self.module
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        paths = {name for name, _ in module.named_modules()}
        own = Stated(
            parameters={name: each for name, each in placements.parameters.items() if name in names},
            inputs={name: each for name, each in placements.inputs.items() if name in paths},
            outputs={name: each for name, each in placements.outputs.items() if name in paths},
        )
        rules = replace(self.settings.rules, placements=own)
        return self.predict(replace(self.settings, rules=rules), module)


def choose(settings: Settings, module: nn.Module, predict: Predict) -> PlacementChoice:
    """The cheapest placements for a model.

    Args:
        settings: of the inspection; its rules have the mesh.
        module: the model.
        predict: predicts a step.

    Raises:
        GraphShardError: of the model without placements, if nothing can be predicted.
    """
    known, misfits = fitting_plans(module)
    known = {**known, REPLICATED: Stated()}
    if settings.rules.placed_axis is None:  # one rank: they are all the same
        known, misfits = {REPLICATED: Stated()}, {}
    predictor = StepPredictor.of(settings, module, predict)
    found: dict[str, Numbers] = {}
    verdicts: dict[str, str] = {name: f"does not fit the model: {lacks}" for name, lacks in misfits.items()}
    failed: GraphShardError | None = None
    for name, stated in known.items():
        twin = next((other for other in known if other in found and known[other] == stated), None)
        if twin is not None:
            verdicts[name] = f"the placements of {twin}"
            continue
        try:
            found[name] = predictor.numbers(stated)
        except GraphShardError as error:
            failed = error
            verdicts[name] = f"cannot run: {str(error).splitlines()[0]}"
    if not found:
        assert failed is not None, "a model without placements is a candidate"
        raise failed
    best = _cheapest(found, settings.limit_bytes)
    return PlacementChoice(
        placements=known[best] if best == REPLICATED else best,
        stated=known[best],
        candidates=_candidates(found, verdicts, best, settings.limit_bytes),
        note=predictor.note(),
    )


def _parts(report: Report) -> dict[str, float]:
    """The numbers that grow with each block by the same amount."""
    peaks = {f"peak of the {half.name}": float(half.peak.total_bytes) for half in report.halves}
    return {"step": report.step_seconds, "exposed": report.exposed_seconds, **peaks}


def _numbers(parts: Mapping[str, float]) -> Numbers:
    peaks = [value for name, value in parts.items() if name.startswith("peak")]
    return Numbers(step_seconds=parts["step"], exposed_seconds=parts["exposed"], peak_bytes=round(max(peaks)))


def _cheapest(found: Mapping[str, Numbers], limit_bytes: int) -> str:
    fitting = [name for name in found if found[name].peak_bytes <= limit_bytes]
    if not fitting:
        return min(found, key=lambda name: found[name].peak_bytes)
    return min(fitting, key=lambda name: (found[name].step_seconds, found[name].peak_bytes))


def _candidates(
    found: Mapping[str, Numbers], verdicts: Mapping[str, str], best: str, limit_bytes: int
) -> tuple[PlacementCandidate, ...]:
    rows = []
    for name in sorted(found, key=lambda name: (name != best, found[name].step_seconds)):
        numbers = found[name]
        times = numbers.step_seconds / found[best].step_seconds
        is_large = numbers.peak_bytes > limit_bytes
        verdict = f"{times:.3g} times the step of {best}" if times > 1 else f"more memory than {best}"
        verdict = f"needs more memory than {size_text(limit_bytes)}" if is_large else verdict
        if name == best:
            verdict = "chosen: the least memory, and none fits" if is_large else "chosen"
        rows.append(
            PlacementCandidate(
                name=name, step_seconds=numbers.step_seconds, exposed_seconds=numbers.exposed_seconds,
                peak_bytes=numbers.peak_bytes, verdict=verdict, is_chosen=name == best,
            )
        )  # fmt: skip
    rows += [PlacementCandidate(name=name, verdict=verdict) for name, verdict in verdicts.items()]
    return tuple(rows)
