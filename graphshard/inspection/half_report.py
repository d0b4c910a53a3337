"""Makes the :class:`HalfReport` of one scheduled graph: times, events, memory, and causes of exposed time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import fx

from ..cost import CostModel, total_flops
from ..ir import group_name
from ..pipeline import PassContext, parts_behind, prepared_nodes, reduced_parameters, shards_behind
from ..planner import GraphProblem, problem_of_graph
from ..planner.search import Bounds, BucketRun, lower_bounds
from ..report import CollectiveEvent, ComputeEvent, HalfReport, MemoryPoint, ScheduleStep
from .events import StreamEvent, Walk, walk
from .exposure import Explainer, Explanation
from .memory_categories import CategorizedMemory

#: The most points of memory, and the most stretches of compute, that a half keeps.
MAX_POINTS = 400
MAX_STRETCHES = 1500

#: The most nodes to look at for the module of a value.
_NEARBY = 32

_NOTHING = Explanation(cause="", reason="", remedy="")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_ROOT = re.compile(r"^L\['self'\]\.(_export_root\.)?(model\.?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledHalf:
    """A graph whose collectives stand where they will run.

    Attributes:
        name: name of the half.
        gm: the graph.
        ctx: its context.
        prices: the cost model.
        bounds: lower bounds over all schedules, if known; else they are computed from this graph.
        made_by: what placed its collectives: one of :data:`graphshard.inspection.exposure.SCHEDULES`.
        solver: the search that found its plan; "none" without a plan.
        skipped: what passes skipped, in sentences that begin with the name of a node.
        repeats: number of its runs in a step.
        reshards: for collectives of reshards, by the names of group and node, what they do.
    """

    name: str
    gm: fx.GraphModule
    ctx: PassContext
    prices: CostModel
    bounds: Bounds | None = None
    made_by: str = "passes"
    solver: str = "none"
    skipped: Sequence[str] = ()
    repeats: int = 1
    reshards: Mapping[tuple[str, str], str] = field(default_factory=dict)


def half_report(half: ScheduledHalf, memory: CategorizedMemory, outside: Sequence[int]) -> HalfReport:
    """The report of a graph in its own order.

    Args:
        half: the graph.
        memory: its memory.
        outside: bytes by category that are live outside of the graph.

    Raises:
        UnpricedGroupError: a collective runs on a group without a price.
    """
    found = problem_of_graph(
        half.gm,
        half.prices,
        prepared=prepared_nodes(half.gm, half.ctx),
        device_type=half.prices.card.device_type,
        scratch=half.ctx.scratch,
    )
    events = walk(found.problem, found.unplanned)
    bounds = half.bounds or lower_bounds(found.problem)
    bound = min(bounds.seconds, events.seconds)
    totals = list(map(sum, memory.live))
    at_peak = totals.index(max(totals))
    times = list(_node_times(half.gm, found, events))
    points = {
        index: MemoryPoint(seconds=times[index], num_bytes=_beside(memory.live[index], outside))
        for index in _condensed(totals, at_peak)
    }
    return replace(
        _numbers(half, memory, outside, events),
        bound_seconds=bound,
        gap=events.seconds / bound - 1.0 if bound > 0 else 0.0,
        bounds=_bounds_data(bounds),
        compute=tuple(_stretches(half.ctx, found, events)),
        collectives=tuple(_collectives(half, found, events)),
        schedule=tuple(_schedule(events)),
        memory=tuple(points.values()),
        peak=points[at_peak],
    )


def brief_half_report(half: ScheduledHalf, memory: CategorizedMemory, outside: Sequence[int]) -> HalfReport:
    """:func:`half_report` without bounds, events, causes and the curve of memory."""
    found = problem_of_graph(
        half.gm,
        half.prices,
        prepared=prepared_nodes(half.gm, half.ctx),
        device_type=half.prices.card.device_type,
        measures_memory=False,
    )
    return _numbers(half, memory, outside, walk(found.problem, found.unplanned))


def _numbers(
    half: ScheduledHalf, memory: CategorizedMemory, outside: Sequence[int], events: Walk
) -> HalfReport:
    """A report without bounds, events and curves."""
    at_peak = max(range(len(memory.live)), key=lambda index: sum(memory.live[index]))
    peak = MemoryPoint(seconds=0.0, num_bytes=_beside(memory.live[at_peak], outside))
    return HalfReport(
        name=half.name,
        repeats=half.repeats,
        seconds=events.seconds,
        compute_seconds=events.seconds - events.exposed_seconds,
        exposed_seconds=events.exposed_seconds,
        bound_seconds=0.0,
        gap=0.0,
        bounds={},
        solver=half.solver,
        flops=total_flops(half.gm),
        num_nodes=len(half.gm.graph.nodes),
        compute=(),
        collectives=(),
        schedule=(),
        memory=(peak,),
        peak=peak,
        peak_where=node_label(memory.nodes[at_peak], half.ctx),
    )


def _beside(live: Sequence[int], outside: Sequence[int]) -> tuple[int, ...]:
    return tuple(inside + beside for inside, beside in zip(live, outside, strict=True))


def _bounds_data(bounds: Bounds) -> dict[str, float]:
    values = {name: getattr(bounds, name) for name in Bounds.__dataclass_fields__}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def node_label(node: fx.Node, ctx: PassContext) -> str:
    """A node for people: its name, its module, and the line of the model that it comes from, as far as known."""
    module, line = module_label(node, ctx), source_line(node)
    text = f"{node.name} in {module}" if module else node.name
    return f"{text} ({line})" if line else text


def source_line(node: fx.Node) -> str:
    """The file and the number of the innermost line outside of torch in a node's stack; "" if unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [(file, number) for file, number in frames if not file.startswith(_TORCH)]
    return f"{Path(outside[-1][0]).name}:{outside[-1][1]}" if outside else ""


