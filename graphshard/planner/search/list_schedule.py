"""A schedule in one pass: whenever a link would run dry, a rule says what it carries next.

Where a link is busy almost all the time and compute also waits for collectives of another group (tensor
parallelism), the estimates of a beam's states tie, and the beam lets the link rest. This pass estimates nothing. It
walks through the gaps. In each gap,

- a collective that is read before it can end starts at once;
- a link that would be idle before the next gap takes the reductions that are ready, unless the gathers after them
  would then be late. Otherwise it takes the next gathers, in the order of their readers, as many merged as still
  arrive in time.

This is list scheduling (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied
Mathematics 17, 1969) with due dates for gathers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .bound import expected_clock
from .machine import Bucket, Machine, State, Step
from .problem import Problem

#: How many of the gathers that follow are checked before a reduction goes first.
NUM_FOLLOWING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How to choose what a link carries next.

    Attributes:
        num_gathers, num_reductions: the most that are merged.
    """

    num_gathers: int
    num_reductions: int


def schedule_in_turn(problem: Problem, rule: Rule, *, machine: Machine | None = None) -> list[Step] | None:
    """The steps of the schedule that a rule gives; None if the budget or a limit stops it.

    A fixed bucket counts as one collective. Prefetches are not supported: with any, the result is None.

    Args:
        problem: what is planned.
        rule: what a link carries next.
        machine: a machine of this problem and its budget, if there is one already: it caches buckets.
    """
    if problem.prefetch:
        return None
    return _Pass(machine or Machine(problem, budget_bytes=problem.budget_bytes), rule).run()


class _Lane:
    """Collectives that may be merged, at most ``most`` of them, in the order in which they start.

    A fixed bucket stands there with its first member.
    """

    def __init__(self, machine: Machine, members: list[int], most: int) -> None:
        self._members, self._place = members, 0
        self.most = 1 if members[0] in machine.fixed else most
        self.queue = machine.queue_of(machine.collectives[members[0]])

    def next(self, state: State, most: int = 1) -> list[int]:
        """The next members that have not started."""
        while self._place < len(self._members) and state.started >> self._members[self._place] & 1:
            self._place += 1
        following = self._members[self._place : self._place + most]
        return [index for index in following if not state.started >> index & 1]


