"""The rules of a schedule, and what each step costs in time and memory: a state machine.

One compute stream runs the tasks in their order. Between tasks it takes *steps*: it starts or awaits a bucket.

A schedule is legal if it keeps these rules. Errors name the rule that is broken.

1. Steps are listed in the order of their gaps.
2. Each collective starts once, in one bucket, and is waited for once, later.
3. A bucket starts no sooner than the last of its inputs exists (``Collective.earliest``).
4. A bucket starts after the waits for all collectives that its members come after (``Collective.after``).
5. A bucket that the user fixed starts as it is: whole, and with no other member (``Problem.fixed_buckets``).
6. No more buckets are in flight than the user's limits allow (``Problem.max_gathers``, ``max_reductions``).
7. For each prefetch (a, b), b starts after the wait for a and in the same gap (``Problem.prefetch``).
8. A task runs after the waits for all collectives that it reads (``Collective.deadline``).
9. What is live never exceeds the budget.

The machine does not check that the members of a bucket have one ``merge_key``; searches make only such buckets.

The cost of a step:

- A start costs the stream the casts of the members, the copy into the bucket, and the part of the core that the
  collective takes. There is no copy for a bucket of one, for members that are neighbours in memory, and for members
  whose inputs are slices of one reduced bucket.
- The collective then queues in its process group, or on the link that its group shares with others. A part of it may
  overlap with the collective in front of it. In terms of LogGP, the gap between two is shorter than the latency of
  one (Alexandrov and others, SPAA 1995).
- A wait blocks the stream until the collective has ended. Where ends are spread over a time, it blocks for the
  expected time (:func:`graphshard.cost.prices.behind_wait`). It then costs the copy out of the bucket (gathers only)
  and what is computed from the result at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...cost import behind_wait
from ...ir import are_neighbours
from .problem import Collective, Problem


class Step(NamedTuple):
    """A start or a wait of a bucket in gap ``position``; ``members`` are the indices of its collectives, ascending."""

    position: int
    is_start: bool
    members: tuple[int, ...]


class Bucket(NamedTuple):
    """What a bucket costs and holds, wherever it stands."""

    members: tuple[int, ...]
    mask: int
    queue: int
    limit: str
    num_bytes: int
    seconds: float
    overlapped_seconds: float
    spread_seconds: float
    copy_in_seconds: float
    core_seconds: float
    start_seconds: float
    wait_seconds: float
    copy_out_seconds: float
    in_bytes: int
    ready_bytes: int
    staged_bytes: int
    running_bytes: int
    wait_bytes: int
    kept_bytes: int
    earliest: int
    deadline: int
    after_mask: int
    packs: bool


class Flight(NamedTuple):
    """A bucket that has started and is not yet waited for."""

    bucket: Bucket
    finish: float
    held_bytes: int

    @property
    def latest(self) -> float:
        """The latest time at which it has ended."""
        return self.finish + self.bucket.spread_seconds


@dataclass(slots=True)
class State:
    """The state of a schedule after some step or task.

    Attributes:
        position: the gap.
        seconds: the clock of the compute stream.
        free: for each queue, when its last collective ends.
        opens: for each queue, the soonest time at which the next collective may begin. The collective in front
            overlaps by at most its own ``overlapped_seconds``.
        started, waited: collectives, as bit sets.
        flights: in the order of their starts.
        linked: sets of collectives whose inputs are slices of one reduced bucket, as bit sets; such a bucket needs
            no copy in.
        held_bytes: what collectives hold.
        peak_bytes: the most that was live so far.
        owed_seconds: compute that the collectives still to come will certainly cost.
        before: the previous state.
        step: the step that led here; None for a task.
    """

    position: int
    seconds: float
    free: tuple[float, ...]
    opens: tuple[float, ...]
    started: int
    waited: int
    flights: tuple[Flight, ...]
    linked: tuple[int, ...]
    held_bytes: int
    peak_bytes: int
    owed_seconds: float
    before: State | None
    step: Step | None

    def path(self) -> list[State]:
        """All states from the beginning to this one."""
        found = []
        state: State | None = self
        while state is not None:
            found.append(state)
            state = state.before
        return found[::-1]

    def steps(self) -> list[Step]:
        """All steps from the beginning to this state."""
        return [state.step for state in self.path() if state.step is not None]


class Machine:
    """The rules of one problem (see the module docstring).

    Each step method gives the next state, or None where a rule forbids it.

    Args:
        problem: what is planned.
        budget_bytes: the budget to keep, in place of the problem's own.
    """

    def __init__(self, problem: Problem, *, budget_bytes: int | None) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.collectives = problem.collectives
        self.end = len(problem.tasks)
        # The order of the collectives decides: names of groups differ between ranks.
        groups = list(dict.fromkeys(one.queue for one in problem.collectives))
        self.queues = list(dict.fromkeys(map(problem.link_of, groups)))
        self._queue = {group: self.queues.index(problem.link_of(group)) for group in groups}
        self.fixed = {index: tuple(sorted(b)) for b in problem.fixed_buckets for index in b}
        self.dependents: dict[int, list[int]] = {}
        self.task_seconds = [task.seconds for task in problem.tasks]
        self.live = [task.live_bytes for task in problem.tasks]
        self.between = [task.before_bytes for task in problem.tasks] + [problem.end_bytes]
        self.due = [0] * (self.end + 1)
        self.released = [0] * (self.end + 1)
        self.appearing = [0] * (self.end + 2)
        for index, one in enumerate(problem.collectives):
            self.due[one.deadline] |= 1 << index
            self.released[one.deadline] += one.kept_bytes
            if not one.after:
                self.appearing[one.earliest] += one.ready_bytes
            for other in one.after:
                self.dependents.setdefault(other, []).append(index)
        self.limits = {"gather": problem.max_gathers, "reduction": problem.max_reductions}
        self.prefetched = [(1 << first, 1 << then) for first, then in problem.prefetch]
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self._bits = [1 << index for index in range(len(problem.collectives))]
        self.all_mask = (1 << len(problem.collectives)) - 1

    def queue_of(self, one: Collective) -> int:
        """The index in ``queues`` of the queue of a collective."""
        return self._queue[one.queue]

    def begin(self) -> State:
        """The state in which nothing has started."""
        idle = (0.0,) * len(self.queues)
        held = self.appearing[0]
        owed = sum(one.before_seconds + one.after_seconds for one in self.collectives)
        return State(0, 0.0, idle, idle, 0, 0, (), (), held, held + self.between[0], owed, None, None)

    def bucket(self, members: tuple[int, ...]) -> Bucket:
        """The cost of these collectives merged into one bucket; cached."""
        found = self._buckets.get(members)
        if found is None:
            found = self._buckets[members] = self._make_bucket(members)
        return found

    def _make_bucket(self, members: tuple[int, ...]) -> Bucket:
        ones = [self.collectives[index] for index in members]
        first, prices, is_merged = ones[0], self.problem.prices, len(ones) > 1
        in_bytes, out_bytes = sum(one.in_bytes for one in ones), sum(one.out_bytes for one in ones)
        copies, staged = sum(one.copy_bytes for one in ones), sum(one.staged_bytes for one in ones)
        fresh = sum(one.fresh_bytes for one in ones)
        num_bytes = sum(one.num_bytes for one in ones)
        copies_out = is_merged and not first.views_result
        copy_out = prices.copy_seconds(out_bytes) if copies_out else 0.0
        packs = is_merged and not are_neighbours([one.place for one in ones])
        packed = in_bytes if packs else staged
        return Bucket(
            members=members,
            mask=sum(self._bits[index] for index in members),
            queue=self.queue_of(first),
            limit=first.limit,
            num_bytes=num_bytes,
            seconds=prices.collective_seconds(first.kind, num_bytes, first.queue),
            overlapped_seconds=prices.overlapped_seconds(first.kind, num_bytes, first.queue),
            spread_seconds=prices.spread_seconds(first.kind, num_bytes, first.queue),
            copy_in_seconds=prices.copy_seconds(in_bytes) if packs else 0.0,
            core_seconds=prices.core_seconds(first.kind, num_bytes, first.queue),
            start_seconds=sum(one.before_seconds for one in ones),
            wait_seconds=sum(one.after_seconds for one in ones) + copy_out,
            copy_out_seconds=copy_out,
            in_bytes=in_bytes,
            ready_bytes=sum(one.ready_bytes for one in ones),
            staged_bytes=staged,
            running_bytes=packed + out_bytes + copies,
            wait_bytes=(out_bytes - packed - copies if copies_out else 0) + fresh,
            kept_bytes=sum(one.kept_bytes for one in ones),
            earliest=max(one.earliest for one in ones),
            deadline=min(one.deadline for one in ones),
            after_mask=sum({1 << other for one in ones for other in one.after}),
            packs=packs,
        )

    def why_not_start(self, state: State, bucket: Bucket) -> str:
        """The rule that forbids a bucket to start now, budget aside; "" if none does."""
        if state.started & bucket.mask:
            return "it has started already (rule 2)"
        if bucket.earliest > state.position:
            return "its data is not ready (rule 3)"
        if bucket.after_mask & ~state.waited:
            return "what it comes after is not waited for (rule 4)"
        if self.fixed and any(
            self.fixed.get(index, bucket.members) != bucket.members for index in bucket.members
        ):
            return "the user fixed another bucket (rule 5)"
        limit = self.limits.get(bucket.limit, 0)
        if limit and sum(flight.bucket.limit == bucket.limit for flight in state.flights) >= limit:
            return f"{limit} are in flight, which is the limit (rule 6)"
        if self.prefetched and any(
            then & bucket.mask and first & ~state.waited for first, then in self.prefetched
        ):
            return "the user starts it after another (rule 7)"
        return ""

    def start(self, state: State, bucket: Bucket) -> State | None:
        """Starts a bucket in this gap."""
        if self.why_not_start(state, bucket):
            return None
        is_linked = len(bucket.members) > 1 and bucket.mask in state.linked
        packs = bucket.packs and not is_linked
        copy_in = bucket.copy_in_seconds if packs else 0.0
        seconds = state.seconds + bucket.start_seconds + copy_in + bucket.core_seconds
        running = bucket.running_bytes - (bucket.in_bytes if is_linked else 0)
        owned = 0 if packs else bucket.ready_bytes
        held = state.held_bytes + running - (bucket.ready_bytes if packs else 0)
        most = max(held, state.held_bytes + bucket.staged_bytes + bucket.in_bytes) if packs else held
        live = self.between[state.position] + most
        if self.budget_bytes is not None and live > self.budget_bytes:
            return None
        finish = self.begins(bucket, seconds, state) + bucket.seconds
        queue = bucket.queue
        linked = state.linked
        if linked:
            linked = tuple(mask for mask in linked if not mask & bucket.mask)
        return State(
            state.position,
            seconds,
            (*state.free[:queue], finish, *state.free[queue + 1 :]),
            (*state.opens[:queue], finish - bucket.overlapped_seconds, *state.opens[queue + 1 :]),
            state.started | bucket.mask,
            state.waited,
            (*state.flights, Flight(bucket, finish, running + owned)),
            linked,
            held,
            max(state.peak_bytes, live),
            state.owed_seconds - bucket.start_seconds + bucket.copy_out_seconds,
            state,
            Step(state.position, True, bucket.members),
        )

    def begins(self, bucket: Bucket, issued: float, state: State) -> float:
        """When a bucket begins that enters its queue at ``issued``.

        A part of it may overlap with the collective in front. The overlap is at most what the collective in front
        could overlap itself: after a short one the link is idle for a short time.
        """
        queue = bucket.queue
        return max(issued, state.free[queue] - bucket.overlapped_seconds, state.opens[queue])

    def resumes(self, state: State, flight: Flight) -> float:
        """When compute is expected to go on if it waits for one of ``state.flights`` now."""
        return behind_wait(state.seconds, flight.finish, flight.bucket.spread_seconds)

    def wait(self, state: State, flight: Flight) -> State | None:
        """Waits for one of ``state.flights`` in this gap."""
        bucket = flight.bucket
        most = state.held_bytes + max(bucket.wait_bytes, 0)
        waited = state.waited | bucket.mask
        held = state.held_bytes - flight.held_bytes + bucket.kept_bytes
        linked = state.linked
        if self.dependents:
            feeds, appearing = self._feeds(bucket, waited)
            held += appearing
            linked = (*linked, feeds) if feeds else linked
        live = self.between[state.position] + max(most, held)
        if self.budget_bytes is not None and live > self.budget_bytes:
            return None
        return State(
            state.position,
            self.resumes(state, flight) + bucket.wait_seconds,
            state.free,
            state.opens,
            state.started,
            waited,
            tuple(other for other in state.flights if other is not flight),
            linked,
            held,
            max(state.peak_bytes, live),
            state.owed_seconds - bucket.wait_seconds,
            state,
            Step(state.position, False, bucket.members),
        )

    def _feeds(self, bucket: Bucket, waited: int) -> tuple[int, int]:
        """The collectives that come after this bucket alone, as a bit set, and the bytes of inputs that now exist.

        The set is empty unless the bucket has several members and each feeds one collective, without a cast.
        """
        found = {other: None for index in bucket.members for other in self.dependents.get(index, ())}
        behind = [self.collectives[dependent] for dependent in found]
        appearing = sum(one.ready_bytes for one in behind if all(waited >> other & 1 for other in one.after))
        is_each = len(bucket.members) > 1 and len(found) == len(bucket.members)
        is_whole = is_each and not any(len(one.after) > 1 or one.staged_bytes for one in behind)
        return (sum(1 << dependent for dependent in found) if is_whole else 0), appearing

    def must_wait(self, state: State) -> int:
        """The collectives that the task after this gap reads and that are not waited for, as a bit set."""
        return self.due[state.position] & ~state.waited

    def run(self, state: State) -> State | None:
        """Runs the task after this gap."""
        position = state.position
        if self.due[position] & ~state.waited:
            return None
        if self.prefetched and any(
            first & state.waited and then & ~state.started for first, then in self.prefetched
        ):
            return None
        held = state.held_bytes - self.released[position]
        live = self.live[position] + held
        held += self.appearing[position + 1]
        live = max(live, self.between[position + 1] + held)
        if self.budget_bytes is not None and live > self.budget_bytes:
            return None
        return State(
            position + 1,
            state.seconds + self.task_seconds[position],
            state.free,
            state.opens,
            state.started,
            state.waited,
            state.flights,
            state.linked,
            held,
            max(state.peak_bytes, live),
            state.owed_seconds,
            state,
            None,
        )

    def is_done(self, state: State) -> bool:
        """Whether every task has run and every collective is waited for."""
        return state.position == self.end and state.waited == self.all_mask
