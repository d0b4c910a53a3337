"""Chooses placements on the further axis of a mesh by predicted time and memory: ``placements="auto"``.

Candidates are the ready plans that fit the model, no placements at all, and what searches find from there on
(:mod:`graphshard.inspection.placement_search`). Each is predicted as ``inspect`` predicts a step. A model of many equal
blocks is predicted with one and with two of them, and the difference counts for each further block. That is exact for
the time, but not for the memory: in the backward of many blocks one is gathered beside the one that is computed, and
the gradients of another are still being reduced. So the candidates that may be chosen are predicted once more, with
three and with four blocks. The fastest candidate that fits the memory is chosen; if none fits, the one that needs the
least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Shard

from .._compat import lazy_graph_modules
from ..capture import (
    CapturedStep,
    can_reshard,
    capture_step,
    has_extended_parameters,
    no_garbage_collection,
    num_repeated_blocks,
    reshard_step,
    with_blocks,
)
from ..errors import GraphShardError
from ..ir import remembered_results
from ..parallel import Stated, fitting_plans
from ..progress import Stages
from ..report import PlacementCandidate, Report, size_text
from .placement_search import PlacementSearch, TrialSeconds
from .settings import Settings
from .step_inspection import Inspection

#: Predicts a step of a model, in brief.
Predict = Callable[[Settings, nn.Module], Report]

#: Searches from a plan on: returns what it found, and the number of trials.
Search = Callable[[Stated], tuple[Stated, int]]

#: From so many blocks on, each further one adds the same to the peak: the block that is computed, the one that is
#: gathered ahead, and the one whose gradients are being reduced.
_STEADY = 3

#: The name of no placements at all.
REPLICATED = "replicated"

#: Names of what searches find: with whole values between the parts of blocks, and with values along the sequence.
SEARCHED = ("searched", "searched-sequence")


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

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidates[0].name


@dataclass(slots=True, kw_only=True)
class PlacementChooser:
    """Chooses placements of one model, for one mesh after the other.

    Meshes that differ only in the axes of data parallelism share captures and the prices of a search's trials. All
    settings but the mesh are equal in all calls.

    Attributes:
        module: the model.
        args, kwargs, loss: of the step.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    _captured: list[tuple[Settings, tuple[str, ...], CapturedStep]] = field(default_factory=list)
    _trials: TrialSeconds = field(default_factory=dict)

    def choose(self, settings: Settings) -> PlacementChoice:
        """The cheapest placements on the mesh of the settings.

        Raises:
            GraphShardError: as :func:`choose`.
        """
        search = PlacementSearch(
            settings=settings, module=self.module, args=self.args, kwargs=self.kwargs, loss=self.loss,
            known=self._trials,
        )  # fmt: skip
        return choose(settings, self.module, self._predict, search.best)

    def _predict(self, settings: Settings, module: nn.Module) -> Report:
        """A report with the numbers of the step alone; ``module`` is the model, or has fewer of its blocks."""
        with lazy_graph_modules(), no_garbage_collection(), remembered_results():
            captured = reshard_step(self._capture(settings, module), settings.rules.mesh)
            inspection = Inspection(settings=settings, captured=captured, stages=Stages(None), is_brief=True)
            return inspection.report(type(module).__name__, module, None)

    def _capture(self, settings: Settings, module: nn.Module) -> CapturedStep:
        names = tuple(name for name, _ in module.named_parameters())
        is_extended = has_extended_parameters(module)
        mesh, placements = settings.rules.mesh, settings.rules.placements
        for known, of_names, captured in self._captured:
            is_alike = mesh == known.rules.mesh or (not is_extended and can_reshard(known.rules.mesh, mesh))
            if is_alike and of_names == names and known.rules.placements == placements:
                return captured
        captured = capture_step(
            module, self.args, self.kwargs, rules=settings.rules, loss=self.loss, checkpoint=settings.checkpoint,
            needs_loss=True, device_type=settings.card.device_type, is_brief=True,
        )  # fmt: skip
        self._captured.append((settings, names, captured))
        return captured


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
        num_blocks: equal blocks of the model of which a few are predicted; 0 to predict it as it is.
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

    def numbers(self, placements: Stated, fewest: int = 1) -> Numbers:
        """The numbers of the model with placements, from those with ``fewest`` blocks and with one more.

        Raises:
            GraphShardError: as :func:`graphshard.inspect`.
        """
        if self.num_blocks:
            try:
                few, more = (_parts(self._report(placements, fewest + each)) for each in (0, 1))
                further = self.num_blocks - fewest
                return _numbers({name: few[name] + further * (more[name] - few[name]) for name in few})
            except GraphShardError:  # patterns of units may name later blocks; the model may need all of them
                self.num_blocks = 0
        return _numbers(_parts(self._report(placements, 0)))

    def note(self) -> str:
        """How steps are predicted, for the report."""
        if not self.num_blocks:
            return "Placements were compared under the schedule of training (plan='unit')."
        return (
            "Placements were compared under the schedule of training (plan='unit'), predicted from one and from two "
            f"of {self.num_blocks} equal blocks; the chosen ones from three and from four."
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


def choose(
    settings: Settings, module: nn.Module, predict: Predict, search: Search | None = None
) -> PlacementChoice:
    """The cheapest placements for a model.

    Args:
        settings: of the inspection; its rules have the mesh.
        module: the model.
        predict: predicts a step.
        search: looks for cheaper placements; None to compare known ones.

    Raises:
        GraphShardError: of the model without placements, if nothing can be predicted.
    """
    known, misfits = fitting_plans(module)
    known = {**known, REPLICATED: Stated()}
    if settings.rules.placed_axis is None:  # one rank: they are all the same
        known, misfits, search = {REPLICATED: Stated()}, {}, None
    comparison = _Comparison(predictor=StepPredictor.of(settings, module, predict))
    comparison.verdicts.update((name, f"does not fit the model: {lacks}") for name, lacks in misfits.items())
    for name, stated in known.items():
        comparison.add(name, stated)
    if not comparison.numbers:
        assert comparison.failed is not None, "a model without placements is a candidate"
        raise comparison.failed
    notes = [comparison.predictor.note()]
    if search is not None:
        num_trials = comparison.add_searched(search)
        notes.append(f"Searches priced {num_trials} choices of placements of weights.")
    best = comparison.cheapest(settings.limit_bytes)
    stated = comparison.stated[best]
    return PlacementChoice(
        placements=best if best in known and best != REPLICATED else stated,
        stated=stated,
        candidates=_candidates(comparison.numbers, comparison.verdicts, best, settings.limit_bytes),
        note=" ".join(notes),
    )


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """Candidates that are predicted one after the other.

    Attributes:
        predictor: predicts each.
        stated: what each states, by name.
        numbers: of those that could be predicted.
        verdicts: of the others.
        failed: the last error.
    """

    predictor: StepPredictor
    stated: dict[str, Stated] = field(default_factory=dict)
    numbers: dict[str, Numbers] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    failed: GraphShardError | None = None

    def add(self, name: str, stated: Stated) -> None:
        """Predicts a candidate, unless another one states the same."""
        twin = next((other for other in self.numbers if _is_same(self.stated[other], stated)), None)
        if twin is not None:
            self.verdicts[name] = f"the placements of {twin}"
            return
        try:
            self.numbers[name] = self.predictor.numbers(stated)
            self.stated[name] = stated
        except GraphShardError as error:
            self._cannot_run(name, error)

    def add_searched(self, search: Search) -> int:
        """Adds what searches find from the candidates on; returns the number of trials."""
        fastest = sorted(self.numbers, key=lambda name: self.numbers[name].step_seconds)
        plans = [self.stated[name] for name in fastest]
        whole, along = ([each for each in plans if bool(each.outputs) is held][:1] for held in (False, True))
        jobs = [(SEARCHED[0], plan) for plan in whole] + [(SEARCHED[1], plan) for plan in along]
        total = 0
        for name, plan in jobs:
            try:
                found, num_trials = search(plan)
            except GraphShardError as error:
                self._cannot_run(name, error)
                continue
            total += num_trials
            self.add(name, found)
        return total

    def cheapest(self, limit_bytes: int) -> str:
        """The fastest that fits, else the one that needs the least; predicts those again that it may be."""
        if self.predictor.num_blocks:
            for name in sorted(self.numbers, key=lambda name: self.numbers[name].step_seconds):
                self.numbers[name] = self.predictor.numbers(self.stated[name], fewest=_STEADY)
                if self.numbers[name].peak_bytes <= limit_bytes:
                    break
        return _cheapest(self.numbers, limit_bytes)

    def _cannot_run(self, name: str, error: GraphShardError) -> None:
        self.failed = error
        self.verdicts[name] = f"cannot run: {str(error).splitlines()[0]}"


def _is_same(one: Stated, other: Stated) -> bool:
    return _cut(one) == _cut(other) and (one.inputs, one.outputs) == (other.inputs, other.outputs)


def _cut(stated: Stated) -> dict[str, Placement]:
    return {name: each for name, each in stated.parameters.items() if isinstance(each, Shard)}


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
