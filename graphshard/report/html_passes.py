"""The page's section on passes: counts after each, and what each changed in the graph's text."""

from __future__ import annotations

from collections.abc import Iterator

from ..units import size_text
from .data import PassStep, Report
from .html_parts import Cell, escaped, shown_time, table
from .text import pass_diffs

#: The most lines of a diff or of a graph's text on the page; the page says how many are left out.
MAX_LINES = 300
#: The most sentences about what a pass skipped.
MAX_DECLINED = 20

_CLASSES = {"+": "a", "-": "r", "@": "h"}


def passes_section(report: Report) -> str:
    """A table of all passes, then the diff of each pass that changed the text of its graph."""
    if not report.passes:
        return "<p>None ran.</p>"
    columns = ("Graph", "Pass", "Nodes", "Collectives", "Their input", "Took", "Reported")
    counts = table(columns, _rows(report), label="Passes", identity="passes-table", left=(0, 1, 6))
    return "\n".join([counts, *_texts(report)])


def _texts(report: Report) -> Iterator[str]:
    """The graphs before their first pass, and the diff of each pass, in the order of the passes."""
    diffs = {id(step): diff for step, diff in pass_diffs(report)}
    for step in report.passes:
        if id(step) not in diffs:
            lines = step.text.splitlines()
            yield _details(f"{step.graph}: {step.name}", f"{len(lines):,} lines", lines, of_diff=False)
        elif diffs[id(step)] or step.skipped:
            yield _diff(step, diffs[id(step)])


def _rows(report: Report) -> Iterator[list[Cell]]:
    before: dict[str, PassStep] = {}
    for step in report.passes:
        last = before.get(step.graph, step)
        yield [
            (escaped(step.graph), None),
            (f"<code>{escaped(step.name)}</code>", None),
            (_change(step.num_nodes, last.num_nodes), step.num_nodes),
            (_change(step.num_collectives, last.num_collectives), step.num_collectives),
            (size_text(step.collective_bytes) if step.collective_bytes else "-", step.collective_bytes),
            (shown_time(step.seconds) if step.seconds else "-", step.seconds),
            (escaped(", ".join(f"{number} {what}" for what, number in step.counts.items())) or "-", None),
        ]
        before[step.graph] = step


def _change(now: int, before: int) -> str:
    return f"{now:,}" if now == before else f'<span class="muted">({now - before:+,})</span> {now:,}'


def _diff(step: PassStep, diff: str) -> str:
    lines = diff.splitlines()
    added = sum(line.startswith("+") for line in lines)
    removed = sum(line.startswith("-") for line in lines)
    declined = "".join(f"<li>{escaped(sentence)}</li>" for sentence in step.skipped[:MAX_DECLINED])
    left_out = len(step.skipped) - MAX_DECLINED
    if left_out > 0:
        declined += f"<li>and {left_out} more</li>"
    note = f'<p class="muted">Declined:</p><ul class="notes">{declined}</ul>' if declined else ""
    size = f"+{added:,} &minus;{removed:,} lines" if lines else "text unchanged"
    return _details(f"{step.graph}: {step.name}", size, lines, of_diff=True, note=note)


def _details(name: str, size: str, lines: list[str], *, of_diff: bool, note: str = "") -> str:
    shown = "".join(_line(line, of_diff) for line in lines[:MAX_LINES])
    left_out = len(lines) - MAX_LINES
    if left_out > 0:
        note += (
            f'<p class="muted">The first {MAX_LINES} of {len(lines):,} lines; <code>--text FILE</code> writes all '
            "graphs in full.</p>"
        )
    block = f'<pre tabindex="0" aria-label="{escaped(name)}">{shown}</pre>' if lines else ""
    summary = f'<summary><code>{escaped(name)}</code> <span class="muted">{size}</span></summary>'
    return f'<details class="pass">{summary}{note}{block}</details>'


def _line(line: str, of_diff: bool) -> str:
    kind = _CLASSES.get(line[:1], "") if of_diff else ""
    return (
        f'<span class="{kind}">{escaped(line) or " "}</span>'
        if kind
        else f"<span>{escaped(line) or ' '}</span>"
    )
