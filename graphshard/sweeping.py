"""``graphshard.sweep``: one model on many meshes and with many batch sizes.

The model is captured once for each batch size. Every mesh takes a copy of that capture, with other
numbers of ranks in it, through the passes (:mod:`graphshard.resharding`), and gives exactly the numbers
of :func:`graphshard.inspect`. Batch sizes can be shared out among processes.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .capture import ShardingRules, capture_step
from .errors import CaptureError, OptionError
from .inspection import Inspection
from .inspection_settings import Settings, count_tokens, plain_inputs, read_settings, refuse_sharded
from .report.sweep_data import Sweep, SweepPoint, sweep_point
from .resharding import can_reshard, reshard_step
from .rewrite import no_garbage_collection, remembered_results
from .stages import Stages

#: Model, positional and keyword inputs for a batch size.
Inputs = tuple[nn.Module | torch.export.ExportedProgram, Sequence[Any], Mapping[str, Any]]


def sweep(
    make: Callable[[int], Inputs],
    *,
    meshes: Sequence[Mapping[str, int]],
    batches: Sequence[int],
    loss: Callable[[Any], torch.Tensor] | Later | None = None,
    num_processes: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Predicts a training step for every mesh with every batch size.

    Args:
        make: model and inputs of one rank for a batch size; :func:`resized` makes one from example inputs.
        meshes: sizes of the axes, outermost first, of each mesh.
        batches: sizes for one rank and micro-batch.
        loss: as in :func:`graphshard.inspect`, or how to find it.
        num_processes: batch sizes are shared out among so many; with more than one, ``make`` and
            ``loss`` must be functions that can be pickled, or a :class:`Later`.
        progress: is told what is being done, how many points are done, and how many there are.
        options: others of :func:`graphshard.inspect`: hardware, tables, units, mp_policy,
            reshard_after_forward, optimizer, micro_batches, plan, checkpoint. ``memory_budget`` is what
            a point must keep to fit; nothing is refused for exceeding it.

    Raises:
        OptionError: no meshes or no batch sizes, or ones that are no whole numbers; an unknown option.
        CaptureError: a batch size cannot be captured, or a process died.
        GraphShardError: as :func:`graphshard.inspect`.
    """
    _refuse_no_numbers("batches", batches)
    _refuse_no_numbers("num_processes", [num_processes])
    if not meshes:
        raise OptionError("meshes: there must be one at least")
    batches, meshes = list(dict.fromkeys(batches)), _distinct(meshes)
    each = [_read_options(options, mesh) for mesh in meshes]
    jobs = [_Job(make=make, loss=loss, batch=batch, settings=each) for batch in batches]
    results = _run(jobs, num_processes, progress)
    found = [result.points[index] for index in range(len(meshes)) for result in results]
    settings = each[0]
    limit = int(settings.card.memory_bytes) if settings.budget_bytes is None else settings.budget_bytes
    return Sweep(
        model=results[0].model,
        hardware=settings.card.name,
        settings=settings.as_dict(),
        limit_bytes=limit,
        points=tuple(found),
        num_captures=sum(result.num_captures for result in results),
        capture_seconds=sum(result.capture_seconds for result in results),
        point_seconds=sum(result.point_seconds for result in results),
    )


