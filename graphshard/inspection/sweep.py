"""``graphshard.sweep``: one model on many meshes and with many batch sizes.

1. The model is captured with the smallest and the largest batch, and in each further process with one more.
2. A batch size between is interpolated if both graphs are equal (:mod:`graphshard.capture.change_batch`), or captured.
3. A copy of a capture for each mesh (:mod:`graphshard.capture.change_mesh`) goes through the passes, as in ``inspect``.

With ``placements="auto"`` each batch size is captured, with the placements that are chosen for it on each mesh.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..capture import (
    CapturedStep,
    StepNumbers,
    capture_step,
    has_extended_parameters,
    no_garbage_collection,
    numbers_of,
    reshard_step,
    spared_by_garbage_collection,
    step_between,
)
from ..cost import warn_of
from ..errors import BudgetError, CaptureError, OptionError
from ..ir import remembered_results
from ..processes import process_context
from ..progress import Stages
from ..report import Report, Sweep, SweepPoint, sweep_point
from ..setting_checks import AUTO_PLACEMENTS
from .placement_choice import PlacementChoice, PlacementChooser
from .settings import (
    Inputs,
    Later,
    Settings,
    classes_of_meshes,
    count_tokens,
    plain_inputs,
    refuse_sharded,
    settings_of,
)
from .step_choice import choose_inspected
from .step_inspection import Inspection

ResultT = TypeVar("ResultT")

#: Values of ``sweep(captures=...)``.
CAPTURES = ("ends", "all")


def sweep(
    make: Callable[[int], Inputs],
    *,
    meshes: Sequence[Mapping[str, int]],
    batches: Sequence[int],
    loss: Callable[[Any], torch.Tensor] | Later | None = None,
    num_processes: int = 1,
    captures: str = "ends",
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Predicts a training step for every mesh with every batch size.

    Args:
        make: returns model and inputs of one rank for a batch size; :func:`resized` makes one from example inputs.
        meshes: sizes of the axes, outermost first, of each mesh.
        batches: batch sizes of one rank and micro-batch.
        loss: as in :func:`graphshard.inspect`, or a :class:`Later` that finds it.
        num_processes: number of processes. With more than one, ``make`` and ``loss`` must pickle; for ``loss``, a
            :class:`Later` does too.
        captures: "ends" captures the smallest and the largest batch, and those in between only if their graphs differ
            (:mod:`graphshard.capture.change_batch` says what this may miss); "all" captures each, as ``plan="auto"``
            and ``placements="auto"`` always do.
        progress: takes what is being done, the number of points done, and the number of all points.
        options: other options of :func:`graphshard.inspect`: hardware, tables, units, mp_policy, reshard_after_forward,
            optimizer, micro_batches, plan, checkpoint, placements, and ``memory_budget``, which decides whether a point
            fits. Plans keep it where they can; a point that exceeds it is no error, and planned without it.

    Raises:
        OptionError: there are no meshes or batch sizes, or they are not whole numbers; an option or ``captures`` is
            unknown.
        CaptureError: a batch size cannot be captured, or a process died.
        GraphShardError: as :func:`graphshard.inspect`.
    """
    _refuse_no_numbers("batches", batches)
    _refuse_no_numbers("num_processes", [num_processes])
    if captures not in CAPTURES:
        raise OptionError(f"captures={captures!r}: write {' or '.join(map(repr, CAPTURES))}")
    if not meshes:
        raise OptionError("meshes: there must be one at least")
    batches, meshes = list(dict.fromkeys(batches)), _distinct(meshes)
    each = [settings_of("sweep", options, mesh) for mesh in meshes]
    # A plan may keep the parameters of a unit for some batch sizes and not for others; placements may be others.
    is_each = captures == "all" or each[0].plan == "auto" or each[0].rules.placements == AUTO_PLACEMENTS
    captured, others = _shared_out(sorted(batches), len(batches) if is_each else num_processes)
    jobs = [
        _Job(
            make=make,
            loss=loss,
            batch=batch,
            others=rest,
            has_others=any(others),
            ends=(min(batches), max(batches)),
            settings=each,
        )
        for batch, rest in zip(captured, others, strict=True)
    ]
    results = _run(jobs, num_processes, len(batches), progress)
    points = {place: point for result in results for place, point in result.points.items()}
    found = [points[batch, index] for index in range(len(meshes)) for batch in batches]
    settings = each[0]
    warn_of([message for result in results for message in result.told], stacklevel=2)
    return Sweep(
        model=results[0].model,
        hardware=settings.card.name,
        settings=settings.as_dict(),
        limit_bytes=settings.limit_bytes,
        points=tuple(found),
        between=tuple(sorted({batch for result in results for batch in result.between})),
        num_captures=sum(result.num_captures for result in results),
        capture_seconds=sum(result.capture_seconds for result in results),
        point_seconds=sum(result.point_seconds for result in results),
        choice_seconds=sum(result.choice_seconds for result in results),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One batch size to capture, with all meshes.

    Attributes:
        others: batch sizes between ``ends`` that are interpolated in this capture.
        has_others: whether any job has ``others``.
        ends: the smallest and the largest of all batch sizes.
    """

    make: Callable[[int], Inputs]
    loss: Callable[[Any], torch.Tensor] | Later | None
    batch: int
    others: tuple[int, ...]
    has_others: bool
    ends: tuple[int, int]
    settings: list[Settings]


@dataclass(slots=True, kw_only=True)
class _Result:
    """Points by batch size and index of the mesh; ``told`` is what tables lack."""

    model: str = ""
    between: list[int] = field(default_factory=list)
    points: dict[tuple[int, int], SweepPoint] = field(default_factory=dict)
    num_captures: int = 0
    capture_seconds: float = 0.0
    point_seconds: float = 0.0
    choice_seconds: float = 0.0
    told: list[str] = field(default_factory=list)


def _shared_out(batches: Sequence[int], num_processes: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Batch sizes to capture, both ends included, and for each the interpolated ones that its process does."""
    num_captured = min(max(num_processes, 2), len(batches))
    captured = [batches[0], *batches[len(batches) - num_captured + 1 :]]
    rest = batches[1 : len(batches) - num_captured + 1]
    return captured, [tuple(rest[index::num_captured]) for index in range(num_captured)]


def _refuse_no_numbers(name: str, values: Sequence[int]) -> None:
    wrong = [value for value in values if type(value) is not int or value < 1]
    if wrong or not values:
        what = ", ".join(map(repr, wrong)) or "nothing"
        raise OptionError(f"{name}: {what} must be a whole number, at least 1")


def _distinct(meshes: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    return list({tuple(mesh.items()): mesh for mesh in meshes}.values())


def _run(
    jobs: list[_Job], num_processes: int, num_batches: int, progress: Callable[[str, int, int], None] | None
) -> list[_Result]:
    total = num_batches * len(jobs[0].settings)
    done = 0

    def tell(what: str, is_point: bool) -> None:
        nonlocal done
        done += is_point
        if progress is not None:
            progress(what, done, total)

    if min(num_processes, len(jobs)) == 1:
        exchange: dict[tuple[int, int], StepNumbers | None] = {}
        works = [_Work(job, tell, exchange.__setitem__, exchange.__getitem__) for job in jobs]
        for work in works:
            work.capture()
        for work in works:
            work.do_others()
        return [work.result for work in works]
    context = process_context()
    with context.Manager() as manager:
        told, numbers = manager.Queue(), manager.dict()
        with ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=context) as pool:
            environment = dict(os.environ)
            futures = [pool.submit(_work_elsewhere, job, environment, told, numbers) for job in jobs]
            for message in _messages(told, futures):
                tell(*message)
            try:
                wait(futures)
                errors = [future.exception() for future in futures]
                for error in sorted(filter(None, errors), key=lambda error: isinstance(error, _StoppedError)):
                    raise error
                return [future.result() for future in futures]
            except BrokenProcessPool as error:
                raise CaptureError(
                    "a process of the sweep died, perhaps for want of memory: use fewer processes"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


def _messages(told: Any, futures: list[Future[_Result]]) -> Iterator[tuple[str, bool]]:
    """The messages of the processes, until all have ended or one has failed."""
    while True:
        is_over = all(future.done() for future in futures) or any(
            future.done() and future.exception() for future in futures
        )
        try:
            yield told.get(timeout=0.0 if is_over else 0.2)
        except queue.Empty:
            if is_over:
                return


class _StoppedError(CaptureError):
    """Another process of the sweep failed. The error of that process is the one to show."""


#: Takes the place of batch size and class of meshes once a process has failed.
_FAILED = (-1, -1)


def _work_elsewhere(job: _Job, environment: Mapping[str, str], told: Any, numbers: Any) -> _Result:
    torch.set_num_threads(1)
    os.environ.clear()  # a fork server has the environment of its own start
    os.environ.update(environment)

    def stop_with_others() -> None:
        if _FAILED in numbers:
            raise _StoppedError("another process of the sweep failed")

    def tell(what: str, is_point: bool) -> None:
        stop_with_others()
        told.put((what, is_point))

    def put(key: tuple[int, int], value: StepNumbers | None) -> None:
        numbers[key] = value

    def get(key: tuple[int, int]) -> StepNumbers | None:
        while key not in numbers:
            stop_with_others()
            time.sleep(0.1)
        found: StepNumbers | None = numbers[key]
        return found

    try:
        work = _Work(job, tell, put, get)
        work.capture()
        work.do_others()
    except BaseException:
        put(_FAILED, None)
        raise
    return work.result


class _Work:
    """Runs one job: a capture for each class of meshes, every mesh of its batch size, then the other batch sizes.

    Args:
        job: the job.
        tell: takes what is done, and whether it was a point.
        put, get: pass on the numbers of captures by batch size and class of meshes; ``get`` waits for them.
    """

    def __init__(
        self,
        job: _Job,
        tell: Callable[[str, bool], None],
        put: Callable[[tuple[int, int], StepNumbers | None], None],
        get: Callable[[tuple[int, int]], StepNumbers | None],
    ) -> None:
        self.result = _Result()
        self._job, self._tell, self._put, self._get = job, tell, put, get
        self._loss = job.loss.load() if isinstance(job.loss, Later) else job.loss
        self._settings = list(job.settings)
        self._choices: list[PlacementChoice | None] = [None] * len(job.settings)
        self._classes: list[list[int]] = []
        self._captured: list[tuple[CapturedStep, StepNumbers | None]] = []

    def capture(self) -> None:
        """Does the batch size of the job."""
        name, module, args, kwargs = self._inputs(self._job.batch)
        self.result.model = name
        is_extended = has_extended_parameters(module)
        if self._settings[0].rules.placements == AUTO_PLACEMENTS:
            self._choose_placements(module, args, kwargs)
        self._classes = classes_of_meshes(self._settings, is_extended)
        for number, indices in enumerate(self._classes):
            captured = self._capture(self._job.batch, self._settings[indices[0]], module, args, kwargs)
            is_asked = self._job.has_others and not is_extended
            found = numbers_of(captured, module, (args, kwargs)) if is_asked else None
            self._captured.append((captured, found))
            self._put((self._job.batch, number), found)
            self._points(self._job.batch, indices, captured, module, args, kwargs)

    def do_others(self) -> None:
        """Does the batch sizes in between."""
        for batch in self._job.others:
            name, module, args, kwargs = self._inputs(batch)
            for number, indices in enumerate(self._classes):
                self._tell(f"wait for the captures of batches {', '.join(map(str, self._job.ends))}", False)
                low, high = (self._get((end, number)) for end in self._job.ends)
                captured, own = self._captured[number]
                step = None
                if own is not None and low is not None and high is not None and name == self.result.model:
                    with no_garbage_collection(), remembered_results():
                        step = step_between(captured, own, module, (args, kwargs), low, high)
                if step is None:
                    step = self._capture(batch, self._settings[indices[0]], module, args, kwargs)
                else:
                    self.result.between.append(batch)
                self._points(batch, indices, step, module, args, kwargs)

    def _choose_placements(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        chooser = PlacementChooser(module=module, args=args, kwargs=kwargs, loss=self._loss)
        began = time.perf_counter()
        for index, settings in enumerate(self._job.settings):
            self._tell(f"choose placements for batch {self._job.batch} on {_mesh_text(settings)}", False)
            choice = self._choices[index] = chooser.choose(settings)
            self._settings[index] = replace(
                settings, rules=replace(settings.rules, placements=choice.placements)
            )
        self.result.choice_seconds += time.perf_counter() - began

    def _inputs(self, batch: int) -> tuple[str, nn.Module, Sequence[Any], Mapping[str, Any]]:
        name, module, args, kwargs, sharded = plain_inputs(*self._job.make(batch))
        refuse_sharded(sharded)
        return name, module, args, kwargs

    def _capture(
        self,
        batch: int,
        settings: Settings,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> CapturedStep:
        self._tell(f"capture batch {batch}", False)
        began = time.perf_counter()

        def capture(limited: Settings) -> CapturedStep:
            with remembered_results():
                return capture_step(
                    module, args, kwargs, rules=settings.rules, loss=self._loss, checkpoint=settings.checkpoint,
                    needs_loss=True, device_type=settings.card.device_type, is_brief=True,
                    choose=partial(choose_inspected, limited, module),
                )  # fmt: skip

        captured = _within_budget(settings, capture)
        self.result.num_captures += 1
        self.result.capture_seconds += time.perf_counter() - began
        return captured

    def _points(
        self,
        batch: int,
        indices: Sequence[int],
        captured: CapturedStep,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        tokens = count_tokens(args, kwargs)
        with spared_by_garbage_collection(), remembered_results():
            for index in indices:
                settings, choice = self._settings[index], self._choices[index]
                began = time.perf_counter()
                with no_garbage_collection():
                    point = _point(self.result.model, module, captured, settings, batch, tokens, choice)
                self.result.points[batch, index] = point
                self.result.told += [message for message in settings.told if message not in self.result.told]
                self.result.point_seconds += time.perf_counter() - began
                self._tell(f"batch {batch} on {_mesh_text(settings)}", True)


def _point(
    name: str,
    module: nn.Module,
    captured: CapturedStep,
    settings: Settings,
    batch: int,
    tokens: int | None,
    choice: PlacementChoice | None,
) -> SweepPoint:
    def report(limited: Settings) -> Report:
        step = reshard_step(captured, settings.rules.mesh)
        inspection = Inspection(settings=limited, captured=step, stages=Stages(None), is_brief=True)
        return inspection.report(name, module, tokens)

    point = sweep_point(_within_budget(settings, report), batch, settings.limit_bytes)
    return (
        point
        if choice is None
        else replace(point, placements=choice.name, stated=tuple(choice.stated.texts()))
    )


def _within_budget(settings: Settings, make: Callable[[Settings], ResultT]) -> ResultT:
    """What ``make`` makes within the budget, if there is a plan that could keep it; else without a budget."""
    if settings.plan == "auto" and settings.budget_bytes is not None:
        with suppress(BudgetError):
            return make(settings)
    return make(replace(settings, budget_bytes=None))


def _mesh_text(settings: Settings) -> str:
    return " x ".join(f"{name}={size}" for name, size in settings.rules.mesh.items())
