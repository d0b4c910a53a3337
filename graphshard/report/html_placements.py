"""The part of the page about placements on a further mesh axis: where parameters lie, what reshards cost, and
which placements were compared.
"""

from __future__ import annotations

from ..units import size_text
from .data import Report
from .html_parts import escaped, shown_time, table


def placements_section(report: Report) -> str:
    """A section with tables; "" for a report without placements."""
    if not report.placements:
        return ""
    axis = list(report.mesh)[-1]
    return (
        '<section aria-labelledby="placements-title">\n'
        f'<h2 id="placements-title">Placements on {escaped(axis)}={report.mesh[axis]}</h2>\n'
        f"{_candidates(report)}{_parameters(report)}\n{_reshards(report)}\n</section>\n"
    )


def _candidates(report: Report) -> str:
    if not report.candidates:
        return ""
    rows = [
        [
            (f"<strong>{escaped(one.name)}</strong>" if one.is_chosen else escaped(one.name), None),
            ("-" if one.step_seconds is None else shown_time(one.step_seconds), one.step_seconds),
            ("-" if one.exposed_seconds is None else shown_time(one.exposed_seconds), one.exposed_seconds),
            ("-" if one.peak_bytes is None else size_text(one.peak_bytes), one.peak_bytes),
            (escaped(one.verdict), None),
        ]
        for one in report.candidates
    ]
    columns = ("Placements", "Step", "Exposed", "Peak memory", "Verdict")
    return (
        table(columns, rows, label="Placements that were compared", identity="candidates-table", left=(0, 4))
        + "\n"
    )


def _parameters(report: Report) -> str:
    rows = [
        [
            (f"<code>{escaped(one.name)}</code>", None),
            (escaped(one.placement), None),
            (str(one.count), one.count),
            (_shape(one.shape), None),
            (_shape(one.piece), None),
        ]
        for one in report.placements
    ]
    columns = ("Parameter", "Placement", "Count", "Shape", "Piece of a rank")
    return table(columns, rows, label="Placements of parameters", identity="placements-table", left=(0, 1))


def _reshards(report: Report) -> str:
    if not report.reshards:
        return "<p>No value is moved between placements.</p>"
    rows = [
        [
            (escaped(one.reshard), None),
            (
                f'<span class="cost">{shown_time(one.exposed_seconds)}</span>' if one.exposed_seconds else "-",
                one.exposed_seconds,
            ),
            (f"<code>{escaped(one.module)}</code>", None),
            (escaped(one.half), None),
            (escaped(one.kind.replace("_", "-")), None),
            (size_text(one.num_bytes), one.num_bytes),
            (str(one.count), one.count),
            (shown_time(one.seconds), one.seconds),
            (shown_time(one.count * one.seconds), one.count * one.seconds),
        ]
        for one in report.reshards
    ]  # fmt: skip
    columns = ("Reshard", "Exposed", "Module", "Half", "As", "Bytes", "Count", "Each", "All")
    return table(columns, rows, label="Reshards of a step", identity="reshards-table", left=(0, 2, 3, 4))


def _shape(sizes: tuple[int, ...]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, sizes))
