"""What a schedule costs: the one definition of time and memory that everything else uses.

One compute stream runs tasks in their order and, between them, *steps*: starts and waits of buckets.
A start costs the stream the bucket's casts, its copy in (none for a bucket of one, and none where
the members are what one reduced bucket gave, or neighbours in memory) and what the collective takes of
the core that computes; the collective then queues in its process group, or on the link that this group
shares with others. A part of it may pass while the one in front of it moves (in LogGP's terms
the gap between two is shorter than the latency of one: Alexandrov and others, SPAA 1995).
A wait blocks the stream until the collective has ended, or as long as is to be expected where ends are spread
(:func:`graphshard.cost.prices.behind_wait`), then costs its copy out (gathers) and what is computed from it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...cost import behind_wait
from ...errors import PlanError
from ...ir import are_neighbours
from .problem import Collective, Problem


class Step(NamedTuple):
    """A start or a wait, in a gap; ``members`` are the indices of a bucket's collectives, ascending."""

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
        """When it has ended for certain."""
        return self.finish + self.bucket.spread_seconds


@dataclass(slots=True)
class State:
    """Where a schedule stands.

    Attributes:
        position: the gap.
        seconds: the compute stream's clock.
        free: when each queue is free.
        opens: when the next in each queue may begin at the soonest: what is in front overlaps by no more than its own.
        started, waited: bit sets of collectives.
        flights: in the order of their starts.
        linked: bit sets of collectives that one reduced bucket feeds: they need no copy in.
        held_bytes: what collectives hold.
        peak_bytes: the most that was live so far.
        owed_seconds: compute that collectives will still cost for certain.
        before: the state this one came from; ``step`` led here (None for a task).
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
        """The states that led here, from the beginning to this one."""
        found = []
        state: State | None = self
        while state is not None:
            found.append(state)
            state = state.before
        return found[::-1]

    def steps(self) -> list[Step]:
        """The steps that led here, in order."""
        return [state.step for state in self.path() if state.step is not None]


class Machine:
    """The rules of one problem. Its methods give the next state, or None where a rule forbids it.

    Args:
        problem: what is planned.
        budget_bytes: replaces the problem's own, so that one machine can ask for less.
    """

    def __init__(self, problem: Problem, *, budget_bytes: int | None) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.collectives = problem.collectives
        self.end = len(problem.tasks)
        # In the order of the collectives: a schedule must not depend on names, which differ between ranks.
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
        """Which of ``queues`` it waits in."""
        return self._queue[one.queue]

    def begin(self) -> State:
        """Nothing has started."""
        idle = (0.0,) * len(self.queues)
        held = self.appearing[0]
        owed = sum(one.before_seconds + one.after_seconds for one in self.collectives)
        return State(0, 0.0, idle, idle, 0, 0, (), (), held, held + self.between[0], owed, None, None)

    def bucket(self, members: tuple[int, ...]) -> Bucket:
        """What these collectives cost when they are merged; remembered."""
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
        """Why a bucket cannot start now, memory aside; empty if it can."""
        if state.started & bucket.mask:
            return "it has started already"
        if bucket.earliest > state.position:
            return "its data is not ready"
        if bucket.after_mask & ~state.waited:
            return "what it comes after is not waited for"
        if self.fixed and any(
            self.fixed.get(index, bucket.members) != bucket.members for index in bucket.members
        ):
            return "the user fixed another bucket"
        limit = self.limits.get(bucket.limit, 0)
        if limit and sum(flight.bucket.limit == bucket.limit for flight in state.flights) >= limit:
            return f"{limit} are in flight, which is the limit"
        if self.prefetched and any(
            then & bucket.mask and first & ~state.waited for first, then in self.prefetched
        ):
            return "the user starts it after another"
        return ""

    def start(self, state: State, bucket: Bucket) -> State | None:
        """The bucket starts in this gap."""
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
        """When a bucket that enters its queue at ``issued`` begins: some of it may pass beside what is in front.

        No more than of what is in front could pass beside another: a short one leaves a link idle for a short time.
        """
        queue = bucket.queue
        return max(issued, state.free[queue] - bucket.overlapped_seconds, state.opens[queue])

    def resumes(self, state: State, flight: Flight) -> float:
        """When compute is expected to go on that waits for one of ``state.flights`` now."""
        return behind_wait(state.seconds, flight.finish, flight.bucket.spread_seconds)

    def wait(self, state: State, flight: Flight) -> State | None:
        """One of ``state.flights`` is waited for in this gap."""
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
        """The collectives that come after these alone, and the bytes of their inputs."""
        found = {other: None for index in bucket.members for other in self.dependents.get(index, ())}
        behind = [self.collectives[dependent] for dependent in found]
        appearing = sum(one.ready_bytes for one in behind if all(waited >> other & 1 for other in one.after))
        is_each = len(bucket.members) > 1 and len(found) == len(bucket.members)
        is_whole = is_each and not any(len(one.after) > 1 or one.staged_bytes for one in behind)
        return (sum(1 << dependent for dependent in found) if is_whole else 0), appearing

    def must_wait(self, state: State) -> int:
        """The collectives that this gap's task reads and that are not waited for."""
        return self.due[state.position] & ~state.waited

    def run(self, state: State) -> State | None:
        """The task behind this gap runs."""
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
        """Every task has run and every collective is waited for."""
        return state.position == self.end and state.waited == self.all_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRun:
    """One bucket in a simulated schedule; times in seconds from the beginning.

    Attributes:
        members: indices of its collectives.
        start, wait: gaps.
        num_bytes, seconds: what it moves, and how long that takes alone.
        issued, began, finished: when it entered its queue, ran, and ended; it may begin before
            the one in front has ended.
        needed: when the compute stream waits for it.
        resumed: when the compute stream is expected to go on.
        behind: members of the bucket in front of it in its queue; empty for the first.
    """

    members: tuple[int, ...]
    start: int
    wait: int
    num_bytes: int
    seconds: float
    issued: float
    began: float
    finished: float
    needed: float
    resumed: float
    behind: tuple[int, ...]

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waits for it."""
        return self.resumed - self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        seconds: when the last task and the last wait are over.
        runs: the buckets in the order of their starts.
        task_seconds: when each task starts.
        peak_bytes: the most that is live, in tasks and in steps.
        live_bytes: what is live in each task.
        end: the state behind the last task and step; it leads back to all states before.
    """

    seconds: float
    runs: tuple[BucketRun, ...]
    task_seconds: tuple[float, ...]
    peak_bytes: int
    live_bytes: tuple[int, ...]
    end: State

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waited for collectives."""
        return sum(run.exposed_seconds for run in self.runs)


def simulate(problem: Problem, steps: Sequence[Step], *, machine: Machine | None = None) -> Simulation:
    """Carries out a schedule without a budget.

    Args:
        problem: what is planned.
        steps: in their order; positions must not decrease.
        machine: of this problem, without a budget, if there is one already: it remembers buckets.

    Raises:
        PlanError: a step is impossible, or a collective is never started or waited for; names it.
    """
    machine = machine or Machine(problem, budget_bytes=None)
    state = machine.begin()
    runs: dict[tuple[int, ...], dict] = {}
    last_in_queue: dict[int, tuple[int, ...]] = {}
    task_seconds, live = [], []

    def advance(position: int) -> None:
        nonlocal state
        while state.position < position:
            task_seconds.append(state.seconds)
            live.append(machine.live[state.position] + state.held_bytes - machine.released[state.position])
            following = machine.run(state)
            if following is None:
                raise PlanError(f"{problem.where(state.position)}: {_why_not_run(machine, state)}")
            state = following

    for step in steps:
        if step.position < state.position:
            raise PlanError(f"{_names(problem, step.members)}: its step comes after a later one")
        advance(step.position)
        if step.is_start:
            bucket = machine.bucket(step.members)
            following = machine.start(state, bucket)
            if following is None:
                why = machine.why_not_start(state, bucket)
                raise PlanError(f"{_names(problem, step.members)} cannot start: {why}")
            flight = following.flights[-1]
            runs[step.members] = {
                "start": step.position,
                "issued": following.seconds,
                "began": machine.begins(bucket, following.seconds, state),
                "finished": flight.finish,
                "behind": last_in_queue.get(bucket.queue, ()),
                "num_bytes": bucket.num_bytes,
                "seconds": bucket.seconds,
            }
            last_in_queue[bucket.queue] = step.members
        else:
            flights = [flight for flight in state.flights if flight.bucket.members == step.members]
            if not flights:
                raise PlanError(f"{_names(problem, step.members)} is waited for but not in flight")
            runs[step.members]["wait"] = step.position
            runs[step.members]["needed"] = state.seconds
            runs[step.members]["resumed"] = machine.resumes(state, flights[0])
            following = machine.wait(state, flights[0])
            assert following is not None, "there is no budget"
        state = following
    advance(machine.end)
    if not machine.is_done(state):
        missing = [i for i in range(len(problem.collectives)) if not state.waited >> i & 1]
        raise PlanError(f"{_names(problem, missing)} is never waited for")
    return Simulation(
        seconds=state.seconds,
        runs=tuple(BucketRun(members=members, **values) for members, values in runs.items()),
        task_seconds=tuple(task_seconds),
        peak_bytes=state.peak_bytes,
        live_bytes=tuple(live),
        end=state,
    )


def _why_not_run(machine: Machine, state: State) -> str:
    due = machine.must_wait(state)
    if due:
        names = [index for index in range(due.bit_length()) if due >> index & 1]
        return f"{_names(machine.problem, names)} is read but not waited for"
    return "a prefetch that the user asked for has not started"


def _names(problem: Problem, members: Sequence[int]) -> str:
    return ", ".join(problem.collectives[index].name for index in members)
