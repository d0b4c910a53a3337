"""Reports as plain text that ``diff`` can compare: the graph after each pass, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from .data import PassStep, Report
from .fold_blocks import folded_lines
from .line_diff import unified_lines


def report_text(report: Report, *, folds: bool = False) -> str:
    """The graph after each pass, then the collectives with their predicted times.

    Equal inputs give equal texts: there are no clock times, paths or random names.

    Args:
        report: the report.
        folds: write the first of equal blocks of a graph, and how many follow (:func:`folded_lines`), and no text
            that a pass left as it was.
    """
    return "\n".join([*_passes(report, folds), *_placements(report), *_collectives(report)]) + "\n"


def pass_diffs(report: Report) -> list[tuple[PassStep, str]]:
    """Each pass with the unified diff of the graph text before and after it; "" if it changed nothing."""
    found = []
    before: dict[str, PassStep] = {}
    for step in report.passes:
        last = before.get(step.graph)
        if last is not None:
            lines = unified_lines(last.text.splitlines(), step.text.splitlines())
            found.append((step, "\n".join(lines)))
        before[step.graph] = step
    return found


def _passes(report: Report, folds: bool) -> Iterator[str]:
    last: dict[str, str] = {}
    for step in report.passes:
        counts = "".join(f", {number} {what}" for what, number in step.counts.items())
        yield f"# {step.graph}: {step.name} ({step.num_nodes} nodes, {step.num_collectives} collectives{counts})"
        yield from (f"# declined: {sentence}" for sentence in step.skipped)
        if folds and step.text == last.get(step.graph):
            yield "# text unchanged"
        else:
            yield "\n".join(folded_lines(step.text.splitlines())) if folds else step.text
        last[step.graph] = step.text


def _placements(report: Report) -> Iterator[str]:
    for candidate in report.candidates:
        numbers = ""
        if candidate.step_seconds is not None and candidate.exposed_seconds is not None:
            numbers = (
                f" step {1e3 * candidate.step_seconds:.3f} ms, {1e3 * candidate.exposed_seconds:.3f} ms exposed, peak "
                f"{candidate.peak_bytes} bytes:"
            )
        yield f"# candidate: {candidate.name}:{numbers} {candidate.verdict}"
    for one in report.placements:
        shape, piece = ("x".join(map(str, sizes)) for sizes in (one.shape, one.piece))
        yield f"# placed: {one.count} {one.name} [{shape}] {one.placement}, a rank has [{piece}]"
    for each in report.reshards:
        yield (
            f"# reshard: {each.half} {each.reshard} in {each.module} over {each.group} as {each.kind}, "
            f"{each.num_bytes} bytes: {each.count} of {1e3 * each.seconds:.3f} ms, "
            f"{1e3 * each.exposed_seconds:.3f} ms exposed"
        )


def _collectives(report: Report) -> Iterator[str]:
    for half in report.halves:
        yield (
            f"# {half.name}: {1e3 * half.seconds:.3f} ms, {1e3 * half.exposed_seconds:.3f} ms exposed, "
            f"at least {1e3 * half.bound_seconds:.3f} ms, peak {half.peak.total_bytes} bytes"
        )
        for one in half.collectives:
            exposed = f", exposed {1e3 * one.exposed_seconds:.3f} ms: {one.reason}" if one.reason else ""
            yield (
                f"{one.kind} {one.title} over {one.group}={one.num_ranks}, {one.num_bytes} bytes: "
                f"issued {1e3 * one.issued:.3f}, began {1e3 * one.began:.3f}, finished {1e3 * one.finished:.3f}, "
                f"needed {1e3 * one.needed:.3f} ms{exposed}"
            )
