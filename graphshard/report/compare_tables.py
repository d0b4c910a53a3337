"""The differences of two reports as tables, drawn with rich."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..units import size_text, time_text
from .compare import Change, ReportDiff


def diff_tables(diff: ReportDiff, before: str, after: str) -> RenderableType:
    """One table for each topic with differences; one sentence if there are none.

    Args:
        diff: the differences.
        before, after: names of the reports.
    """
    if diff.is_empty:
        return Group(_line(f"{before} and {after} are equal"))  # outside of a Group the line would be wrapped
    topics: tuple[tuple[str, Sequence[Change], Callable[[Any], str]], ...] = (
        ("Settings", diff.settings, _setting),
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
    for row in folded(list(_rows(changes, text))):
        table.add_row(*map(Text, row))  # names may look like markup
    return table


def _rows(changes: Sequence[Change], text: Callable[[Any], str]) -> Iterator[tuple[str, ...]]:
    for change in changes:
        as_text = _unit_of_setting(change.what) if text is _setting else text
        values = [
            "-" if value is None else value if isinstance(value, str) else as_text(value)
            for value in (change.before, change.after)
        ]
        what = re.sub(r"(\d+) bytes$", lambda found: size_text(int(found[1])), change.what)
        yield what, *values, _relative(change.before, change.after)


def _setting(value: Any) -> str:
    return str(value)


def _unit_of_setting(name: str) -> Callable[[Any], str]:
    """How the value of a setting is shown, by its name."""
    if name == "memory_budget" or name.endswith("bytes"):
        return size_text
    return time_text if name.endswith("seconds") else str


def folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows whose names differ in one number and that are equal else are one row: "of layers.0..31 (32 rows)".

    Args:
        rows: the name of each, then texts.
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row[0]), *row[1:]), []).append(row)
    found = []
    for group in groups.values():
        numbers = list(zip(*(_NUMBER.findall(row[0]) for row in group), strict=True))
        varying = [place for place, column in enumerate(numbers) if len(set(column)) > 1]
        if len(group) < 3 or len(varying) != 1:
            found += group
            continue
        (place,) = varying
        parts = _NUMBER.split(group[0][0])
        shown = [column[0] for column in numbers]
        shown[place] = _span(sorted(map(int, numbers[place])))
        name = "".join(part + number for part, number in zip(parts, [*shown, ""], strict=True))
        found.append((f"{name} ({len(group)} rows)", *group[0][1:]))
    return found


_NUMBER = re.compile(r"\d+")


def _span(numbers: Sequence[int]) -> str:
    """Numbers in short: "0..31" without gaps, else all of them."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers))


def _relative(before: Any, after: Any) -> str:
    if before is None:
        return "came"
    if after is None:
        return "went"
    are_numbers = all(type(value) in (int, float) for value in (before, after))
    return f"{100 * (after / before - 1):+.1f} %" if are_numbers and before else ""
