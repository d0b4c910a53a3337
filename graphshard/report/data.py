"""What a report holds: frozen data, and JSON of it.

Every rendering (summary, text, trace, and any page) reads these and nothing else. ``SCHEMA_VERSION``
grows when an entry changes its meaning or goes away; ``schema.json`` beside this file is the schema.
Seconds are floats, sizes whole bytes of one rank; times of a half count from its own beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

#: What memory is for, in the order of every breakdown.
CATEGORIES = (
    "parameters",  # shards of parameters
    "optimizer",  # state of the optimizer
    "gradients",  # reduced gradients, shards like the parameters
    "activations",  # what the forward keeps for the backward
    "gathered",  # full parameters
    "unreduced",  # full gradients that wait for their reduction
    "buckets",  # what collectives pack, cast, receive and copy
    "inputs",  # the model's inputs and buffers
    "temporaries",  # everything else that compute makes
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSummary:
    """One unit: its module's path, and its parameters in full."""

    name: str
    num_parameters: int
    num_elements: int
    full_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """What is trained.

    Attributes:
        name: of the model's class.
        num_elements: elements of all parameters, tied ones once.
        num_trained: elements of those with gradients.
        units: in the order of first appearance.
    """

    name: str
    num_elements: int
    num_trained: int
    units: tuple[UnitSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeEvent:
    """One stretch of the compute stream.

    Attributes:
        label: module that computes, or the collective that is packed, unpacked or waited for.
        kind: "compute", "copy" (into and out of buckets, casts) or "wait" (exposed communication).
        start, seconds: when, and how long.
        num_nodes: how many nodes were joined into it.
    """

    label: str
    kind: str
    start: float
    seconds: float
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEvent:
    """One collective of a half.

    Attributes:
        name: its node.
        unit: units it serves, joined by commas; "" where no parameter is known.
        parameters: how many parameters it serves.
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        group: label of the mesh axis, or name of the process group.
        num_ranks: of the group.
        num_bytes: the larger of its input and its output.
        seconds: how long it takes alone on its links.
        issued, began, finished: when it entered the queue of its group, moved, and ended.
        needed: when compute asks for its result.
        exposed_seconds: how long compute is expected to wait for it.
        cause: one of :data:`graphshard.inspection.exposure.CAUSES`; "" if nothing is exposed.
        reason: why it could not end sooner, in words.
        remedy: what would change that.
    """

    name: str
    unit: str
    parameters: int
    kind: str
    group: str
    num_ranks: int
    num_bytes: int
    seconds: float
    issued: float
    began: float
    finished: float
    needed: float
    exposed_seconds: float
    cause: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """Where a half starts a collective, or waits for one.

    Attributes:
        collective: its index among the half's collectives.
        is_start: a start, or a wait.
        busy_seconds: how long the compute stream has computed and copied until then, its waits left out.
    """

    collective: int
    is_start: bool
    busy_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePrice:
    """What a collective's time is made of, so that it can be priced for other links.

    It takes ``fixed_seconds`` and the quickest way. A way is a few legs that run side by side, of which
    the slowest counts; a leg is (seconds of latency, seconds of transfer).

    Attributes:
        kind, group, num_bytes: as in :class:`CollectiveEvent`.
        fixed_seconds: what no link changes.
        overlapped_seconds: what of the whole passes while the collective in front of it in its group still moves.
        overlapped_latency_seconds: what of that is latency; the rest is transfer.
        spread_seconds: by how much it may end sooner or later; see :func:`graphshard.cost.prices.behind_wait`.
        ways: algorithms and protocols.
    """

    kind: str
    group: str
    num_bytes: int
    fixed_seconds: float
    overlapped_seconds: float
    overlapped_latency_seconds: float
    spread_seconds: float
    ways: tuple[tuple[tuple[float, float], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Prices of the report's collectives, in their sizes, on a mesh of another size.

    Attributes:
        mesh: axis sizes, outermost first.
        num_ranks: of the mesh.
        prices: of each kind, group and size that occurs.
    """

    mesh: Mapping[str, int]
    num_ranks: int
    prices: tuple[CollectivePrice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """What is live at one moment: bytes by category, in the order of :data:`CATEGORIES`."""

    seconds: float
    num_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Of all categories."""
        return sum(self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStep:
    """A graph after one pass.

    Attributes:
        graph: "joint", "forward" or "backward".
        name: of the pass; "captured" and "partitioned" before any.
        seconds: how long the pass and its checks took.
        num_nodes, num_collectives, collective_bytes: of the graph, bytes being those of the inputs.
        counts, skipped: what the pass reports.
        text: the graph (:func:`graphshard.ir.graph_text.graph_text`); "" in JSON unless asked for.
    """

    graph: str
    name: str
    seconds: float
    num_nodes: int
    num_collectives: int
    collective_bytes: int
    counts: Mapping[str, int]
    skipped: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfReport:
    """The forward, the backward, or the optimizer's step.

    Attributes:
        name: "forward", "backward", "optimizer"; "graph" for a graph of one's own.
        repeats: how often it runs in a step.
        seconds: of one run; ``compute_seconds`` and ``exposed_seconds`` add up to it.
        bound_seconds: what no schedule of its collectives can beat.
        gap: ``seconds / bound_seconds - 1``.
        bounds: each lower bound by name.
        solver: what found the plan (``Plan.solver``); "none" for the schedule of the passes.
        flops: operations executed, recomputation included, causal attention in full.
        num_nodes: of the graph.
        compute: the compute stream in order.
        collectives: in the order of their starts.
        schedule: their starts and waits in order, and the compute between.
        memory: live bytes over its run, condensed; the peak is always among the points.
        peak: the point of the peak.
        peak_where: node at the peak.
    """

    name: str
    repeats: int
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    bound_seconds: float
    gap: float
    bounds: Mapping[str, float]
    solver: str
    flops: int
    num_nodes: int
    compute: tuple[ComputeEvent, ...]
    collectives: tuple[CollectiveEvent, ...]
    schedule: tuple[ScheduleStep, ...]
    memory: tuple[MemoryPoint, ...]
    peak: MemoryPoint
    peak_where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory of one rank at the peak of the step.

    Attributes:
        peak_bytes: sum of ``categories``.
        categories: bytes by category at the peak.
        peak_half, peak_where: where the peak is.
        persistent: bytes by category that live through the whole step.
        capacity_bytes: of the device.
        budget_bytes: what was asked for; None for the capacity.
        fits: whether the peak is within the budget, or the capacity.
    """

    peak_bytes: int
    categories: Mapping[str, int]
    peak_half: str
    peak_where: str
    persistent: Mapping[str, int]
    capacity_bytes: int
    budget_bytes: int | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Equal collectives of one half.

    Attributes:
        half, kind, group, num_bytes: what they have in common.
        count: how many in a step, all micro-batches together.
        seconds: of one.
        exposed_seconds: of all, in a step.
    """

    half: str
    kind: str
    group: str
    num_bytes: int
    count: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """A collective that compute waits for; ``step_seconds`` counts all micro-batches."""

    half: str
    collective: CollectiveEvent
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """How well the hardware is used.

    Attributes:
        model_flops: operations of one rank in a step without recomputation, causal attention in full.
        executed_flops: with recomputation.
        peak_flops: FLOP/s of the card in ``dtype``, in which most operations are.
        mfu, hfu: model and executed FLOPs over the peak in the step's time.
        tokens: of one rank and micro-batch, by the first input of whole numbers; None without one.
        tokens_per_second_per_rank, tokens_per_second: of a rank, and of all ranks of the mesh.
    """

    model_flops: int
    executed_flops: int
    peak_flops: float
    dtype: str
    mfu: float
    hfu: float
    tokens: int | None
    tokens_per_second_per_rank: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one training step costs.

    Attributes:
        model: None for a graph of one's own.
        mesh: axis sizes, outermost first.
        num_ranks: of the mesh.
        hardware: name of the card; ``card`` is all of it.
        settings: what was asked for, as text or numbers.
        halves: in the order in which they run.
        step_seconds: of all repeats of all halves; so are the next three.
        throughput: None for a graph of one's own.
        exposures: the costliest, at most ten.
        passes: graphs after each pass.
        worlds: what the collectives would cost on this mesh and on others.
        stage_seconds: how long each stage of the inspection took.
        notes: what is modelled in which way, and what was left as it is.
    """

    model: ModelSummary | None
    mesh: Mapping[str, int]
    num_ranks: int
    hardware: str
    card: Mapping[str, Any]
    settings: Mapping[str, Any]
    halves: tuple[HalfReport, ...]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bound_seconds: float
    gap: float
    throughput: Throughput | None
    memory: MemoryReport
    collectives: tuple[CollectiveCount, ...]
    exposures: tuple[Exposure, ...]
    passes: tuple[PassStep, ...]
    worlds: tuple[World, ...]
    stage_seconds: Mapping[str, float]
    notes: tuple[str, ...]

    def half(self, name: str) -> HalfReport:
        """The half of this name.

        Raises:
            KeyError: there is none.
        """
        found = {half.name: half for half in self.halves}
        return found[name]

    def to_dict(self, *, texts: bool = False) -> dict[str, Any]:
        """As JSON can hold it; see :func:`report_schema`.

        Args:
            texts: keep the graph text after each pass, which is most of the size.
        """
        data = {"schema_version": SCHEMA_VERSION, "categories": CATEGORIES, **asdict(self)}
        for step in () if texts else data["passes"]:
            step["text"] = ""
        return _json_value(data)

    def to_json(self, path: str | Path, *, texts: bool = False) -> None:
        """Writes :meth:`to_dict` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(texts=texts), allow_nan=False) + "\n")


def _json_value(value: Any) -> Any:
    """The same with lists for tuples."""
    if isinstance(value, (tuple, list)):
        return [_json_value(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _json_value(part) for name, part in value.items()}
    return value


def report_schema() -> dict[str, Any]:
    """The JSON schema of :meth:`Report.to_dict`."""
    return json.loads((resources.files("graphshard.report") / "schema.json").read_text())