def module_label(node: fx.Node, ctx: PassContext) -> str:
    """The module that a node belongs to: its unit and the next part of the path; "" if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = ""
    for name, _ in stack.values():
        path = _ROOT.sub("", str(name)) or path
    units = {binding.unit for binding in ctx.parameters}
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in units:
            return ".".join(parts[: end + 1])
    return ".".join(parts[:2])


def _module_of_value(node: fx.Node, ctx: PassContext) -> str:
    """The module of a node, or of the nearest one before it whose module is known; "" if there is none nearby."""
    near = [node]
    for each in near:  # grows on the way
        if label := module_label(each, ctx):
            return label
        if len(near) < _NEARBY:
            near.extend(each.all_input_nodes)
    return ""


def _stretches(ctx: PassContext, found: GraphProblem, events: Walk) -> Iterator[ComputeEvent]:
    """The compute stream; neighbours of one module are joined, and more of them if there are too many."""
    labels: list[str] = []
    known: dict[int, str] = {}
    for event in events.stream:
        if event.task < 0:
            labels.append(_names(found, event.members))
            continue
        node = found.tasks[event.task]
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        key = id(stack) if stack else -1
        if key not in known:
            known[key] = module_label(node, ctx)
        labels.append(
            known[key] or (labels[-1] if labels and events.stream[len(labels) - 1].task >= 0 else "")
        )
    parts = 8
    joined = _joined(events.stream, labels)
    while len(joined) > MAX_STRETCHES and parts:
        parts -= 1
        labels = [".".join(label.split(".")[:parts]) for label in labels]
        joined = _joined(events.stream, labels)
    yield from joined


def _joined(stream: Sequence[StreamEvent], labels: Sequence[str]) -> list[ComputeEvent]:
    found: list[ComputeEvent] = []
    for event, label in zip(stream, labels, strict=True):
        last = found[-1] if found else None
        if last and event.kind == "compute" == last.kind and label == last.label:
            found[-1] = ComputeEvent(
                label=label,
                kind=event.kind,
                start=last.start,
                seconds=event.start + event.seconds - last.start,
                num_nodes=last.num_nodes + 1,
            )
        else:
            found.append(
                ComputeEvent(
                    label=label, kind=event.kind, start=event.start, seconds=event.seconds, num_nodes=1
                )
            )
    return found


def _names(found: GraphProblem, members: Sequence[int]) -> str:
    return "+".join(found.starts[index].name for index in members)


def _collectives(half: ScheduledHalf, found: GraphProblem, events: Walk) -> Iterator[CollectiveEvent]:
    served = reduced_parameters(half.gm, half.ctx)
    bindings = {
        node: served.get(node) or shards_behind(node, half.ctx) or parts_behind(node, half.ctx)
        for node in found.starts
    }
    units = {
        node.name: ", ".join(dict.fromkeys(binding.unit for binding in behind))
        for node, behind in bindings.items()
    }
    declined = {sentence.split(" ", 1)[0]: sentence.split(": ", 1)[-1] for sentence in half.skipped}

    def where(position: int) -> str:
        return (
            f"before {node_label(found.tasks[position], half.ctx)}"
            if position < len(found.tasks)
            else "at the end"
        )

    explainer = Explainer(
        found.problem,
        events,
        made_by=half.made_by,
        declined=declined,
        unit_of=units,
        label_of=partial(axis_label, half.ctx),
        where=where,
        values=frozenset(name for _, name in half.reshards),
    )
    for flight in events.flights:
        nodes = [found.starts[index] for index in flight.members]
        first = found.problem.collectives[flight.members[0]]
        why = explainer.explain(flight) if flight.exposed_seconds > 0 else _NOTHING
        keys = [(group_name(node), node.name) for node in nodes]
        moved = ", ".join(dict.fromkeys(half.reshards[key] for key in keys if key in half.reshards))
        yield CollectiveEvent(
            name=_names(found, flight.members),
            unit=", ".join(dict.fromkeys(units[node.name] for node in nodes if units[node.name])),
            parameters=sum(len(bindings[node]) for node in nodes),
            kind=first.kind,
            group=axis_label(half.ctx, group_name(nodes[0])),
            num_ranks=half.prices.topology(first.queue).num_ranks,
            num_bytes=flight.num_bytes,
            seconds=flight.seconds,
            issued=flight.issued,
            began=flight.began,
            finished=flight.finished,
            needed=flight.needed,
            exposed_seconds=flight.exposed_seconds,
            cause=why.cause,
            reason=why.reason,
            remedy=why.remedy,
            reshard=moved,
            module=_module_of_value(nodes[0], half.ctx) if moved else "",
        )


def _schedule(events: Walk) -> Iterator[ScheduleStep]:
    number = {flight.members: index for index, flight in enumerate(events.flights)}
    for step in events.steps:
        yield ScheduleStep(
            collective=number[step.members], is_start=step.is_start, busy_seconds=step.busy_seconds
        )


def axis_label(ctx: PassContext, group: str) -> str:
    """The label of the mesh axis of a process group; without one, the name of the group."""
    axis = ctx.mesh.find(group)
    return axis.label if axis is not None else group


def _node_times(gm: fx.GraphModule, found: GraphProblem, events: Walk) -> Iterator[float]:
    """The time at which each node runs: that of its task, or for other nodes that of the node before."""
    starts = {found.tasks[event.task]: event for event in events.stream if event.task >= 0}
    waits = {flight.members: flight for flight in events.flights}
    by_node: Mapping[fx.Node, BucketRun] = {
        found.starts[index]: flight for members, flight in waits.items() for index in members
    }
    now = 0.0
    for node in gm.graph.nodes:
        if node in starts:
            event = starts[node]
            yield max(now, event.start)
            now = event.start + event.seconds
            continue
        if node in by_node:
            now = max(now, by_node[node].issued)
        yield min(now, events.seconds)


def _condensed(totals: Sequence[int], at_peak: int) -> list[int]:
    """Indices of the points to keep: the first, the last, the peak, and maximum and minimum of each stretch."""
    if len(totals) <= MAX_POINTS:
        return list(range(len(totals)))
    kept = {0, len(totals) - 1, at_peak}
    num_stretches = MAX_POINTS // 2 - 2
    edges = [round(index * len(totals) / num_stretches) for index in range(num_stretches + 1)]
    for start, end in itertools.pairwise(edges):
        stretch = range(start, end)
        kept.update((max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)))
    return sorted(kept)
