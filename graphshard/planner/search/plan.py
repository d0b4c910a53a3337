"""The result of planning: the schedule, its predicted cost, its bounds, and a reason for each exposed bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...units import exact_size, size_text, time_text
from .bound import Bounds, gap, lower_bounds
from .machine import Machine, Step
from .problem import Problem
from .simulate import BucketRun, Simulation, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBucket:
    """One collective of the planned graph.

    Attributes:
        names: the collectives merged into it.
        kind, group: as in the problem.
        num_bytes: the larger of its input and its output.
        start, wait: gaps of the problem; ``start_where`` and ``wait_where`` are the same in words.
        issued_at, began_at, finished_at: seconds from the beginning of the graph.
        exposed_seconds: how long compute is expected to wait for it.
        reason: why it could not end sooner; empty if nothing is exposed.
    """

    names: tuple[str, ...]
    kind: str
    group: str
    num_bytes: int
    start: int
    wait: int
    start_where: str
    wait_where: str
    issued_at: float
    began_at: float
    finished_at: float
    exposed_seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule with its predicted cost.

    Attributes:
        buckets: in the order of their starts.
        seconds: predicted time of the graph.
        compute_seconds: the part of its tasks and of what collectives compute.
        exposed_seconds: how long compute waits for collectives.
        unplanned_seconds: predicted time of the graph as it came; None if unknown.
        bounds: lower bounds on the time of any schedule.
        gap: ``seconds`` / the best bound - 1.
        peak_bytes: the most that is live.
        budget_bytes: the most that may be; None for no limit.
        solver: "exact" (nothing is faster under the model), "beam" (the best of the searches), "large" (the one with
            the largest buckets of those at most 1 % slower than the best with large buckets; on GPUs), "leanest" (the
            lowest peak, when no other schedule keeps the budget), "followed" (the plan of another rank, or of a
            trial), or "none" (the graph as it came).
        steps: the schedule itself.
        notes: what was left as it is, and why.
        splits: collectives that are split, and into how many parts. Bounds and ``steps`` are then those of the graph
            with the parts.
        num_moved: pieces of compute that moved beside collectives that compute reads soon. Bounds, gap and ``steps``
            are then those of the graph in its new order.
        any_order_seconds: a lower bound on the time in any order of compute; None if unknown.
    """

    buckets: tuple[PlannedBucket, ...]
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    unplanned_seconds: float | None
    bounds: Bounds
    gap: float
    peak_bytes: int
    budget_bytes: int | None
    solver: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    splits: tuple[tuple[str, int], ...] = ()
    num_moved: int = 0
    any_order_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The plan in types that JSON can hold."""
        return asdict(self)

    def with_labels(self, labels: Mapping[str, str]) -> Plan:
        """The plan with other names for its groups, those of mesh axes for instance."""
        buckets = tuple(replace(one, group=labels.get(one.group, one.group)) for one in self.buckets)
        return replace(self, buckets=buckets)

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *map(_bucket_text, self.buckets), *self.notes])

    def _summary(self) -> list[str]:
        collectives = sum(len(bucket.names) for bucket in self.buckets)
        before = "" if self.unplanned_seconds is None else f", {time_text(self.unplanned_seconds)} as it came"
        budget = "no budget" if self.budget_bytes is None else f"budget {exact_size(self.budget_bytes)}"
        return [
            f"{time_text(self.seconds)} predicted{before}; {time_text(self.compute_seconds)} compute, "
            f"{time_text(self.exposed_seconds)} exposed",
            f"at least {time_text(self.bounds.seconds)} with compute in this order: gap {100 * self.gap:.2f} % "
            f"({_SOLVERS.get(self.solver, self.solver)}){self._any_order()}",
            f"peak {exact_size(self.peak_bytes)}, {budget}",
            f"{collectives} collectives in {len(self.buckets)} buckets",
            *(f"{name} is split into {num_parts} parts" for name, num_parts in self.splits),
            *([f"{self.num_moved} pieces of compute moved beside collectives"] if self.num_moved else []),
        ]

    def _any_order(self) -> str:
        if not self.any_order_seconds:
            return ""
        share = self.seconds / self.any_order_seconds - 1.0
        return f"; at least {time_text(self.any_order_seconds)} in any: {100 * share:.2f} %"


#: Solvers in words.
_SOLVERS = {
    "exact": "the fastest schedule",
    "beam": "the fastest that was found",
    "large": "with the largest buckets that cost little time",
    "leanest": "the smallest that was found",
    "followed": "as planned by another rank, or in a trial",
    "none": "as it came",
}


def _bucket_text(bucket: PlannedBucket) -> str:
    more = f" and {len(bucket.names) - 1} more" if len(bucket.names) > 1 else ""
    exposed = (
        f", exposed {time_text(bucket.exposed_seconds)}: {bucket.reason}" if bucket.exposed_seconds else ""
    )
    return (
        f"  {bucket.kind} over {bucket.group} of {size_text(bucket.num_bytes)} ({bucket.names[0]}{more}): "
        f"starts {bucket.start_where}, is waited for {bucket.wait_where}{exposed}"
    )


def make_plan(
    problem: Problem,
    steps: Sequence[Step],
    *,
    solver: str,
    unplanned_seconds: float | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """The plan that carries out ``steps``, with its cost and its bounds."""
    simulation = simulate(problem, steps)
    bounds = lower_bounds(problem)
    return Plan(
        buckets=tuple(
            _planned(problem, simulation, run, reason) for run, reason in _reasons(problem, simulation)
        ),
        seconds=simulation.seconds,
        compute_seconds=simulation.seconds - simulation.exposed_seconds,
        exposed_seconds=simulation.exposed_seconds,
        unplanned_seconds=unplanned_seconds,
        bounds=bounds,
        gap=gap(simulation.seconds, bounds),
        peak_bytes=simulation.peak_bytes,
        budget_bytes=problem.budget_bytes,
        solver=solver,
        steps=tuple(steps),
        notes=tuple(notes),
    )


def _planned(problem: Problem, simulation: Simulation, run: BucketRun, reason: str) -> PlannedBucket:
    first = problem.collectives[run.members[0]]
    return PlannedBucket(
        names=tuple(problem.collectives[index].name for index in run.members),
        kind=first.kind,
        group=first.queue,
        num_bytes=run.num_bytes,
        start=run.start,
        wait=run.wait,
        start_where=problem.where(run.start),
        wait_where=problem.where(run.wait),
        issued_at=run.issued,
        began_at=run.began,
        finished_at=run.finished,
        exposed_seconds=run.exposed_seconds,
        reason=reason,
    )


def _reasons(problem: Problem, simulation: Simulation) -> list[tuple[BucketRun, str]]:
    machine = Machine(problem, budget_bytes=problem.budget_bytes)
    return [
        (run, _reason(problem, machine, simulation, run) if run.exposed_seconds else "")
        for run in simulation.runs
    ]


def _reason(problem: Problem, machine: Machine, simulation: Simulation, run: BucketRun) -> str:
    """Why a bucket that compute waits for did not begin sooner."""
    bucket = machine.bucket(run.members)
    if run.finished <= run.needed:
        return "it ends in time on average, but the times of collectives vary on this machine"
    if run.behind and run.began > run.issued:
        front = problem.collectives[run.behind[0]].name
        more = f" and {len(run.behind) - 1} more" if len(run.behind) > 1 else ""
        return f"the queue is busy with {front}{more}"
    if run.start == 0:
        return "first in the graph"
    if run.start == bucket.earliest:
        is_held_back = any(problem.collectives[index].ready is not None for index in run.members)
        return "the user has it start no sooner" if is_held_back else "its data is not ready sooner"
    if any(problem.collectives[index].after for index in run.members):
        return "it comes after another collective"
    needed, budget = bucket.running_bytes, problem.budget_bytes
    if budget is not None and simulation.live_bytes[run.start - 1] + needed > budget:
        return f"the budget: {size_text(needed)} more do not fit {problem.where(run.start - 1)}"
    if (problem.max_gathers and bucket.limit == "gather") or (
        problem.max_reductions and bucket.limit == "reduction"
    ):
        return "the limit of collectives in flight"
    if any(then in run.members for _, then in problem.prefetch):
        return "the user starts it after another"
    return "another order or bucket would cost more elsewhere"
