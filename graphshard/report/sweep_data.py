"""A sweep as data: the main numbers of a training step for each mesh and batch size."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .data import CATEGORIES, Report

SWEEP_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One mesh and one batch size.

    Attributes:
        mesh: axis sizes, outermost first.
        num_ranks: ranks of the mesh.
        batch: batch size of one rank and micro-batch.
        step_seconds, compute_seconds, exposed_seconds: as in :class:`graphshard.report.Report`.
        samples_per_second, tokens_per_second: rates of all ranks; None for tokens if the inputs have none.
        mfu: model FLOP utilisation; None for a model without products.
        peak_bytes: peak of a rank; ``memory`` is the same by category.
        fits: whether the peak is within the budget, or the capacity of the card.
        placements: name of the placements that were chosen for this point; None if they were given.
        stated: what they state, as lines with "*" for numbers in names.
    """

    mesh: Mapping[str, int]
    num_ranks: int
    batch: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float | None
    peak_bytes: int
    memory: Mapping[str, int]
    fits: bool
    placements: str | None = None
    stated: tuple[str, ...] = ()

    @property
    def exposed_share(self) -> float:
        """The fraction of the step in which compute waits for communication."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0


def sweep_point(report: Report, batch: int, limit_bytes: int) -> SweepPoint:
    """The main numbers of a report.

    Args:
        report: the report of a step.
        batch: batch size of one rank and micro-batch.
        limit_bytes: the most a rank may hold.
    """
    through = report.throughput
    samples = batch * report.halves[0].repeats * report.num_batches
    return SweepPoint(
        mesh=report.mesh,
        num_ranks=report.num_ranks,
        batch=batch,
        step_seconds=report.step_seconds,
        compute_seconds=report.compute_seconds,
        exposed_seconds=report.exposed_seconds,
        samples_per_second=samples / report.step_seconds,
        tokens_per_second=through.tokens_per_second if through else None,
        mfu=through.mfu if through else None,
        peak_bytes=report.memory.peak_bytes,
        memory=report.memory.categories,
        fits=report.memory.peak_bytes <= limit_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All points of a sweep.

    Attributes:
        model: name of its class.
        hardware: name of the card.
        settings: the settings without mesh and batch.
        limit_bytes: the most a rank may hold: the budget, or the capacity of the card.
        points: all points, by mesh and then by batch.
        between: batch sizes that were interpolated between the captures of the smallest and the largest.
        num_captures: number of captures.
        capture_seconds, point_seconds, choice_seconds: time of all captures, of all points and of all choices of
            placements, summed over processes.
    """

    model: str
    hardware: str
    settings: Mapping[str, Any]
    limit_bytes: int
    points: tuple[SweepPoint, ...]
    between: tuple[int, ...]
    num_captures: int
    capture_seconds: float
    point_seconds: float
    choice_seconds: float = 0.0

    @property
    def are_chosen(self) -> bool:
        """Whether placements were chosen for each point."""
        return any(point.placements is not None for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """The sweep as JSON values."""
        shares = [{"exposed_share": point.exposed_share} for point in self.points]
        data: dict[str, Any] = json.loads(json.dumps({"sweep_version": SWEEP_VERSION, **asdict(self)}))
        data["points"] = [point | share for point, share in zip(data["points"], shares, strict=True)]
        return data

    def to_json(self, path: str | Path) -> None:
        """Writes :meth:`to_dict` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), allow_nan=False) + "\n")

    def to_csv(self, path: str | Path) -> None:
        """Writes one row for each point: mesh axes, batch, chosen placements, times, rates, memory by category."""
        axes = list(dict.fromkeys(axis for point in self.points for axis in point.mesh))
        numbers: tuple[str, ...] = (
            "num_ranks", "batch", "step_seconds", "compute_seconds", "exposed_seconds", "exposed_share",
            "samples_per_second", "tokens_per_second", "mfu", "fits", "peak_bytes",
        )  # fmt: skip
        if self.are_chosen:
            numbers = (*numbers[:2], "placements", *numbers[2:])
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*axes, *numbers, *(f"{name}_bytes" for name in CATEGORIES)])
            for point in self.points:
                sizes = [point.mesh.get(axis, 1) for axis in axes]
                values = [getattr(point, name) for name in numbers]
                writer.writerow([*sizes, *values, *(point.memory[name] for name in CATEGORIES)])
