"""Compares two reports: settings, times, memory, collectives, exposures, passes.

It takes reports or their JSON, so a report of last week can be compared with today's. Numbers are compared exactly,
since the same inputs give the same report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ReportFileError
from .data import SCHEMA_VERSION, Report

#: Numbers of the whole step, by their names in a diff.
_TIMES = {
    "step": "step_seconds",
    "compute": "compute_seconds",
    "exposed communication": "exposed_seconds",
    "lower bound": "bound_seconds",
}
_THROUGHPUT = {
    "MFU": "mfu",
    "tokens/s a rank": "tokens_per_second_per_rank",
    "tokens/s": "tokens_per_second",
    "FLOP a rank": "model_flops",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        what: the name of the value.
        before, after: the values; None where a report has none.
    """

    what: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDiff:
    """All differences, by topic; a topic without differences is empty.

    Attributes:
        settings: model, mesh, hardware and all other settings.
        seconds: seconds of the step and of each half.
        rates: utilisation, tokens per second, operations.
        memory: bytes at the peak, in all and by category.
        collectives: number of collectives in a step, by half, kind, group and bytes.
        exposures: seconds of listed exposures that are new, gone or changed.
        passes: the counts of each pass, and the nodes and collectives after it.
    """

    settings: tuple[Change, ...]
    seconds: tuple[Change, ...]
    rates: tuple[Change, ...]
    memory: tuple[Change, ...]
    collectives: tuple[Change, ...]
    exposures: tuple[Change, ...]
    passes: tuple[Change, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the reports are equal."""
        return not any(getattr(self, topic) for topic in self.__dataclass_fields__)

    def to_dict(self) -> dict[str, Any]:
        """The differences as JSON values."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data


def diff_reports(
    before: Report | Mapping[str, Any] | str | Path, after: Report | Mapping[str, Any] | str | Path
) -> ReportDiff:
    """The differences from one report to another.

    Args:
        before, after: reports, their :meth:`Report.to_dict`, or JSON files of that.

    Raises:
        ReportFileError: a file is missing, is not JSON, or holds no report of this schema version.
    """
    old, new = _data(before), _data(after)

    def changes(read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> tuple[Change, ...]:
        was, now = read(old), read(new)
        return tuple(
            Change(what=name, before=was.get(name), after=now.get(name))
            for name in dict.fromkeys((*was, *now))
            if was.get(name) != now.get(name)
        )

    return ReportDiff(
        settings=changes(_settings),
        seconds=changes(_seconds),
        rates=changes(_rates),
        memory=changes(_memory),
        collectives=changes(_collectives),
        exposures=changes(_exposures),
        passes=changes(_passes),
    )


def read_report(path: str | Path) -> dict[str, Any]:
    """The data of a report that :meth:`Report.to_json` wrote.

    Raises:
        ReportFileError: the file is missing, is not JSON, or holds no report of this schema version.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ReportFileError(f"report {str(path)!r} cannot be read: {why}") from error
    except json.JSONDecodeError as error:
        raise ReportFileError(f"report {str(path)!r} is no JSON: {error}") from error
    return _checked(data, f"report {str(path)!r}")


def _data(report: Report | Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(report, Report):
        return _checked(report.to_dict(), "the report")
    return read_report(report) if isinstance(report, (str, Path)) else _checked(report, "the report")


def _checked(data: Any, what: str) -> dict[str, Any]:
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if version is None:
        raise ReportFileError(f"{what} has no schema_version: write one with graphshard inspect --json FILE")
    if version != SCHEMA_VERSION:
        raise ReportFileError(
            f"{what} has schema version {version}, and this graphshard reads {SCHEMA_VERSION}: inspect the model again"
        )
    missing = [name for name in ("halves", "memory", "collectives", "passes", "settings") if name not in data]
    if missing:
        raise ReportFileError(f"{what} is no report of graphshard inspect: it has no {', '.join(missing)}")
    return dict(data)


def _settings(data: Mapping[str, Any]) -> Mapping[str, Any]:
    model = data["model"] or {"name": None, "num_elements": None}
    mesh = {f"mesh axis {name}": size for name, size in data["mesh"].items()}
    card = {f"card {name}": value for name, value in data["card"].items() if name != "name"}
    asked = {name: value for name, value in data["settings"].items()}
    return {
        "model": model["name"], "parameters": model["num_elements"], **mesh, "hardware": data["hardware"],
        **asked, **card,
    }  # fmt: skip


def _seconds(data: Mapping[str, Any]) -> Mapping[str, Any]:
    halves = {
        f"{half['name']}{what}": half[name]
        for half in data["halves"]
        for what, name in (("", "seconds"), (" exposed", "exposed_seconds"))
    }
    return {what: data[name] for what, name in _TIMES.items()} | halves


def _rates(data: Mapping[str, Any]) -> Mapping[str, Any]:
    found = data["throughput"] or {}
    return {what: found.get(name) for what, name in _THROUGHPUT.items()}


def _memory(data: Mapping[str, Any]) -> Mapping[str, Any]:
    memory = data["memory"]
    return {"peak": memory["peak_bytes"], **memory["categories"]}


def _collectives(data: Mapping[str, Any]) -> Mapping[str, Any]:
    counts: dict[str, int] = {}
    for one in data["collectives"]:
        name = f"{one['half']} {one['kind']} over {one['group']}, {one['num_bytes']} bytes"
        counts[name] = counts.get(name, 0) + one["count"]
    return counts


def _exposures(data: Mapping[str, Any]) -> Mapping[str, Any]:
    seconds: dict[str, float] = {}
    for one in data["exposures"]:
        which = one["collective"]
        name = f"{one['half']} {which['kind']} of {which['unit'] or which['name']} over {which['group']}"
        seconds[name] = seconds.get(name, 0.0) + one["step_seconds"]
    return seconds


def _passes(data: Mapping[str, Any]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for step in data["passes"]:
        sizes = {"nodes": step["num_nodes"], "collectives left": step["num_collectives"]}
        for what, number in (sizes | step["counts"]).items():
            found[f"{step['graph']} {step['name']}: {what}"] = number
        if step["skipped"]:
            found[f"{step['graph']} {step['name']}: declined"] = len(step["skipped"])
    return found
