"""A good schedule of a large problem: a beam search over gaps, in near-linear time.

Collectives that may be merged form a *lane*. Gathers stand in it in the order in which they are needed, reductions
in the order in which they are ready; a bucket is a run of its lane. Collectives whose time is mostly latency may
have a lane of their own, so that small ones are merged past large ones.

In each gap, each state that survived the gap before can start the next run of a lane, in one of a few lengths, or
nothing. A bucket that could not begin before the next gap does not start: it can start there. The search waits for
what the task of the gap reads, and for what has ended and holds memory.

Of the states that leave a gap, ``width`` are kept: those with the smallest estimate of the total time, ties broken
by memory. The estimate is the clock, plus the remaining compute, plus the largest delay that the collectives still
to start will cause even if no queue ever pauses.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...cost import behind_wait
from .machine import Bucket, Flight, Machine, State, Step
from .problem import Collective, Problem

#: How many gathers that follow in a lane set its margin: the longest of them makes gathers start earlier.
_NEAR = 16

#: Lengths of buckets to try. The rest of a block, and whole blocks, are tried as well.
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """The settings of a search.

    Attributes:
        width: states kept from gap to gap.
        splits_small: whether collectives that are mostly latency have lanes of their own.
        shared_by: the estimate prices each collective as its share of a bucket of so many like it.
        merges: whether buckets of more than one are tried.
        aligned: buckets end at multiples of this many in their lane; 0 to try several lengths.
    """

    width: int = 8
    splits_small: bool = False
    shared_by: int = 4
    merges: bool = True
    aligned: int = 0


def good_schedule(problem: Problem, beam: Beam, *, machine: Machine | None = None) -> list[Step] | None:
    """The steps of the best schedule found within the problem's budget; None if none is found.

    Args:
        problem: what is planned.
        beam: settings of the search.
        machine: a machine of this problem and its budget, if there is one already: it caches buckets.
    """
    return _Search(machine or Machine(problem, budget_bytes=problem.budget_bytes), beam).run()


def block_length(sizes: Sequence[int]) -> int:
    """The period of a sequence that mostly repeats; 0 if it does not repeat.

    The smallest distance at which four items in five are equal, tried up to a third of the sequence.
    """
    for length in range(1, len(sizes) // 3 + 1):
        equal = sum(map(int.__eq__, sizes, itertools.islice(sizes, length, None)))
        if equal >= 0.8 * (len(sizes) - length):
            return length
    return 0


class _Lane:
    """Collectives that may be merged, in order, and what the rest of them costs from each on."""

    def __init__(self, machine: Machine, members: list[int], elapsed: list[float], beam: Beam) -> None:
        ones = [machine.collectives[index] for index in members]
        self.members = members
        self.mask = sum(1 << index for index in members)
        self.queue = machine.queue_of(ones[0])
        self.earliest = [one.earliest for one in ones]
        self.deadline = [one.deadline for one in ones]
        self.is_merged = ones[0].merge_key is not None and beam.merges
        self.fixed = [machine.fixed.get(index) for index in members]
        self.latest = list(itertools.accumulate(self.earliest, max))
        fixed_places = [place for place, bucket in enumerate(self.fixed) if bucket is not None]
        self.until_fixed = [
            next((place for place in fixed_places if place >= start), len(ones)) for start in range(len(ones))
        ]
        self.block = block_length([one.num_bytes for one in ones]) if self.is_merged else 0
        shares = [
            _share(machine, one, beam.shared_by) if whole is None else _share_of(machine.bucket(whole))
            for one, whole in zip(ones, self.fixed, strict=True)
        ]
        alone = [machine.bucket((index,)) for index in members]
        self.is_gather = ones[0].limit == "gather"
        seconds = [one.seconds for one in alone]
        #: The smallest overlap of a member with the collective in front of it.
        self.least_overlap = min(one.overlapped_seconds for one in alone)
        #: For each place: how long before they are missed gathers from there on may start.
        spread = max(one.spread_seconds for one in alone)
        self.margin = [2 * max(seconds[place : place + _NEAR]) + spread for place in range(len(ones))]
        total = sum(one.in_bytes for one in ones)
        prices, first = machine.problem.prices, ones[0]
        self.most_costs = sum(one.before_seconds for one in ones) + (
            prices.copy_seconds(total) if self.is_merged else 0.0
        )
        moved = sum(one.num_bytes for one in ones)
        self.most_costs += prices.core_seconds(first.kind, moved, first.queue)
        self.work = [0.0, *itertools.accumulate(shares)]
        #: For each place: the largest delay that members from there on cause, less what the clocks say.
        self.lag = [float("-inf")] * (len(ones) + 1)
        for place in range(len(ones) - 1, -1, -1):
            own = self.work[place + 1] - elapsed[self.deadline[place]]
            self.lag[place] = max(own, self.lag[place + 1])

    def next_place(self, state: State) -> int:
        return (state.started & self.mask).bit_count()


def _share(machine: Machine, one: Collective, shared_by: int) -> float:
    """How long a collective keeps its queue busy as a part of a bucket of ``shared_by`` like it."""
    count = shared_by if one.merge_key is not None else 1
    prices, size = machine.problem.prices, count * one.num_bytes
    seconds = prices.collective_seconds(one.kind, size, one.queue)
    return (seconds - prices.overlapped_seconds(one.kind, size, one.queue)) / count


def _share_of(bucket: Bucket) -> float:
    """How long one member of a fixed bucket keeps its queue busy."""
    return (bucket.seconds - bucket.overlapped_seconds) / len(bucket.members)


class _Search:
    def __init__(self, machine: Machine, beam: Beam) -> None:
        self._machine, self._beam = machine, beam
        self._elapsed = [0.0, *itertools.accumulate(machine.task_seconds)]
        self._total = self._elapsed[-1]
        self._lanes = [_Lane(machine, members, self._elapsed, beam) for members in self._lane_members()]
        self._buckets: dict[tuple[int, int, int], list[Bucket]] = {}

    def _lane_members(self) -> list[list[int]]:
        lanes: dict[tuple, list[int]] = {}
        for index, one in enumerate(self._machine.collectives):
            key: tuple = ("alone", index) if one.merge_key is None else ("merged", one.merge_key)
            if index in self._machine.fixed:
                key = ("fixed", one.merge_key or index)
            elif one.merge_key is not None and self._beam.splits_small:
                key = (*key, self._is_small(one))
            lanes.setdefault(key, []).append(index)
        collectives = self._machine.collectives
        first_need = [one.deadline for one in collectives]
        last_ready = [one.earliest for one in collectives]
        for bucket in self._machine.fixed.values():
            for index in bucket:
                first_need[index] = min(collectives[other].deadline for other in bucket)
                last_ready[index] = max(collectives[other].earliest for other in bucket)
        for members in lanes.values():
            members.sort(key=lambda i: (first_need[i], last_ready[i], self._machine.fixed.get(i, ()), i))
        return list(lanes.values())

    def _is_small(self, one: Collective) -> bool:
        """Whether most of its time does not depend on its size."""
        price = self._machine.problem.prices.collective_seconds
        return price(one.kind, 2 * one.num_bytes, one.queue) < 1.5 * price(one.kind, one.num_bytes, one.queue)

    def run(self) -> list[Step] | None:
        machine = self._machine
        kept = [machine.begin()]
        for position in range(machine.end + 1):
            leaving: dict[tuple, State] = {}
            standing = kept
            while standing:  # one more step in this gap each time
                following: dict[tuple, State] = {}
                for state in standing:
                    if machine.is_done(state):
                        _keep(leaving, state)
                    for after in self._following(state):
                        _keep(leaving if after.position > position else following, after)
                standing = self._best(list(following.values()))
            kept = self._best(list(leaving.values()))
            if not kept:
                return None
        return min(kept, key=lambda state: (state.seconds, state.peak_bytes)).steps()

    def _best(self, states: list[State]) -> list[State]:
        if len(states) <= self._beam.width:
            return states
        ranked = sorted((self._rank(state), place) for place, state in enumerate(states))
        return [states[place] for _, place in ranked[: self._beam.width]]

    def _rank(self, state: State) -> tuple[float, int, int]:
        settled = state.held_bytes - sum(
            flight.held_bytes - flight.bucket.kept_bytes
            for flight in state.flights
            if flight.bucket.limit != "gather"
        )
        return float(f"{self._estimate(state):.6g}"), settled, state.peak_bytes

    def _estimate(self, state: State) -> float:
        """A lower estimate of the time at which everything is over."""
        elapsed = self._elapsed[state.position]
        ahead = state.seconds - elapsed  # from the tasks' own time to the clock
        delay = 0.0
        for flight in state.flights:
            needed = ahead + self._elapsed[flight.bucket.deadline]
            if flight.latest > needed + delay:
                delay = max(delay, behind_wait(needed, flight.finish, flight.bucket.spread_seconds) - needed)
        work = [0.0] * len(state.free)
        for lane in self._lanes:
            place = lane.next_place(state)
            if place == len(lane.members):
                continue
            free = max(state.free[lane.queue], state.seconds + lane.least_overlap)
            delay = max(delay, free - lane.work[place] + lane.lag[place] - ahead)
            work[lane.queue] += lane.work[-1] - lane.work[place]
        least = state.seconds + self._total - elapsed + state.owed_seconds + delay
        for free, rest in zip(state.free, work, strict=True):
            if rest:
                least = max(least, max(free, state.seconds) + rest)
        return least

    def _following(self, state: State) -> Iterator[State]:
        machine = self._machine
        for flight in state.flights:
            if flight.latest <= state.seconds and flight.bucket.limit != "gather" and not machine.prefetched:
                closed = machine.wait(state, flight)
                if closed is not None and closed.held_bytes <= state.held_bytes:
                    yield closed
                    return
        onward = machine.run(state) if state.position < machine.end else None
        if onward is not None:
            yield onward
        due = machine.must_wait(state)
        horizon = onward.seconds if onward is not None else self._horizon(state, due)
        urgent = bool(due & ~state.started)
        is_stuck = onward is None and not due
        for lane in self._lanes:
            if not (urgent or is_stuck) and self._can_be_later(lane, state, horizon):
                continue
            for bucket in self._next_buckets(lane, state, urgent):
                costs = bucket.start_seconds + bucket.copy_in_seconds + bucket.core_seconds
                is_now = urgent or is_stuck or machine.begins(bucket, 0.0, state) < horizon + costs
                following = machine.start(state, bucket) if is_now else None
                if following is not None:
                    yield following
        flights = [flight for flight in state.flights if is_stuck or flight.bucket.mask & due]
        if not flights and urgent:  # a limit, memory or another collective may be in the way
            flights = list(state.flights)
        yield from self._earliest_waits(state, flights)

    def _can_be_later(self, lane: _Lane, state: State, horizon: float) -> bool:
        """Whether a lane can start its next bucket later: nobody will miss it for a while, or its queue is busy."""
        place = lane.next_place(state)
        if place == len(lane.members):
            return True
        if state.opens[lane.queue] >= horizon + lane.most_costs:
            return True
        if not lane.is_gather:
            return False
        ahead = state.seconds - self._elapsed[state.position]
        free = max(state.free[lane.queue], horizon + lane.least_overlap)
        return free - lane.work[place] + lane.lag[place] - ahead + lane.margin[place] < 0.0

    def _earliest_waits(self, state: State, flights: list[Flight]) -> Iterator[State]:
        for flight in sorted(flights, key=lambda flight: (flight.finish, flight.bucket.members)):
            if (following := self._machine.wait(state, flight)) is not None:
                yield following
                return

    def _horizon(self, state: State, due: int) -> float:
        """The end of the task after this gap, as far as the collectives in flight tell."""
        flights = [flight for flight in state.flights if flight.bucket.mask & due] if due else []
        seconds = state.seconds
        if flights:
            seconds = max(seconds, *(flight.finish for flight in flights))
            seconds += sum(flight.bucket.wait_seconds for flight in flights)
        is_end = state.position == self._machine.end
        return float("inf") if is_end else seconds + self._machine.task_seconds[state.position]

    def _next_buckets(self, lane: _Lane, state: State, urgent: bool) -> Sequence[Bucket]:
        place = lane.next_place(state)
        if place == len(lane.members) or lane.earliest[place] > state.position:
            return ()
        if urgent and lane.deadline[place] > state.position:
            return ()
        if (fixed := lane.fixed[place]) is not None:
            return (self._machine.bucket(fixed),)
        longest = 1
        if lane.is_merged:
            farthest = min(lane.until_fixed[place], place + LENGTHS[-1])
            longest = bisect_right(lane.latest, state.position, place, farthest) - place
        key = (lane.members[0], place, longest)
        found = self._buckets.get(key)
        if found is None:
            lengths = self._lengths(lane, place, longest)
            found = self._buckets[key] = [self._run_of(lane, place, length) for length in lengths]
        return found

    def _lengths(self, lane: _Lane, place: int, longest: int) -> list[int]:
        if not lane.is_merged:
            return [1]
        if self._beam.aligned:
            rest = self._beam.aligned - place % self._beam.aligned
            is_last = place + longest == len(lane.members)
            first = {1, 2} if place == 0 and lane.is_gather else set()
            return sorted({min(rest, longest), *first} if rest <= longest or is_last else first)
        wanted = {length for length in LENGTHS if length <= longest}
        if lane.block:
            rest = lane.block - place % lane.block
            wanted.update(rest + count * lane.block for count in range(4))
        elif lane.earliest[place]:
            wanted.add(longest)
        return sorted(length for length in wanted if length <= longest)

    def _run_of(self, lane: _Lane, place: int, length: int) -> Bucket:
        return self._machine.bucket(tuple(sorted(lane.members[place : place + length])))


def _keep(table: dict[tuple, State], state: State) -> None:
    """Adds a state, unless a known one that has done the same is no later."""
    key = (state.started, state.waited)
    known = table.get(key)
    is_no_better = (
        known is not None
        and state.seconds >= known.seconds
        and all(map(operator.ge, state.free, known.free))
        and all(map(operator.ge, state.opens, known.opens))
    )
    if not is_no_better:
        table[key] = state
