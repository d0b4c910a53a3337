"""From the two ranks' records to rows, and from rows to a table.

A step is as slow as its slower rank, so each sample is the larger of the two, and so are memory figures.
Ratios are taken inside each round, where contenders ran seconds apart, and the median of rounds is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REFERENCE = "fsdp2-compile"
COMPILE_REFERENCE = "unsharded"
MAX_LOSS_GAP = 1e-4
MIB = 2**20

RankRecord = Mapping[str, Mapping]
"""One rank's `records`: contender name to the fields of step_worker.ContenderRecord."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender's figures. Ratios are None where their reference did not run.

    First calls are None where the kernels had been compiled before; their ratio is one of CPU times, since
    compiling takes tens of seconds in a row, in which a shared machine's wall clock says little.
    """

    contender: str
    median_ms: float
    min_ms: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    first_call_s: float | None
    first_call_cpu_s: float | None
    first_call_ratio: float | None
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    comm_bytes: int
    peak_bytes: int
    total_bytes: int
    """What is held between steps (parameters, optimizer state, buffers) plus the peak above it."""
    left_bytes: int
    samples_ms: list[list[float]]


def _slower_rank(name: str, ranks: Sequence[RankRecord]) -> list[list[float]]:
    per_rank = [rank[name]["rounds"] for rank in ranks]
    return [[1e3 * max(step) for step in zip(*turn, strict=True)] for turn in zip(*per_rank, strict=True)]


def round_ratios(samples: list[list[float]], reference: list[list[float]]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the per-round ratios of medians."""
    ratios = [
        statistics.median(ours) / statistics.median(theirs)
        for ours, theirs in zip(samples, reference, strict=True)
    ]
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def _make_row(name: str, ranks: Sequence[RankRecord], cold: frozenset[str]) -> Row:
    samples = _slower_rank(name, ranks)
    steps = [step for turn in samples for step in turn]
    low = middle = high = None
    if REFERENCE in ranks[0]:
        low, middle, high = round_ratios(samples, _slower_rank(REFERENCE, ranks))

    def largest(field: str, contender: str = name) -> float:
        return max(rank[contender][field] for rank in ranks)

    held = ("parameter_bytes", "optimizer_bytes", "comm_bytes")
    first_call_s = first_call_cpu_s = first_call_ratio = None
    if name in cold:
        first_call_s = largest("first_call_s")
        first_call_cpu_s = largest("first_call_cpu_s")
        if COMPILE_REFERENCE in ranks[0] and COMPILE_REFERENCE in cold:
            first_call_ratio = first_call_cpu_s / largest("first_call_cpu_s", COMPILE_REFERENCE)
    return Row(
        contender=name,
        median_ms=statistics.median(steps),
        min_ms=min(steps),
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        first_call_s=first_call_s,
        first_call_cpu_s=first_call_cpu_s,
        first_call_ratio=first_call_ratio,
        parameter_bytes=int(largest("parameter_bytes")),
        gradient_bytes=int(largest("gradient_bytes")),
        optimizer_bytes=int(largest("optimizer_bytes")),
        comm_bytes=int(largest("comm_bytes")),
        peak_bytes=int(largest("peak_bytes")),
        total_bytes=max(
            rank[name]["peak_bytes"] + sum(rank[name][field] for field in held) for rank in ranks
        ),
        left_bytes=int(largest("left_bytes")),
        samples_ms=samples,
    )


def make_rows(ranks: Sequence[RankRecord], *, cold: frozenset[str]) -> list[Row]:
    """One row per contender, in the order they ran; those in `cold` compiled from nothing."""
    return [_make_row(name, ranks, cold) for name in ranks[0]]


def find_loss_gaps(ranks: Sequence[RankRecord], averaging: frozenset[str]) -> list[str]:
    """Contenders whose losses differ from the first one's: they did not train the same model.

    The first loss must agree for all; the later ones, after updates, for those in `averaging`, which average
    gradients over the ranks.
    """
    gaps = []
    for rank, records in enumerate(ranks):
        first = next(iter(records.values()))["losses"][:1]
        later = next((record["losses"] for name, record in records.items() if name in averaging), first)
        for name, record in records.items():
            expected = later if name in averaging else first
            for step, (loss, wanted) in enumerate(zip(record["losses"], expected, strict=False)):
                if not math.isclose(loss, wanted, rel_tol=MAX_LOSS_GAP):
                    gaps.append(
                        f"{name}: loss {loss:.6f} in step {step} on rank {rank}, expected {wanted:.6f}"
                    )
                    break
    return gaps


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"


def _decimals(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def format_table(rows: Sequence[Row]) -> str:
    """Two header lines (names, units), then a line per row, columns aligned."""
    names = "contender,median,min,ratio to,quartiles,first,CPU,ratio to,params,grads,optim.,comm,step,all"
    units = f",ms,ms,{REFERENCE},,call s,time s,{COMPILE_REFERENCE},MiB,MiB,MiB,MiB,peak MiB,MiB"
    head = [tuple(names.split(",")), tuple(units.split(","))]
    body = [
        (
            row.contender,
            f"{row.median_ms:.1f}",
            f"{row.min_ms:.1f}",
            _decimals(row.ratio),
            f"{_decimals(row.ratio_low)} - {_decimals(row.ratio_high)}" if row.ratio is not None else "-",
            _decimals(row.first_call_s, 1),
            _decimals(row.first_call_cpu_s, 1),
            _decimals(row.first_call_ratio),
            _mib(row.parameter_bytes),
            _mib(row.gradient_bytes),
            _mib(row.optimizer_bytes),
            _mib(row.comm_bytes),
            _mib(row.peak_bytes),
            _mib(row.total_bytes),
        )
        for row in rows
    ]
    lines = head + body
    widths = [max(len(line[i]) for line in lines) for i in range(len(head[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
