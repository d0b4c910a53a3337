"""A report as frozen data, and its JSON.

Every rendering (summary, text, trace, page) reads this data and nothing else. ``schema.json`` beside this file is the
schema; ``SCHEMA_VERSION`` grows when an entry changes its meaning or is removed. Seconds are floats. Sizes are whole
bytes of one rank. Times of a half count from its beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .placements import PlacedParameters, PlacementCandidate, ReshardCount

SCHEMA_VERSION = 1

#: Categories of memory, in the order of every breakdown.
CATEGORIES = (
    "parameters",  # shards of parameters
    "optimizer",  # state of the optimizer
    "gradients",  # reduced gradients, shards like the parameters
    "activations",  # values that the forward saves for the backward
    "gathered",  # full parameters
    "unreduced",  # full gradients that wait for their reduction
    "buckets",  # buffers that collectives pack, cast, receive and copy
    "inputs",  # the model's inputs and buffers
    "temporaries",  # all other values
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSummary:
    """One unit: the path of its module, and the size of its full parameters."""

    name: str
    num_parameters: int
    num_elements: int
    full_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The model.

    Attributes:
        name: name of its class.
        num_elements: elements of all parameters; tied parameters count once.
        num_trained: elements of the parameters with gradients.
        units: its units, in the order of first appearance.
    """

    name: str
    num_elements: int
    num_trained: int
    units: tuple[UnitSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeEvent:
    """One stretch of the compute stream.

    Attributes:
        label: the module that computes, or the collective that is packed, unpacked or waited for.
        kind: "compute", "copy" (into and out of buckets, casts) or "wait" (exposed communication).
        start, seconds: its start and its duration.
        num_nodes: number of nodes joined into it.
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
        unit: the units whose parameters it moves, joined by commas; "" if no parameter is known.
        parameters: number of these parameters.
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        group: label of the mesh axis, or name of the process group.
        num_ranks: ranks of the group.
        num_bytes: bytes of the larger of input and output.
        seconds: its time alone on its links.
        issued, began, finished: times at which it enters the queue of its group, starts to move, and ends.
        needed: time at which compute needs its result.
        exposed_seconds: the expected time that compute waits for it.
        cause: one of :data:`graphshard.inspection.exposure.CAUSES`; "" if nothing is exposed.
        reason: why it could not end sooner.
        remedy: how to change that.
        reshard: what it does for a value between placements: "Partial(sum) -> Replicate"; "" for parameters.
        module: the module of that value; "" if it is not known.
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
    reshard: str = ""
    module: str = ""

    @property
    def title(self) -> str:
        """What it moves, for people: units, or a value of a module; else its name."""
        of_value = f"{self.reshard} in {self.module}" if self.module else self.reshard
        return self.unit or of_value or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """A start of a collective, or a wait for one.

    Attributes:
        collective: its index among the collectives of the half.
        is_start: True for a start, False for a wait.
        busy_seconds: time that the compute stream has computed and copied until then, without waits.
    """

    collective: int
    is_start: bool
    busy_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePrice:
    """The parts of a collective's time, from which its price on other links follows.

    The time is ``fixed_seconds`` plus the quickest way. A way is legs that run at the same time; its slowest leg
    counts. A leg is (seconds of latency, seconds of transfer).

    Attributes:
        kind, group, num_bytes: as in :class:`CollectiveEvent`.
        fixed_seconds: the part that does not depend on links.
        overlapped_seconds: the part that passes while the previous collective of the group still moves.
        overlapped_latency_seconds: the part of ``overlapped_seconds`` that is latency; the rest is transfer.
        spread_seconds: the time by which it may end sooner or later; see :func:`graphshard.cost.prices.behind_wait`.
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
    """Prices of the report's collectives on a mesh of another size; their bytes stay.

    Attributes:
        mesh: axis sizes, outermost first.
        num_ranks: ranks of the mesh.
        prices: a price for each kind, group and size in the report.
    """

    mesh: Mapping[str, int]
    num_ranks: int
    prices: tuple[CollectivePrice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Live bytes at one moment by category, in the order of :data:`CATEGORIES`."""

    seconds: float
    num_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """The sum over categories."""
        return sum(self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStep:
    """A graph after one pass.

    Attributes:
        graph: "joint", "forward" or "backward".
        name: name of the pass; "captured" and "partitioned" before any pass.
        seconds: duration of the pass and its checks.
        num_nodes, num_collectives, collective_bytes: counts of the graph; bytes are those of the collectives' inputs.
        counts, skipped: the report of the pass.
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
        name: "forward", "backward", "optimizer"; "graph" in a report of ``inspect_graph``.
        repeats: number of its runs in a step.
        seconds: duration of one run: the sum of ``compute_seconds`` and ``exposed_seconds``.
        bound_seconds: a lower bound of ``seconds`` over all schedules of its collectives.
        gap: ``seconds / bound_seconds - 1``.
        bounds: each lower bound by name.
        solver: the search that found the plan (``Plan.solver``); "none" for the schedule of the passes.
        flops: operations executed, recomputation included, causal attention in full.
        num_nodes: nodes of the graph.
        compute: the compute stream, in order.
        collectives: its collectives, in the order of their starts.
        schedule: starts and waits in order, with the compute time before each.
        memory: live bytes over its run, condensed; the peak is always among the points.
        peak: the point of the peak.
        peak_where: the node at the peak.
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
        peak_half, peak_where: the half and the node of the peak.
        persistent: bytes by category that live through the whole step.
        capacity_bytes: memory of the device.
        budget_bytes: the memory budget; None without one.
        fits: whether the peak is within the budget, or without a budget within the capacity.
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
        half, kind, group, num_bytes: their common values.
        count: their number in a step, over all micro-batches.
        seconds: time of one.
        exposed_seconds: exposed time of all, in a step.
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
    """A collective that compute waits for; ``step_seconds`` is its exposed time over all micro-batches."""

    half: str
    collective: CollectiveEvent
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Utilisation and rates.

    Attributes:
        model_flops: operations of one rank in a step without recomputation, causal attention in full.
        executed_flops: the same with recomputation.
        peak_flops: FLOP/s of the card in ``dtype``, the dtype of most operations.
        mfu, hfu: model and executed FLOPs divided by the FLOPs at the peak in the time of the step.
        tokens: elements of the first integer input, for one rank and micro-batch; None without such an input.
        tokens_per_second: rate of all ranks of the mesh; a batch that the ranks of an axis share counts once.
        tokens_per_second_per_rank: that divided by the number of ranks.
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
    """Predicted time and memory of one training step.

    Attributes:
        model: the model; None in a report of ``inspect_graph``.
        mesh: axis sizes, outermost first.
        num_ranks: ranks of the mesh.
        hardware: name of the card; ``card`` is its data.
        settings: the settings, as text or numbers.
        halves: the halves in the order in which they run.
        step_seconds: time of all repeats of all halves. ``compute_seconds``, ``exposed_seconds`` and
            ``bound_seconds`` count all repeats too.
        throughput: utilisation and rates; None in a report of ``inspect_graph``.
        exposures: the largest exposures, at most ten.
        passes: the graphs after each pass.
        worlds: prices of the collectives on this mesh and on others.
        stage_seconds: duration of each stage of the inspection.
        notes: assumptions of the model, and collectives that passes left as they are.
        placements: where parameters lie on the further axis of the mesh; empty without one.
        reshards: the reshards on that axis that communicate.
        candidates: the placements that were compared, if they were to be chosen; the cheapest first.
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
    placements: tuple[PlacedParameters, ...] = ()
    reshards: tuple[ReshardCount, ...] = ()
    candidates: tuple[PlacementCandidate, ...] = ()

    @property
    def num_batches(self) -> int:
        """Ranks with inputs of their own; those of an axis of placements share theirs."""
        if self.settings.get("placements") is None:
            return self.num_ranks
        return math.prod(size for name, size in self.mesh.items() if name in ("replicate", "shard"))

    def half(self, name: str) -> HalfReport:
        """The half of this name.

        Raises:
            KeyError: there is no such half.
        """
        found = {half.name: half for half in self.halves}
        return found[name]

    def to_dict(self, *, texts: bool = False) -> dict[str, Any]:
        """The report as JSON values; see :func:`report_schema`.

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
    """A value with lists in place of tuples."""
    if isinstance(value, (tuple, list)):
        return [_json_value(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _json_value(part) for name, part in value.items()}
    return value


def report_schema() -> dict[str, Any]:
    """The JSON schema of :meth:`Report.to_dict`."""
    return json.loads((resources.files("graphshard.report") / "schema.json").read_text())
