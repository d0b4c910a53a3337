"""The losses of a run: one CSV row per step, cut back to the checkpoint on resume, drawn as a curve."""

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from checkpoint_folder import write_durably
from distributed_setup import UsageError

_HEADER = ["step", "loss", "grad_norm", "held_out_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """Losses in nats per token after `step` steps; `held_out` only where it was measured."""

    step: int
    loss: float
    grad_norm: float
    held_out: float | None = None

    def cells(self) -> list[str]:
        """CSV cells; floats in full, so that equal runs write equal files."""
        return [
            str(self.step),
            repr(self.loss),
            repr(self.grad_norm),
            "" if self.held_out is None else repr(self.held_out),
        ]


class LossLog:
    """Rows of `path` up to `resume_step` are kept, later ones (lost with the interruption) are dropped."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        self.rows = _read_rows(path)[:resume_step] if resume_step else []
        if [row.step for row in self.rows] != list(range(1, resume_step + 1)):
            raise UsageError(
                f"{path} does not hold steps 1 to {resume_step} of the checkpoint next to it: "
                "put the file back, or start over with --fresh"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(
            path, "".join(",".join(cells) + "\n" for cells in [_HEADER, *(r.cells() for r in self.rows)])
        )
        self._file = path.open("a")

    def append(self, row: LossRow) -> None:
        """Add the row of the next step and hand it to the operating system at once."""
        self.rows.append(row)
        self._file.write(",".join(row.cells()) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make sure the rows are on disk, before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())


def _read_rows(path: Path) -> list[LossRow]:
    """Complete rows of the file; a row cut off by a kill ends the reading."""
    rows: list[LossRow] = []
    if not path.exists():
        return rows
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            try:
                held_out = float(cells["held_out_loss"]) if cells["held_out_loss"] else None
                rows.append(
                    LossRow(
                        step=int(cells["step"]),
                        loss=float(cells["loss"]),
                        grad_norm=float(cells["grad_norm"]),
                        held_out=held_out,
                    )
                )
            except (TypeError, ValueError, KeyError):
                break
    return rows


def draw_loss_curve(path: Path, rows: list[LossRow], unsharded: list[float], title: str) -> None:
    """Save a PNG: training loss, held-out points, and the unsharded model's first steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([r.step for r in rows], [r.loss for r in rows], linewidth=1.2, label="training")
    held_out = [(r.step, r.held_out) for r in rows if r.held_out is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", markersize=5, label="held out")
    if unsharded:
        steps = range(1, len(unsharded) + 1)
        axes.plot(steps, unsharded, "x", color="black", markersize=5, label="unsharded model, same batches")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
