"""The differences of two reports as tables, drawn with rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .compare import Change, ReportDiff
from .units import size_text, time_text


def diff_tables(diff: ReportDiff, before: str, after: str) -> RenderableType:
    """One table for each topic with differences; one sentence if there are none.

    Args:
        diff: the differences.
        before, after: names of the reports.
    """
    if diff.is_empty:
        return Group(_line(f"{before} and {after} are equal"))  # outside of a Group the line would be wrapped
    topics: tuple[tuple[str, Sequence[Change], Callable[[Any], str]], ...] = (
        ("Settings", diff.settings, str),
        ("Time", diff.seconds, time_text),
        ("Rates", diff.rates, lambda value: f"{value:.4g}"),
        ("Memory of a rank at its peak", diff.memory, size_text),
        ("Collectives of a step", diff.collectives, str),
        ("Costliest exposures", diff.exposures, time_text),
        ("Passes", diff.passes, str),
    )
    parts: list[RenderableType] = [_line(f"from {before} to {after}")]
    for title, changes, text in topics:
        if changes:
            parts += [Text(f"\n{title}", style="bold"), _table(changes, text)]
    return Group(*parts)


def _line(text: str) -> Text:
    """One line that does not wrap, however long the paths in it are."""
    return Text(text, no_wrap=True, overflow="ignore")


def _table(changes: Sequence[Change], text: Callable[[Any], str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(("", "before", "after", "change")):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for change in changes:
        values = [
            "-" if value is None else value if isinstance(value, str) else text(value)
            for value in (change.before, change.after)
        ]
        table.add_row(change.what, *values, _relative(change.before, change.after))
    return table


def _relative(before: Any, after: Any) -> str:
    if before is None:
        return "came"
    if after is None:
        return "went"
    are_numbers = all(type(value) in (int, float) for value in (before, after))
    return f"{100 * (after / before - 1):+.1f} %" if are_numbers and before else ""
