"""Renders a sweep: as a table with rich, and as a plot with matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..units import GIB, size_text, time_text
from .sweep_data import Sweep, SweepPoint


def sweep_table(sweep: Sweep) -> Table:
    """One row for each point."""
    has_tokens = any(point.tokens_per_second is not None for point in sweep.points)
    table = Table(box=None, pad_edge=False)
    rate = "tokens/s" if has_tokens else "samples/s"
    chosen = ("placements",) if sweep.are_chosen else ()
    columns = (
        *("mesh", "ranks", "batch", *chosen, "step", "exposed", "share"),
        *(rate, f"{rate} a rank", "MFU", "memory", ""),
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("mesh", "placements", "") else "right")
    for point in sweep.points:
        per_second = rate_of(point)
        cells = (
            mesh_text(point),
            str(point.num_ranks),
            str(point.batch),
            *([point.placements or "-"] if chosen else []),
            time_text(point.step_seconds),
            time_text(point.exposed_seconds),
            f"{100 * point.exposed_share:.1f} %",
            f"{per_second:,.0f}",
            f"{per_second / point.num_ranks:,.0f}",
            "-" if point.mfu is None else f"{100 * point.mfu:.1f} %",
            size_text(point.peak_bytes),
            "" if point.fits else "does not fit",
        )
        table.add_row(*map(Text, cells))  # names may look like markup
    return table


def mesh_text(point: SweepPoint) -> str:
    """The sizes of its axes: "replicate=2 x shard=8"."""
    return " x ".join(f"{name}={size}" for name, size in point.mesh.items())


def rate_of(point: SweepPoint) -> float:
    """Tokens per second, or samples where tokens are not known."""
    return point.samples_per_second if point.tokens_per_second is None else point.tokens_per_second


def sweep_plot(sweep: Sweep, path: str | Path) -> None:
    """Plots throughput, memory of a rank and exposed fraction over devices, with one line for each batch size.

    Meshes with replicas, and sizes of an axis of placements, have lines of their own. Points that do not fit are
    hollow.

    Raises:
        UsageError: matplotlib is not installed, or cannot write the file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a plot needs matplotlib: pip install graphshard[plots]") from error
    lines: dict[str, list[SweepPoint]] = {}
    for point in sweep.points:
        others = {name: size for name, size in point.mesh.items() if name != "shard" and size > 1}
        copies = others.pop("replicate", 1)
        label = f"batch {point.batch}" + (f", {copies} copies" if copies > 1 else "")
        label += "".join(f", {name}={size}" for name, size in others.items())
        lines.setdefault(label, []).append(point)
    has_tokens = any(point.tokens_per_second is not None for point in sweep.points)
    panels: tuple[tuple[str, Callable[[SweepPoint], float]], ...] = (
        (
            f"{'tokens' if has_tokens else 'samples'}/s a device",
            lambda point: rate_of(point) / point.num_ranks,
        ),
        ("memory of a device, GiB", lambda point: point.peak_bytes / GIB),
        ("exposed communication, %", lambda point: 100 * point.exposed_share),
    )
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    figure.suptitle(f"{sweep.model} on {sweep.hardware}")
    for axes, (title, read) in zip(figure.subplots(1, 3), panels, strict=True):
        for number, (label, points) in enumerate(lines.items()):
            points = sorted(points, key=lambda point: point.num_ranks)
            color = f"C{number % 10}"
            axes.plot([p.num_ranks for p in points], [read(p) for p in points], color=color, label=label)
            for is_full, face in ((True, color), (False, "white")):
                some = [p for p in points if p.fits == is_full]
                axes.plot([p.num_ranks for p in some], [read(p) for p in some], "o", color=color, mfc=face)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({point.num_ranks for point in sweep.points}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        axes.tick_params(axis="x", labelrotation=60)
        axes.set_xlabel("devices")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    memory = figure.axes[1]
    memory.axhline(sweep.limit_bytes / GIB, color="black", linestyle="--", label="limit")
    memory.legend(fontsize="small")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"a plot cannot be written to {str(path)!r}: {error}") from error