class _Pass:
    def __init__(self, machine: Machine, rule: Rule) -> None:
        self._machine = machine
        self._state = machine.begin()
        self._clock = expected_clock(machine.problem)
        ones = machine.collectives
        self._whole = [machine.fixed.get(index, (index,)) for index in range(len(ones))]
        self._earliest = [max(ones[other].earliest for other in whole) for whole in self._whole]
        self._deadline = [min(ones[other].deadline for other in whole) for whole in self._whole]
        lanes: dict[tuple, list[int]] = {}
        self._urgent: list[list[int]] = [[] for _ in range(machine.end + 1)]
        for index, one in enumerate(ones):
            if index != self._whole[index][0]:
                continue
            if one.limit != "gather" and self._deadline[index] < machine.end:
                self._urgent[self._earliest[index]].append(index)
            else:
                key = (one.limit == "gather", index in machine.fixed, one.merge_key or index)
                lanes.setdefault(key, []).append(index)
        gathers = [members for (is_gather, *_), members in lanes.items() if is_gather]
        others = [members for (is_gather, *_), members in lanes.items() if not is_gather]
        self._gathers = [
            _Lane(machine, sorted(each, key=lambda i: (self._deadline[i], i)), rule.num_gathers)
            for each in gathers
        ]
        self._reductions = [
            _Lane(machine, sorted(each, key=lambda i: (self._earliest[i], i)), rule.num_reductions)
            for each in others
        ]
        #: How long before it is read a gather should end.
        buckets = [self._bucket([index]) for each in gathers for index in each]
        self._margin = max((one.seconds + one.spread_seconds for one in buckets), default=0.0)

    def run(self) -> list[Step] | None:
        machine = self._machine
        while True:
            position = self._state.position
            self._wait_for_ended()
            for index in self._urgent[position]:
                self._start([index])
            self._feed_links(self._end_of_task())
            if not self._meet_deadlines():
                return None
            if position == machine.end:
                return self._finish()
            onward = machine.run(self._state)
            if onward is None:
                return None
            self._state = onward

    def _bucket(self, members: Sequence[int]) -> Bucket:
        return self._machine.bucket(tuple(sorted(other for index in members for other in self._whole[index])))

    def _start(self, members: Sequence[int]) -> bool:
        following = self._machine.start(self._state, self._bucket(members))
        if following is not None:
            self._state = following
        return following is not None

    def _wait(self, flights_of: int) -> bool:
        """Waits for the first to end of the flights with one of these collectives; False if that is impossible."""
        flights = [flight for flight in self._state.flights if flight.bucket.mask & flights_of]
        if not flights:
            return False
        first = min(flights, key=lambda flight: (flight.finish, flight.bucket.members))
        following: State | None = self._machine.wait(self._state, first)
        if following is not None:
            self._state = following
        return following is not None

    def _wait_for_ended(self) -> None:
        """Waits for what has ended, except gathers: it holds memory, or another collective waits for it."""
        state = self._state
        ended = [f for f in state.flights if f.latest <= state.seconds and f.bucket.limit != "gather"]
        for flight in ended:
            self._wait(flight.bucket.mask)

    def _end_of_task(self) -> float:
        """The end of the task after this gap, if what it reads is in flight."""
        state, machine = self._state, self._machine
        if state.position == machine.end:
            return float("inf")
        due = machine.must_wait(state)
        finish = max((f.finish for f in state.flights if f.bucket.mask & due), default=0.0)
        return max(state.seconds, finish) + machine.task_seconds[state.position]

    def _feed_links(self, until: float) -> None:
        """Starts buckets on links that would be idle before ``until``."""
        while any(self._feed(queue) for queue, free in enumerate(self._state.free) if free < until):
            pass

    def _feed(self, queue: int) -> bool:
        """Starts a bucket on a link; False if there is none."""
        lanes = [lane for lane in self._reductions if lane.queue == queue]
        reductions = next(filter(None, map(self._ready, lanes)), [])
        gathers = [lane for lane in self._gathers if lane.queue == queue and lane.next(self._state)]
        if reductions:
            behind = self._free(queue) + self._bucket(reductions).seconds
            if not any(self._is_late(lane, behind) for lane in gathers):
                return self._start_some(reductions)
        choices = [self._in_time(lane) for lane in gathers]
        choices.sort(key=lambda members: self._needed(members[0]))
        return any(map(self._start_some, [*choices, reductions]))

    def _start_some(self, members: list[int]) -> bool:
        """Starts a bucket, or only the first of it if there is no room for all."""
        return bool(members) and (self._start(members) or self._start(members[:1]))

    def _free(self, queue: int) -> float:
        return max(self._state.free[queue], self._state.seconds)

    def _needed(self, index: int) -> float:
        """When a gather should have ended."""
        state = self._state
        ahead = self._clock[self._deadline[index]] - self._clock[state.position]
        return state.seconds + ahead - self._margin

    def _ready(self, lane: _Lane) -> list[int]:
        """The reductions of a lane that can start now."""
        ones, state = self._machine.collectives, self._state

        def is_ready(index: int) -> bool:
            after = [other for member in self._whole[index] for other in ones[member].after]
            return self._earliest[index] <= state.position and all(
                state.waited >> other & 1 for other in after
            )

        return list(itertools.takewhile(is_ready, lane.next(state, lane.most)))

    def _is_late(self, lane: _Lane, start: float) -> bool:
        """Whether gathers of a lane come too late if the first starts then."""
        following, most = lane.next(self._state, NUM_FOLLOWING), lane.most
        for first in range(0, len(following), most):
            start += self._bucket(following[first : first + most]).seconds
            if start > self._needed(following[first]):
                return True
        return False

    def _in_time(self, lane: _Lane) -> list[int]:
        """The next gather of a lane, and those after it that do not make it late."""
        members = lane.next(self._state, lane.most)
        start, needed = self._free(lane.queue), self._needed(members[0])
        count = 1
        while count < len(members) and start + self._bucket(members[: count + 1]).seconds <= needed:
            count += 1
        return members[:count]

    def _meet_deadlines(self) -> bool:
        """Starts what the task of this gap reads, and waits for it."""
        while due := self._machine.must_wait(self._state):
            wanted = self._with_what_comes_before(due)
            for index in range(wanted.bit_length()):
                if wanted >> index & 1:
                    self._start([index])
            if not self._wait(wanted):
                return False
        return True

    def _with_what_comes_before(self, due: int) -> int:
        """These collectives and those they come after, unless these are waited for."""
        for index in reversed(range(due.bit_length())):
            if due >> index & 1:
                for other in self._machine.collectives[index].after:
                    due |= 1 << other & ~self._state.waited
        return due

    def _finish(self) -> list[Step] | None:
        machine = self._machine
        while not machine.is_done(self._state):
            self._feed_links(float("inf"))
            if not self._wait(machine.all_mask):
                return None
        return self._state.steps()
