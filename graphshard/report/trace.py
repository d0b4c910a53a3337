"""Writes a report as a Chrome trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

One process has a lane of compute, a lane for the collectives of each group, and memory as counters. The halves follow
each other as in the last micro-batch of a step. Times are microseconds (Trace Event Format, "JSON Array Format" with
metadata).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .data import CATEGORIES, HalfReport, Report

_COMPUTE_LANE = 1


def trace_events(report: Report) -> dict[str, Any]:
    """The trace as JSON values."""
    lanes = {"compute": _COMPUTE_LANE}
    for half in report.halves:
        for one in half.collectives:
            lanes.setdefault(f"collectives over {one.group}", len(lanes) + 1)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": _title(report)}},
        *(
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for name, tid in lanes.items()
        ),
    ]
    begin = 0.0
    for half in report.halves:
        events.append(
            _slice(half.name, "half", begin, half.seconds, _COMPUTE_LANE, {"repeats": half.repeats})
        )
        events.extend(_of_half(half, begin, lanes))
        begin += half.seconds
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"hardware": report.hardware}}


def write_trace(report: Report, path: str | Path) -> None:
    """Writes :func:`trace_events` to a file."""
    Path(path).write_text(json.dumps(trace_events(report), allow_nan=False) + "\n")


def _title(report: Report) -> str:
    name = report.model.name if report.model else "graph"
    return f"{name} on {report.num_ranks} x {report.hardware}"


def _of_half(half: HalfReport, begin: float, lanes: dict[str, int]) -> list[dict[str, Any]]:
    events = [
        _slice(
            one.label or "(model)",
            one.kind,
            begin + one.start,
            min(one.seconds, half.seconds - one.start),
            _COMPUTE_LANE,
            {"nodes": one.num_nodes},
        )
        for one in half.compute
    ]
    ended: dict[int, float] = {}
    for one in half.collectives:
        args = {
            "unit": one.unit,
            "reshard": one.reshard,
            "module": one.module,
            "bytes": one.num_bytes,
            "issued_ms": 1e3 * one.issued,
            "needed_ms": 1e3 * one.needed,
            "exposed_ms": 1e3 * one.exposed_seconds,
            "reason": one.reason,
            "remedy": one.remedy,
        }
        lane = lanes[f"collectives over {one.group}"]
        # The part that overlaps with the previous collective is left out: slices of a lane must not overlap.
        start = max(one.began, ended.get(lane, 0.0))
        ended[lane] = one.finished
        events.append(
            _slice(f"{one.kind} {one.unit or one.module}".strip(), "collective", begin + start,
                   one.finished - start, lane, args)
        )  # fmt: skip
    for point in half.memory:
        live = dict(zip(CATEGORIES, point.num_bytes, strict=True))
        events.append({
            "ph": "C", "pid": 1, "name": "memory (bytes)", "ts": 1e6 * (begin + point.seconds), "args": live,
        })  # fmt: skip
    return events


def _slice(
    name: str, category: str, start: float, seconds: float, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": 1, "tid": tid, "name": name, "cat": category, "ts": 1e6 * start,
        "dur": 1e6 * seconds, "args": args,
    }  # fmt: skip
