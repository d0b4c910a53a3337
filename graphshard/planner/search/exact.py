"""The best schedule of a small problem: every bucket, every order, every gap.

The search explores states gap by gap. Two states that have done the same (started the same collectives, in the same
buckets, and waited for the same) differ only in their clocks. All rules are maxima, sums and expected waits, so an
earlier clock never makes a later step later. Hence a state is dropped if no clock of it is earlier than that of
another (dominance), or if its lower bound reaches a known schedule. Three choices are left out since they cannot
help:

- waiting for what nothing reads yet, if neither a budget, a limit nor another collective asks for it, and the wait
  brings no compute that could fill a pause;
- leaving a collective open that has ended, if its wait costs nothing;
- without a budget or a limit: starting on a queue where neither the bucket, nor any that may start after it, could
  begin before the next gap.

The number of states grows exponentially with the collectives: the search is for about ten of them.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterator

from .bound import LeastWork
from .machine import Bucket, Flight, Machine, State, Step
from .problem import Collective, Problem

#: The search gives up above this many states.
MAX_STATES = 400_000


class TooLargeError(Exception):
    """The search has met too many states."""


def best_schedule(
    problem: Problem, *, below_seconds: float = float("inf"), max_states: int = MAX_STATES
) -> list[Step] | None:
    """The steps of a fastest schedule within the problem's budget.

    Args:
        problem: what is planned.
        below_seconds: only schedules faster than this are wanted.
        max_states: the most states to look at.

    Returns:
        None if there is no schedule within the budget, or none below ``below_seconds``.

    Raises:
        TooLargeError: there are too many states.
    """
    machine = Machine(problem, budget_bytes=problem.budget_bytes)
    return _Exploration(machine, below_seconds, max_states).run()


def least_peak(problem: Problem, *, max_states: int = MAX_STATES) -> int | None:
    """The smallest budget in bytes that any schedule keeps; None if the user's constraints allow none.

    Raises:
        TooLargeError: there are too many states.
    """
    machine = Machine(problem, budget_bytes=None)
    arrivals = [machine.begin()]
    seen = 0
    for position in range(machine.end + 1):
        best: dict[tuple, int] = {}
        leaving: dict[tuple, State] = {}
        pending = deque(arrivals)
        while pending:
            state = pending.popleft()
            for following in _everything(machine, state):
                seen += 1
                if seen > max_states:
                    raise TooLargeError
                if best.get(key := _key(following), following.peak_bytes + 1) > following.peak_bytes:
                    best[key] = following.peak_bytes
                    pending.append(following)
            onward = machine.run(state) if position < machine.end else state
            if onward is not None:
                known = leaving.get(key := _key(onward))
                if known is None or known.peak_bytes > onward.peak_bytes:
                    leaving[key] = onward
        arrivals = list(leaving.values())
    return min((state.peak_bytes for state in arrivals if machine.is_done(state)), default=None)


def _everything(machine: Machine, state: State) -> Iterator[State]:
    for bucket in possible_buckets(machine, state):
        if (following := machine.start(state, bucket)) is not None:
            yield following
    for flight in state.flights:
        if (following := machine.wait(state, flight)) is not None:
            yield following


def possible_buckets(machine: Machine, state: State) -> Iterator[Bucket]:
    """Every bucket of collectives that may start now."""
    groups: dict[tuple, list[int]] = {}
    for index, one in enumerate(machine.collectives):
        if state.started >> index & 1 or one.earliest > state.position:
            continue
        if index in machine.fixed:
            groups.setdefault(("fixed", machine.fixed[index]), list(machine.fixed[index]))
        elif all(state.waited >> other & 1 for other in one.after):
            key = ("alone", index) if one.merge_key is None else ("merged", one.merge_key)
            groups.setdefault(key, []).append(index)
    for (how, *_), members in groups.items():
        smallest = len(members) if how == "fixed" else 1
        for size in range(smallest, len(members) + 1):
            for chosen in itertools.combinations(members, size):
                yield machine.bucket(chosen)


def _key(state: State) -> tuple:
    flights = tuple(sorted(flight.bucket.mask for flight in state.flights))
    return state.started, state.waited, flights, tuple(sorted(state.linked))


def _clocks(state: State) -> tuple[float, ...]:
    """The times of a state that dominance compares.

    ``opens`` is left out. It never falls along a schedule. While the last collective of a queue is in flight, its
    end is compared; once it is waited for, the clock is past its end.
    """
    flights = sorted(state.flights, key=lambda flight: flight.bucket.mask)
    return (state.seconds, *state.free, *(flight.finish for flight in flights))


class _ToCome:
    """The least time that all collectives still to start take, however they are merged, as in the bounds; cached.

    Args:
        machine: of the problem.
        remaining: for each gap, the seconds of the tasks after it.
    """

    def __init__(self, machine: Machine, remaining: list[float]) -> None:
        self._ones, self._remaining, self._prices = machine.collectives, remaining, machine.problem.prices
        self._alone = [machine.bucket((index,)) for index in range(len(self._ones))]
        self._keys: list[tuple] = [one.merge_key or (index,) for index, one in enumerate(self._ones)]
        lanes: dict[tuple, list[Collective]] = {}
        for key, one in zip(self._keys, self._ones, strict=True):
            lanes.setdefault(key, []).append(one)
        self._first = {key: ones[0] for key, ones in lanes.items()}
        self._work = {key: LeastWork(machine.problem, ones) for key, ones in lanes.items()}
        self._known: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def after(self, started: int) -> tuple[float, list[tuple[int, float]]]:
        """Seconds of the core, and for each queue the seconds from the first begin in it to the end of all."""
        found = self._known.get(started)
        if found is None:
            queues: dict[int, list[int]] = {}
            for index, alone in enumerate(self._alone):
                if not started >> index & 1:
                    queues.setdefault(alone.queue, []).append(index)
            seconds = [(queue, self._queue_seconds(members)) for queue, members in queues.items()]
            core = self._core_seconds([index for members in queues.values() for index in members])
            found = self._known[started] = core, seconds
        return found

    def _core_seconds(self, members: list[int]) -> float:
        num_bytes: dict[tuple, int] = {}
        for index in members:
            num_bytes[self._keys[index]] = num_bytes.get(self._keys[index], 0) + self._alone[index].num_bytes
        firsts = [(self._first[key], total) for key, total in num_bytes.items()]
        return sum(self._prices.core_seconds(one.kind, total, one.queue) for one, total in firsts)

    def _queue_seconds(self, members: list[int]) -> float:
        """The work of those that are read first, and the tasks after them; the smallest overlap counts once."""
        work: dict[tuple, float] = {}
        num_bytes: dict[tuple, int] = {}
        total = most = 0.0
        for index in sorted(members, key=lambda index: self._ones[index].deadline):
            key, alone = self._keys[index], self._alone[index]
            num_bytes[key] = num_bytes.get(key, 0) + alone.num_bytes
            known, moving = work.get(key, 0.0), alone.seconds - alone.overlapped_seconds
            work[key] = max(known, moving, self._work[key].least(num_bytes[key]))
            total += work[key] - known
            most = max(most, total + self._remaining[self._ones[index].deadline])
        return most + min(self._alone[index].overlapped_seconds for index in members)


class _Exploration:
    def __init__(self, machine: Machine, below_seconds: float, max_states: int) -> None:
        self._machine = machine
        self._below = below_seconds
        self._max_states = max_states
        self._seen = 0
        self._waits_may_help = machine.budget_bytes is not None or any(machine.limits.values())
        self._remaining = list(itertools.accumulate(reversed(machine.task_seconds), initial=0.0))[::-1]
        self._alone = [machine.bucket((index,)) for index in range(len(machine.collectives))]
        self._to_come = _ToCome(machine, self._remaining)
        #: Whether a start may be put off to the next gap: it then takes no memory, nor a place, that another wants.
        self._starts_may_wait = not self._waits_may_help and not machine.prefetched
        copy_seconds = machine.problem.prices.copy_seconds
        pairs = list(zip(machine.collectives, self._alone, strict=True))
        #: The most that each adds to the clock, in the gap where it starts and where it is waited for.
        self._start_costs = [
            alone.start_seconds + alone.core_seconds + (copy_seconds(one.in_bytes) if one.merge_key else 0.0)
            for one, alone in pairs
        ]
        self._ends_after = [
            alone.seconds
            + alone.spread_seconds
            + alone.wait_seconds
            + (copy_seconds(one.out_bytes) if one.merge_key and not one.views_result else 0.0)
            for one, alone in pairs
        ]

    def run(self) -> list[Step] | None:
        arrivals = [self._machine.begin()]
        found: State | None = None
        for position in range(self._machine.end + 1):
            table: dict[tuple, list[tuple[tuple[float, ...], State]]] = {}
            leaving: dict[tuple, list[tuple[tuple[float, ...], State]]] = {}
            pending = deque(state for state in arrivals if self._enter(table, state))
            while pending:
                state = pending.popleft()
                if not any(state is known for _, known in table[_key(state)]):
                    continue  # a better one has come since
                if self._machine.is_done(state) and state.seconds < self._below:
                    self._below, found = state.seconds, state
                for following in self._following(state):
                    self._seen += 1
                    if self._seen > self._max_states:
                        raise TooLargeError
                    if following.position > position:
                        self._enter(leaving, following)
                    elif self._enter(table, following):
                        pending.append(following)
            arrivals = [state for states in leaving.values() for _, state in states]
        return None if found is None else found.steps()

    def _enter(self, table: dict[tuple, list[tuple[tuple[float, ...], State]]], state: State) -> bool:
        """Adds a state, unless it cannot be better than what is known."""
        if self._least_seconds(state) >= self._below:
            return False
        entries = table.setdefault(_key(state), [])
        clocks = _clocks(state)
        if any(all(map(operator.le, other, clocks)) for other, _ in entries):
            return False
        entries[:] = [entry for entry in entries if not all(map(operator.le, clocks, entry[0]))]
        entries.append((clocks, state))
        return True

    def _least_seconds(self, state: State) -> float:
        """A lower bound on the end of every schedule that goes on from here.

        It assumes that collectives alone are no slower than merged.
        """
        core, to_do = self._to_come.after(state.started)
        least = state.seconds + self._remaining[state.position] + state.owed_seconds + core
        for flight in state.flights:
            tail = self._remaining[flight.bucket.deadline] + flight.bucket.wait_seconds
            least = max(least, flight.finish + tail)
        for queue, seconds in to_do:
            least = max(least, max(state.seconds, state.opens[queue]) + seconds)
        for index, one in enumerate(self._machine.collectives):
            if not state.started >> index & 1:
                alone = self._alone[index]
                began = self._machine.begins(alone, state.seconds + one.before_seconds, state)
                least = max(least, began + alone.seconds + self._remaining[one.deadline])
        return least * (1 - 1e-12)

    def _following(self, state: State) -> Iterator[State]:
        machine = self._machine
        for flight in state.flights:
            is_over = flight.latest <= state.seconds and not flight.bucket.wait_seconds
            closed = machine.wait(state, flight) if is_over and not machine.prefetched else None
            if closed is not None and closed.held_bytes <= state.held_bytes:
                yield closed
                return
        onward = machine.run(state) if state.position < machine.end else None
        if onward is not None:
            yield onward
        due = machine.must_wait(state)
        for bucket in possible_buckets(machine, state):
            if onward is not None and self._can_be_later(state, bucket):
                continue
            if (following := machine.start(state, bucket)) is not None:
                yield following
        for flight in state.flights:
            is_needed = flight.bucket.mask & due or self._feeds_another(flight)
            may_help = self._waits_may_help or is_needed or flight.bucket.wait_seconds
            following = machine.wait(state, flight) if may_help else None
            if following is not None:
                yield following

    def _can_be_later(self, state: State, bucket: Bucket) -> bool:
        """Whether a bucket that starts in the next gap begins no later, and so does all that starts after it.

        Its queue is then busy until the next gap, and for longer than everything takes that may start in this gap,
        so what follows in its queue starts in the next gap too. What waits for a collective of the same queue that
        starts here waits for longer than the task takes, which may run before it.
        """
        if not self._starts_may_wait:
            return False
        begins = self._machine.begins(bucket, 0.0, state)
        task = self._machine.task_seconds[state.position]
        return begins >= state.seconds + task and begins >= self._end_of_gap(state, bucket.queue) + task

    def _end_of_gap(self, state: State, queue: int) -> float:
        """The latest end of the steps of this gap that do not wait for another step of ``queue``.

        Only collectives that feed another one are waited for here: all other waits are no worse in the next gap. It
        assumes that copies, and what collectives take of the core and of their queues, are no more in a bucket than
        one by one.
        """
        machine, end, work = self._machine, state.seconds, 0.0
        ready = [
            index
            for index, one in enumerate(machine.collectives)
            if one.earliest <= state.position and not state.started >> index & 1
        ]
        for flight in state.flights:
            if self._feeds_another(flight):
                end = max(end, flight.latest)
                work += flight.bucket.wait_seconds
        elsewhere = [index for index in ready if self._alone[index].queue != queue]
        if any(index in machine.dependents for index in elsewhere):
            end = max(end, *state.free)
            work += sum(self._ends_after[index] for index in elsewhere)
        return end + work + sum(self._start_costs[index] for index in ready)

    def _feeds_another(self, flight: Flight) -> bool:
        return any(index in self._machine.dependents for index in flight.bucket.members) or any(
            first & flight.bucket.mask for first, _ in self._machine.prefetched
        )
