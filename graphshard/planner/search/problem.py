"""What is planned, without any graph: compute tasks in a fixed order, and collectives between them.

*Gap* ``i`` is the place in front of task ``i``; the last gap, ``len(tasks)``, is the end. A collective starts in one
gap and is waited for in the same gap or a later one. Collectives of one process group run one after the other, in
the order of their starts; those of different groups run side by side.

Memory of a collective:

- ``ready_bytes``: what compute made for it and nothing else reads. It is held from its making until the bucket has
  packed it, or, without packing, until the wait.
- While it runs: its result, the copies that its backend makes, and what packing or casting made for it.
- ``kept_bytes``: what is held from the wait to the first reader. From there on it counts in ``live_bytes`` of the
  tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...cost import Prices
from ...errors import ProblemError
from ...ir import RowPlace


class RememberedPrices:
    """Prices with a cache: each collective, overlap and copy is priced once."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._collectives: dict[tuple[str, int, str], float] = {}
        self._overlaps: dict[tuple[str, int, str], float] = {}
        self._copies: dict[int, float] = {}

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """As in :class:`Prices`."""
        key = (kind, num_bytes, group)
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = self._prices.collective_seconds(kind, num_bytes, group)
        return found

    def overlapped_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """As in :class:`Prices`."""
        key = (kind, num_bytes, group)
        found = self._overlaps.get(key)
        if found is None:
            found = self._overlaps[key] = self._prices.overlapped_seconds(kind, num_bytes, group)
        return found

    def spread_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """As in :class:`Prices`."""
        return self._prices.spread_seconds(kind, num_bytes, group)

    def core_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """As in :class:`Prices`."""
        return self._prices.core_seconds(kind, num_bytes, group)

    def copy_seconds(self, num_bytes: int) -> float:
        """As in :class:`Prices`."""
        found = self._copies.get(num_bytes)
        if found is None:
            found = self._copies[num_bytes] = self._prices.copy_seconds(num_bytes)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of compute.

    Attributes:
        seconds: how long it runs.
        live_bytes: the most that is live while it runs, without what collectives hold.
        before_bytes: the part of that which is live in the gap in front of it.
    """

    seconds: float
    live_bytes: int = 0
    before_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, before any are merged. Positions are gaps.

    Attributes:
        name: for messages; no decision depends on it.
        kind: as :meth:`Prices.collective_seconds` names it.
        queue: its process group.
        in_bytes, out_bytes: sizes of its input and its result.
        earliest: the first gap in which it may start: its input exists.
        ready: the first gap in which its input exists, if the user has it start later; else None.
        deadline: the gap in front of the first task that reads its result.
        merge_key: collectives with equal keys may be merged; None for one that stays alone.
        after: collectives, by index, that must be waited for before it starts.
        ready_bytes: bytes that compute or ``after`` made and that are freed with it.
        staged_bytes: bytes that casts and pads in front of it allocate when it starts.
        copy_bytes: bytes that its backend copies while it runs.
        kept_bytes: bytes held after its wait, until its first reader.
        fresh_bytes: the part of ``kept_bytes`` that is not the result itself but computed from it at the wait.
        before_seconds, after_seconds: compute right before its start, and right after its wait.
        views_result: pieces of a merged result are views and need no copy out (reductions).
        limit: the limit it counts for: "gather", "reduction" or "".
        place: where its input lies in memory; neighbours are merged without a copy. None if unknown.
    """

    name: str
    kind: str
    queue: str
    in_bytes: int
    out_bytes: int
    earliest: int
    deadline: int
    merge_key: tuple[str, ...] | None = None
    after: tuple[int, ...] = ()
    ready_bytes: int = 0
    staged_bytes: int = 0
    copy_bytes: int = 0
    kept_bytes: int = 0
    fresh_bytes: int = 0
    before_seconds: float = 0.0
    after_seconds: float = 0.0
    views_result: bool = False
    limit: str = ""
    place: RowPlace | None = None
    ready: int | None = None

    @property
    def num_bytes(self) -> int:
        """The size that is priced: the larger of input and output."""
        return max(self.in_bytes, self.out_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tasks, collectives, prices, and the user's constraints.

    Attributes:
        tasks: in their order.
        collectives: ``after`` names earlier ones only.
        prices: of collectives and copies.
        end_bytes: what is live at the end, without what collectives hold.
        budget_bytes: the most that may be live at any point; None for no limit.
        fixed_buckets: collectives, by index, that must form one bucket each.
        prefetch: pairs (a, b): b starts in the gap in which the bucket of a is waited for, after the wait.
        max_gathers, max_reductions: how many buckets of one ``limit`` may be in flight; 0 for any number.
        shared_links: names of process groups that share a link. Their collectives run one after the other, in the
            order of their starts, as if they were of one group.
        prefers_large: whether few, large buckets are worth a little time, as on GPUs (``large_buckets``).

    Raises:
        ProblemError: lists everything that is wrong.
    """

    tasks: Sequence[Task]
    collectives: Sequence[Collective]
    prices: Prices
    end_bytes: int = 0
    budget_bytes: int | None = None
    fixed_buckets: Sequence[tuple[int, ...]] = ()
    prefetch: Sequence[tuple[int, int]] = ()
    max_gathers: int = 0
    max_reductions: int = 0
    shared_links: Sequence[tuple[str, ...]] = ()
    prefers_large: bool = False
    position_names: Sequence[str] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if problems := list(_contradictions(self)):
            raise ProblemError("this cannot be planned: " + "; ".join(problems))

    @property
    def num_positions(self) -> int:
        """The number of gaps."""
        return len(self.tasks) + 1

    def link_of(self, queue: str) -> str:
        """The name of the queue of a process group: the group's own, or that of the link it shares."""
        return next((" and ".join(sorted(groups)) for groups in self.shared_links if queue in groups), queue)

    def without_wishes(self) -> Problem:
        """The same problem with the budget as its only constraint."""
        ones = [
            one if one.ready is None else replace(one, earliest=one.ready, ready=None)
            for one in self.collectives
        ]
        return replace(self, collectives=ones, fixed_buckets=(), prefetch=(), max_gathers=0, max_reductions=0)

    def where(self, position: int) -> str:
        """A gap in words, for messages: "before mm_3", "at the end"."""
        if position >= len(self.tasks):
            return "at the end"
        named = self.position_names[position] if self.position_names else f"task {position}"
        return f"before {named}"


def _contradictions(problem: Problem) -> list[str]:
    found = []
    count, end = len(problem.collectives), len(problem.tasks)
    for task in problem.tasks:
        if task.seconds < 0 or task.live_bytes < task.before_bytes:
            found.append(
                f"a task of {task.seconds} s with {task.live_bytes} bytes, {task.before_bytes} before"
            )
    for index, one in enumerate(problem.collectives):
        if not 0 <= one.earliest <= one.deadline <= end:
            found.append(
                f"{one.name} exists from gap {one.earliest} and is read in gap {one.deadline} of {end}"
            )
        if any(not 0 <= other < index for other in one.after):
            found.append(f"{one.name} comes after {one.after}, which are not all earlier ones")
    for name in ("max_gathers", "max_reductions"):
        if getattr(problem, name) < 0:
            found.append(f"{name}={getattr(problem, name)} must be 0, for any number, or more")
    lanes: dict[tuple[str, ...] | None, Collective] = {}
    for one in problem.collectives:
        first = lanes.setdefault(one.merge_key, one)
        if one.merge_key is not None and (first.queue, first.kind) != (one.queue, one.kind):
            found.append(f"{first.name} and {one.name} have one merge key, but are of other kinds or groups")
    shared = [queue for groups in problem.shared_links for queue in set(groups)]
    if twice := sorted({queue for queue in shared if shared.count(queue) > 1}):
        found.append(f"process groups on two shared links: {', '.join(twice)}; write each link once")
    bucketed = [index for bucket in problem.fixed_buckets for index in bucket]
    if len(set(bucketed)) < len(bucketed):
        found.append("a collective is in two fixed buckets")
    if any(not 0 <= index < count for index in bucketed):
        found.append("a fixed bucket names a collective that does not exist")
        return found
    if any(not 0 <= index < count for pair in problem.prefetch for index in pair):
        found.append("a prefetch names a collective that does not exist")
        return found
    for bucket in problem.fixed_buckets:
        members = [problem.collectives[index] for index in bucket]
        if len(members) > 1 and (len({one.merge_key for one in members}) > 1 or members[0].merge_key is None):
            found.append(f"{' and '.join(one.name for one in members)} cannot be merged")
        elif max(one.earliest for one in members) > min(one.deadline for one in members):
            found.append(f"{members[0].name} is read before the rest of its bucket exists")
    return found