@dataclass(frozen=True, slots=True)
class Later:
    """A loss that is looked up in the process that captures.

    Attributes:
        load: gives the loss; it can be pickled, and the loss need not be.
    """

    load: Callable[[], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class resized:  # noqa: N801 - used as a function, and must be pickled
    """A ``make`` for :func:`sweep` that resizes dim 0 of every tensor among example inputs.

    Attributes:
        example: a function that gives model, positional and keyword inputs.
    """

    example: Callable[[], Inputs]

    def __call__(self, batch: int) -> Inputs:
        """The example with another batch size.

        Raises:
            CaptureError: the tensors do not have one size of dim 0 in common, or there are none.
        """
        model, args, kwargs = self.example()
        named = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
        tensors = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        sizes = {tuple(value.shape[:1]) for value in tensors.values()}
        if len(sizes) != 1 or sizes == {()}:
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
            raise CaptureError(
                f"the batch cannot be resized: dim 0 of the inputs ({shapes or 'no tensors'}) is not one size; "
                "give a factory that takes the batch size: def factory(batch)"
            )

        def fitted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            shape = (batch, *value.shape[1:])
            return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)

        return model, tuple(map(fitted, args)), {name: fitted(value) for name, value in kwargs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One batch size and all meshes."""

    make: Callable[[int], Inputs]
    loss: Callable[[Any], torch.Tensor] | Later | None
    batch: int
    settings: list[Settings]


@dataclass(slots=True, kw_only=True)
class _Result:
    model: str = ""
    points: list[SweepPoint] = field(default_factory=list)
    num_captures: int = 0
    capture_seconds: float = 0.0
    point_seconds: float = 0.0


def _refuse_no_numbers(name: str, values: Sequence[int]) -> None:
    wrong = [value for value in values if type(value) is not int or value < 1]
    if wrong or not values:
        what = ", ".join(map(repr, wrong)) or "nothing"
        raise OptionError(f"{name}: {what} must be a whole number, at least 1")


def _distinct(meshes: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    return list({tuple(mesh.items()): mesh for mesh in meshes}.values())


def _read_options(options: Mapping[str, Any], mesh: Mapping[str, int]) -> Settings:
    known: dict[str, Any] = {
        "hardware": "h100-sxm", "tables": None, "units": (), "mp_policy": None, "reshard_after_forward": None,
        "optimizer": "adamw", "micro_batches": 1, "memory_budget": None, "plan": "unit", "checkpoint": (),
    }  # fmt: skip
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(f"sweep has no option {', '.join(unknown)}; known: {', '.join(known)}")
    return read_settings(rules=None, mesh=mesh, **{**known, **options})


def _run(
    jobs: list[_Job], num_processes: int, progress: Callable[[str, int, int], None] | None
) -> list[_Result]:
    total = sum(len(job.settings) for job in jobs)
    done = 0

    def tell(what: str, is_point: bool) -> None:
        nonlocal done
        done += is_point
        if progress is not None:
            progress(what, done, total)

    if min(num_processes, len(jobs)) == 1:
        return [_work(job, tell) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        told = manager.Queue()
        with ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=context) as pool:
            # The largest batch first: none is left over for one process at the end.
            order = sorted(jobs, key=lambda job: -job.batch)
            futures = {job.batch: pool.submit(_work_elsewhere, job, told) for job in order}
            for message in _messages(told, list(futures.values())):
                tell(*message)
            try:
                return [futures[job.batch].result() for job in jobs]
            except BrokenProcessPool as error:
                raise CaptureError(
                    "a process of the sweep died, perhaps for want of memory: use fewer processes"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


def _messages(told: Any, futures: list[Future[_Result]]) -> Iterator[tuple[str, bool]]:
    """What the processes say, until all have ended or one has failed."""
    while True:
        is_over = all(future.done() for future in futures) or any(
            future.done() and future.exception() for future in futures
        )
        try:
            yield told.get(timeout=0.0 if is_over else 0.2)
        except queue.Empty:
            if is_over:
                return


def _work_elsewhere(job: _Job, told: Any) -> _Result:
    torch.set_num_threads(1)
    return _work(job, lambda what, is_point: told.put((what, is_point)))


def _work(job: _Job, tell: Callable[[str, bool], None]) -> _Result:
    """Captures as often as needed, and takes each mesh through the passes."""
    result = _Result()
    loss = job.loss.load() if isinstance(job.loss, Later) else job.loss
    name, module, args, kwargs, sharded = plain_inputs(*job.make(job.batch))
    refuse_sharded(sharded)
    result.model = name
    found: dict[int, SweepPoint] = {}
    left = dict(enumerate(job.settings))
    while left:
        first = next(iter(left.values()))
        tell(f"capture batch {job.batch}", False)
        began = time.perf_counter()
        with remembered_results():
            captured = capture_step(
                module, args, kwargs, rules=first.rules, loss=loss, checkpoint=first.checkpoint,
                needs_loss=True, device_type=first.card.device_type, is_brief=True,
            )  # fmt: skip
        result.num_captures += 1
        result.capture_seconds += time.perf_counter() - began
        alike = {
            index: settings
            for index, settings in left.items()
            if can_reshard(first.rules.mesh, settings.rules.mesh)
        }
        for index, settings in alike.items():
            began = time.perf_counter()
            with no_garbage_collection(), remembered_results():
                found[index] = _point(name, module, captured, settings, job.batch, count_tokens(args, kwargs))
            result.point_seconds += time.perf_counter() - began
            tell(f"batch {job.batch} on {_mesh_text(settings.rules)}", True)
            del left[index]
    result.points = [found[index] for index in range(len(job.settings))]
    return result


def _mesh_text(rules: ShardingRules) -> str:
    return " x ".join(f"{name}={size}" for name, size in rules.mesh.items())


def _point(
    name: str, module: nn.Module, captured: Any, settings: Settings, batch: int, tokens: int | None
) -> SweepPoint:
    step = reshard_step(captured, settings.rules.mesh)
    limit = int(settings.card.memory_bytes) if settings.budget_bytes is None else settings.budget_bytes
    unlimited = replace(settings, budget_bytes=None)
    inspection = Inspection(settings=unlimited, captured=step, stages=Stages(None), is_brief=True)
    return sweep_point(inspection.report(name, module, tokens), batch, limit)
