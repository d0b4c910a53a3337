"""Writes a report as one HTML file that needs no network: charts, tables, diffs of the passes, and sliders.

Text and tables are written here and can be read without scripts. The scripts in ``page/`` draw timeline and memory from
the report's JSON in the file, and rescale the step for other links, devices and budgets. A policy in the file forbids
it to load anything.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from string import Template

from .data import Report
from .html_parts import (
    asked,
    categories_legend,
    collectives_table,
    escaped,
    exposures_list,
    halves_table,
    heading,
    honest_notes,
    lanes_legend,
    memory_table,
    notes_list,
    tiles,
    timeline_note,
    verdict,
)
from .html_passes import passes_section
from .html_placements import placements_section

#: The scripts in ``page/``, in the order in which they are joined.
SCRIPTS = ("format", "simulate", "view", "timeline", "memory", "details", "whatif", "tables", "main")


def write_html(report: Report, path: str | Path) -> None:
    """Writes :func:`html_page` to a file."""
    Path(path).write_text(html_page(report), encoding="utf-8")


def html_page(report: Report) -> str:
    """The report as an HTML document."""
    return Template(_asset("page.html")).substitute(
        title=escaped(f"{heading(report)} - graphshard inspect"),
        style=_asset("page.css"),
        script="\n".join(_asset(f"{name}.js") for name in SCRIPTS),
        data=script_data(report),
        heading=escaped(heading(report)),
        asked=escaped(asked(report)),
        verdict=verdict(report),
        tiles=tiles(report),
        halves=halves_table(report),
        lanes=lanes_legend(report),
        categories=categories_legend(report),
        timeline_note=escaped(timeline_note(report)),
        honest=honest_notes(report),
        exposures=exposures_list(report),
        memory=memory_table(report),
        placements=placements_section(report),
        collectives=collectives_table(report),
        passes=passes_section(report),
        notes=notes_list(report),
    )


def script_data(report: Report) -> str:
    """The report's JSON without graph texts, escaped so that it cannot end a script element."""
    text = json.dumps(report.to_dict(), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("graphshard.report") / "page" / name).read_text(encoding="utf-8").strip()
