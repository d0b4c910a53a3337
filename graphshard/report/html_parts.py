"""The text of the HTML page: headline, tables, lists. It is readable without scripts."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

from ..units import count_text, size_text, time_text
from .data import Exposure, Report

_LANES = {
    "all_gather": ("gather", "all-gather"),
    "reduce_scatter": ("reduce", "reduce-scatter"),
    "all_reduce": ("allreduce", "all-reduce"),
    "all_to_all": ("collective", "all-to-all"),
    "broadcast": ("collective", "broadcast"),
}


def escaped(text: object) -> str:
    """Text escaped for an element, or for an attribute in double quotes."""
    return html.escape(str(text))


def shown_time(seconds: float) -> str:
    """Seconds as text with three digits."""
    return time_text(float(f"{seconds:.3g}")).replace(" us", " µs")


def share(part: float, whole: float) -> str:
    """A part of a whole as text in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def heading(report: Report) -> str:
    """Model, mesh and card."""
    mesh = ", ".join(f"{name}={size}" for name, size in report.mesh.items())
    what = "Graph"
    if report.model is not None:
        what = f"{report.model.name}, {count_text(report.model.num_elements)} parameters"
    where = f"{report.num_ranks} \N{MULTIPLICATION SIGN} {report.hardware}"
    return f"{what}, on {where} ({mesh})" if mesh else f"{what}, on {where}"


def asked(report: Report) -> str:
    """The settings in one line, without defaults."""
    found = []
    for name, value in report.settings.items():
        if value in (None, [], ()):
            continue
        if name == "memory_budget":
            value = size_text(value)
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        found.append(f"{name.replace('_', ' ')} {text}")
    return "; ".join(found)


def verdict(report: Report) -> str:
    """The main result in two sentences."""
    memory = report.memory
    limit = memory.capacity_bytes if memory.budget_bytes is None else memory.budget_bytes
    what = "the card has" if memory.budget_bytes is None else "the budget is"
    fits = '<b class="good">It fits</b>' if memory.fits else '<b class="bad">It does not fit</b>'
    waits = (
        f"{share(report.exposed_seconds, report.step_seconds)} of it waiting for communication"
        if report.exposed_seconds
        else "none of it waiting for communication"
    )
    return (
        f"A step takes {escaped(shown_time(report.step_seconds))}, {waits}. {fits}: a rank needs "
        f"{size_text(memory.peak_bytes)}, {what} {size_text(limit)}."
    )


def tiles(report: Report) -> str:
    """The main numbers."""
    memory, through = report.memory, report.throughput
    limit = memory.capacity_bytes if memory.budget_bytes is None else memory.budget_bytes
    found = [
        _tile("Step", shown_time(report.step_seconds), f"{shown_time(report.compute_seconds)} of compute"),
        _tile(
            "Exposed",
            share(report.exposed_seconds, report.step_seconds),
            f"compute waits {shown_time(report.exposed_seconds)}",
            meter=(report.exposed_seconds, report.step_seconds, "is-exposed"),
        ),
    ]
    if through is not None:
        found.append(
            _tile(
                "FLOP utilisation",
                f"{100 * through.mfu:.1f} % MFU",
                f"HFU {100 * through.hfu:.1f} %, {through.dtype}",
                meter=(through.mfu, 1.0, ""),
            )
        )
        if through.tokens_per_second_per_rank is not None and through.tokens_per_second is not None:
            rate = f"{through.tokens_per_second_per_rank:,.0f}"
            found.append(_tile("Tokens/s a rank", rate, f"{through.tokens_per_second:,.0f} in all"))
    found += [
        _tile(
            "Memory of a rank",
            size_text(memory.peak_bytes),
            f"{share(memory.peak_bytes, limit)} of {size_text(limit)}",
            meter=(memory.peak_bytes, limit, "" if memory.fits else "is-bad"),
        ),
        _tile(
            "Gap to the bound", f"{100 * report.gap:.1f} %", f"none below {shown_time(report.bound_seconds)}"
        ),
    ]
    return "\n".join(found)


def _tile(name: str, value: str, more: str, *, meter: tuple[float, float, str] | None = None) -> str:
    bar = ""
    if meter is not None:
        part, whole, kind = meter
        width = min(100.0, 100 * part / whole) if whole else 0.0
        bar = f'<div class="meter {kind}"><i style="width:{width:.1f}%"></i></div>'
    texts = f"<span>{escaped(name)}</span><b>{escaped(value)}</b><span>{escaped(more)}</span>"
    return f'<div class="tile">{texts}{bar}</div>'


