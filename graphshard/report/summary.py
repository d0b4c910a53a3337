"""Prints a report on a terminal with rich; without a terminal, as plain text."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..units import count_text, size_text, time_text
from .data import Report


def print_summary(report: Report, console: Console) -> None:
    """Prints step time, memory, collectives and exposures."""
    console.print(summary(report))


def summary(report: Report) -> RenderableType:
    """The parts of the summary, one under the other."""
    parts: list[RenderableType] = [_head(report)]
    if report.candidates:
        parts += _candidates(report)
    parts += [*_halves(report), *_memory(report)]
    if report.collectives:
        parts += _collectives(report)
    if report.reshards:
        parts += _reshards(report)
    if report.exposures:
        parts += _exposures(report)
    return Group(*parts)


def _head(report: Report) -> Text:
    mesh = " x ".join(f"{name}={size}" for name, size in report.mesh.items()) or "groups of the graph"
    name = report.model.name if report.model else "graph"
    what = f", {count_text(report.model.num_elements)} parameters" if report.model else ""
    lines = [
        f"{name}{what}, {mesh}, {report.hardware}",
        f"step {time_text(report.step_seconds)}: compute {time_text(report.compute_seconds)}, exposed "
        f"communication {time_text(report.exposed_seconds)} ({_share(report.exposed_seconds, report)})",
        f"no schedule is faster than {time_text(report.bound_seconds)}: gap {100 * report.gap:.1f} %",
    ]
    if report.throughput is not None:
        through = report.throughput
        line = f"MFU {100 * through.mfu:.1f} %, HFU {100 * through.hfu:.1f} % of {through.dtype}"
        if through.tokens_per_second_per_rank is not None and through.tokens_per_second is not None:
            line += (
                f", {through.tokens_per_second_per_rank:,.0f} tokens/s a rank, "
                f"{through.tokens_per_second:,.0f} in all"
            )
        lines.append(line)
    return Text("\n".join(lines))


def _share(seconds: float, report: Report) -> str:
    return f"{100 * seconds / report.step_seconds:.1f} %" if report.step_seconds else "0 %"


def _titled(title: str, table: Table) -> tuple[Text, Table]:
    return Text(f"\n{title}", style="bold"), table


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Adds a row of plain texts: names of modules may look like rich's markup ("[/b]")."""
    table.add_row(*map(Text, cells))


def _candidates(report: Report) -> tuple[Text, Table]:
    table = _table("placements", "step", "exposed", "peak memory", "verdict")
    table.columns[4].justify = "left"
    for one in report.candidates:
        numbers = ("-", "-", "-")
        if one.step_seconds is not None and one.exposed_seconds is not None and one.peak_bytes is not None:
            numbers = (time_text(one.step_seconds), time_text(one.exposed_seconds), size_text(one.peak_bytes))
        _add(table, one.name, *numbers, one.verdict)
    return _titled("Placements that were compared", table)


def _halves(report: Report) -> tuple[Text, Table]:
    table = _table("", "times", "each", "compute", "exposed", "bound", "gap", "peak memory")
    for half in report.halves:
        _add(
            table,
            half.name,
            str(half.repeats),
            time_text(half.seconds),
            time_text(half.compute_seconds),
            time_text(half.exposed_seconds),
            time_text(half.bound_seconds),
            f"{100 * half.gap:.1f} %",
            size_text(half.peak.total_bytes),
        )
    return _titled("Time", table)


def _memory(report: Report) -> tuple[Text, Table]:
    memory = report.memory
    limit = memory.capacity_bytes if memory.budget_bytes is None else memory.budget_bytes
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    title = (
        f"Memory of a rank at its peak, in the {memory.peak_half} ({memory.peak_where}): "
        f"{size_text(memory.peak_bytes)} of {size_text(limit)}, {verdict}"
    )
    table = _table("", "bytes", "share")
    for name, num_bytes in memory.categories.items():
        if num_bytes:
            _add(table, name, size_text(num_bytes), f"{100 * num_bytes / memory.peak_bytes:.1f} %")
    return _titled(title, table)


def _collectives(report: Report) -> tuple[Text, Table]:
    table = _table("half", "kind", "group", "bytes", "count", "each", "exposed", left=3)
    for one in report.collectives[:20]:
        _add(
            table,
            one.half,
            one.kind,
            one.group,
            size_text(one.num_bytes),
            str(one.count),
            time_text(one.seconds),
            time_text(one.exposed_seconds) if one.exposed_seconds else "-",
        )
    if len(report.collectives) > 20:
        rest = report.collectives[20:]
        exposed = sum(one.exposed_seconds for one in rest)
        _add(
            table,
            f"{len(rest)} smaller kinds", "", "", "", str(sum(one.count for one in rest)), "",
            time_text(exposed) if exposed else "-",
        )  # fmt: skip
    return _titled("Collectives of a step", table)


def _reshards(report: Report) -> tuple[Text, Table]:
    table = _table("half", "reshard", "of a value in", "as", "bytes", "count", "each", "exposed", left=4)
    for one in report.reshards[:20]:
        _add(
            table,
            one.half, one.reshard, one.module, one.kind, size_text(one.num_bytes), str(one.count),
            time_text(one.seconds), time_text(one.exposed_seconds) if one.exposed_seconds else "-",
        )  # fmt: skip
    group = report.reshards[0].group
    sent = sum(one.count * one.seconds for one in report.reshards)
    exposed = sum(one.exposed_seconds for one in report.reshards)
    title = f"Reshards over {group} of a step: {time_text(sent)}, {time_text(exposed)} exposed"
    if len(report.reshards) > 20:
        title += f" (20 of {len(report.reshards)} kinds)"
    return _titled(title, table)


def _exposures(report: Report) -> tuple[Text, Table]:
    table = _table("what", "exposed", "why", "what would help")
    table.columns[2].justify = table.columns[3].justify = "left"
    for one in report.exposures:
        which = one.collective
        _add(
            table,
            f"{one.half} {which.kind} {which.title}",
            time_text(one.step_seconds),
            which.reason,
            which.remedy,
        )
    return _titled("Costliest exposures", table)