#: A cell: the HTML, and the sort key (None for the text).
Cell = tuple[str, float | None]


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    label: str,
    identity: str,
    left: Collection[int] = (0,),
) -> str:
    """A table that scrolls in its own box and sorts by any column.

    Args:
        columns: heads of the columns, escaped here.
        rows: cells as HTML.
        label: description for screen readers.
        identity: id of the element.
        left: indices of the columns with text.
    """
    heads = "".join(
        f'<th scope="col"{" class=left" if index in left else ""}>{escaped(name)}</th>'
        for index, name in enumerate(columns)
    )
    lines = []
    for row in rows:
        cells = []
        for index, (text, value) in enumerate(row):
            data = "" if value is None else f' data-value="{value!r}"'
            kind = ' class="left"' if index in left else ""
            tag = 'th scope="row"' if index == 0 else "td"
            cells.append(f"<{tag}{kind}{data}>{text}</{tag.split()[0]}>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}">'
        f'<table class="sortable" id="{identity}"><thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def halves_table(report: Report) -> str:
    """Times and peaks of forward, backward and optimizer."""
    rows = [
        [
            (escaped(half.name), None),
            (shown_time(half.exposed_seconds) if half.exposed_seconds else "-", half.exposed_seconds),
            (str(half.repeats), half.repeats),
            (shown_time(half.seconds), half.seconds),
            (shown_time(half.compute_seconds), half.compute_seconds),
            (shown_time(half.bound_seconds), half.bound_seconds),
            (f"{100 * half.gap:.1f} %", half.gap),
            (size_text(half.peak.total_bytes), half.peak.total_bytes),
        ]
        for half in report.halves
    ]
    columns = ("Half", "Exposed", "Runs", "Each", "Compute", "Bound", "Gap", "Peak memory")
    return table(columns, rows, label="Times of the halves", identity="halves")


def lanes_legend(report: Report) -> str:
    """The colours of the timeline."""
    kinds = dict.fromkeys(one.kind for one in report.collectives)
    named = dict.fromkeys(_LANES[kind] for kind in kinds)
    entries = [("compute", "compute, by unit"), ("copy", "copies and casts"), *named]
    entries.append(("exposed", "compute waits: exposed"))
    return "".join(f"<span>{_patch(colour)}{escaped(name)}</span>" for colour, name in entries)


def categories_legend(report: Report) -> str:
    """The colours of the memory chart, in the order of its layers."""
    seen = {
        name
        for half in report.halves
        for point in half.memory
        for name, size in zip(report.memory.categories, point.num_bytes, strict=True)
        if size
    }
    return "".join(
        f"<span>{_patch(f'memory-{name}')}{name}</span>" for name in report.memory.categories if name in seen
    )


def _patch(colour: str) -> str:
    return f'<i style="background:var(--{colour})"></i>'


def timeline_note(report: Report) -> str:
    """What the charts leave out."""
    repeats = max(half.repeats for half in report.halves)
    joined = (
        "Stretches of one module are joined; of each stretch the memory curve keeps the most and the least."
    )
    if repeats == 1:
        return joined
    return f"One of {repeats} micro-batches is drawn, then the optimizer. {joined}"


def memory_table(report: Report) -> str:
    """Bytes by category: at the peak, and persistent."""
    memory = report.memory
    rows = [
        [
            (f"{_patch(f'memory-{name}')}{name}", None),
            (size_text(size), size),
            (share(size, memory.peak_bytes), size),
            (size_text(memory.persistent[name]) if memory.persistent[name] else "-", memory.persistent[name]),
        ]
        for name, size in memory.categories.items()
        if size
    ]
    where = (
        f"<p>{size_text(memory.peak_bytes)} in the {escaped(memory.peak_half)}, at <code>{escaped(memory.peak_where)}"
        f"</code>; the device has {size_text(memory.capacity_bytes)}"
    )
    where += "" if memory.budget_bytes is None else f", the budget is {size_text(memory.budget_bytes)}"
    columns = ("Category", "Bytes", "Share", "Throughout the step")
    return f"{where}.</p>" + table(columns, rows, label="Memory at the peak", identity="memory-table")


def collectives_table(report: Report) -> str:
    """One row for equal collectives, with their bandwidth."""
    if not report.collectives:
        return "<p>There are none.</p>"
    rows = [
        [
            (escaped(one.kind.replace("_", "-")), None),
            (
                f'<span class="cost">{shown_time(one.exposed_seconds)}</span>' if one.exposed_seconds else "-",
                one.exposed_seconds,
            ),
            (escaped(one.half), None),
            (escaped(one.group), None),
            (size_text(one.num_bytes), one.num_bytes),
            (str(one.count), one.count),
            (shown_time(one.seconds), one.seconds),
            _rate(one.num_bytes, one.seconds),
            (shown_time(one.count * one.seconds), one.count * one.seconds),
        ]
        for one in report.collectives
    ]  # fmt: skip
    columns = ("Kind", "Exposed", "Half", "Group", "Bytes", "Count", "Each", "Rate", "All")
    return table(columns, rows, label="Collectives of a step", identity="collectives-table", left=(0, 2, 3))


def _rate(num_bytes: int, seconds: float) -> Cell:
    if not seconds:
        return "-", 0.0
    return f"{num_bytes / seconds / 1e9:.3g} GB/s", num_bytes / seconds


def exposures_list(report: Report) -> str:
    """The largest exposures, with reason and remedy."""
    if not report.exposures:
        return "<p>Compute never waits for a collective.</p>"
    items = "\n".join(_exposure(one, report) for one in report.exposures)
    return f'<ol class="exposures">\n{items}\n</ol>'


def _exposure(one: Exposure, report: Report) -> str:
    which = one.collective
    what = f"{which.kind.replace('_', '-')} {which.title}"
    where = f"{escaped(one.half)}, {size_text(which.num_bytes)} over {escaped(which.group)}"
    return (
        f'<li><div><b>{escaped(what)}</b><p><span class="cost">{shown_time(one.step_seconds)}</span> a step '
        f"({share(one.step_seconds, report.step_seconds)})<br>"
        f'<span class="muted">{where}</span></p></div>'
        f"<div><p>{_sentence(which.reason)}</p><p><b>What would help:</b> {escaped(which.remedy)}</p></div></li>"
    )


def _sentence(text: str) -> str:
    return escaped(text[:1].upper() + text[1:]) + "."


def honest_notes(report: Report) -> str:
    """What the sliders change and what they do not."""
    plan = report.settings.get("plan")
    by_cost = plan == "auto" or any(half.solver != "none" for half in report.halves)
    links = (
        "This step was planned by cost for the links as they are; with others a new plan may be faster; the "
        "figures are those of this plan on such links. Inspect again with another card for a new one."
        if by_cost
        else "The order does not depend on prices here, so these are the times that inspecting with such links gives."
    )
    notes = [
        "<b>Nothing is planned again in the browser.</b> Every collective starts and is waited for in the same order, "
        "with the same compute between; only how long each takes changes, and with that who waits for whom.",
        f"<b>Bandwidth and latency</b> reprice each collective as fixed start + latency + bytes / bandwidth, by the "
        f"quickest algorithm and protocol of the cost model, all links alike. {links}",
        "<b>Measured times</b>, where a table or the card has them, count the time of the smallest measured size as "
        "latency and the rest as transfer.",
    ]
    if len(report.worlds) > 1:
        axis = next(iter(report.mesh))
        notes.append(
            f"<b>Devices</b> changes the size of the outermost axis, <code>{escaped(axis)}</code>, at the same batch "
            "for each rank. Collectives are priced by the cost model for that many ranks and nodes; parameters, "
            "optimizer state, gradients and the optimizer's time go with 1 / shard. Padding, copies into buckets "
            "and gradient accumulation stay as they are: inspect again for exact figures."
        )
    notes.append(
        "<b>Memory budget</b> is compared with this step's peak. It does not change the step: "
        "<code>--plan auto --memory-budget</code> plans within one."
    )
    notes.append("The lower bound, reasons and remedies are those of the step as inspected.")
    return "<ul>" + "".join(f"<li>{note}</li>" for note in notes) + "</ul>"


def notes_list(report: Report) -> str:
    """The notes of the report, and the duration of the inspection."""
    took = sum(report.stage_seconds.values())
    notes = [*report.notes, f"Report schema {report.to_dict()['schema_version']}."]
    if took:
        notes.append(f"The inspection took {took:.1f} s.")
    return '<ul class="notes">' + "".join(f"<li>{escaped(note)}</li>" for note in notes) + "</ul>"
