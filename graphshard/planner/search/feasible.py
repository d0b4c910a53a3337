"""Schedules that keep the user's constraints, for problems of which no search finds any.

Each fixed bucket, and each other collective alone, starts in one gap and is waited for in one. The rules and the
user constrain these gaps in three ways: one gap is no later than another; two are the same (a prefetch starts where
the other is waited for); or a gap lies between two numbers. Such a system of difference constraints has a solution
if the least and the greatest values that follow from it do not cross, and then either values are one (Cormen and
others, "Introduction to Algorithms"). Within a gap, waits come first. Limits and memory are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .machine import Step
from .problem import Problem


def constrained_schedules(problem: Problem) -> Iterator[list[Step]]:
    """Three schedules: all as late as possible; gathers late and the rest early; all early.

    Yields nothing if the constraints allow no schedule.
    """
    system = _System(problem)
    if system.is_solvable():
        for is_late in (lambda is_gather: True, lambda is_gather: is_gather, lambda is_gather: False):
            if (steps := system.steps(is_late)) is not None:
                yield steps


@dataclass(frozen=True, slots=True)
class _Event:
    """The start or the wait of a bucket."""

    bucket: int
    is_start: bool


class _System:
    def __init__(self, problem: Problem) -> None:
        ones = problem.collectives
        buckets = {tuple(sorted(bucket)) for bucket in problem.fixed_buckets}
        fixed = {index for bucket in buckets for index in bucket}
        self._buckets = sorted(buckets | {(index,) for index in range(len(ones)) if index not in fixed})
        self._is_gather = [ones[bucket[0]].limit == "gather" for bucket in self._buckets]
        place = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        numbers = range(len(self._buckets))
        self._events = [_Event(number, is_start) for number in numbers for is_start in (True, False)]
        #: For each event, those that come after it: later in the order of steps, and in no earlier gap.
        self._behind: dict[_Event, list[_Event]] = {event: [] for event in self._events}
        for number in numbers:
            self._behind[_Event(number, True)].append(_Event(number, False))
        pairs = [(other, index) for index, one in enumerate(ones) for other in one.after]
        for first, then in (*pairs, *problem.prefetch):
            self._behind[_Event(place[first], False)].append(_Event(place[then], True))
        #: Prefetches: pairs of events in the same gap.
        self._tied = [
            (_Event(place[first], False), _Event(place[then], True)) for first, then in problem.prefetch
        ]
        earliest = [max(ones[index].earliest for index in bucket) for bucket in self._buckets]
        deadline = [min(ones[index].deadline for index in bucket) for bucket in self._buckets]
        self._least = {event: earliest[event.bucket] for event in self._events}
        self._most = {event: deadline[event.bucket] for event in self._events}
        self._raise(self._least)
        self._lower(self._most)

    def is_solvable(self) -> bool:
        """Whether there is a gap for each event."""
        return all(self._least[event] <= self._most[event] for event in self._events)

    def steps(self, is_late: Callable[[bool], bool]) -> list[Step] | None:
        """The steps with some events as late as possible, and the rest as early as these allow; None for a circle."""
        gaps = {
            event: (self._most if is_late(self._is_gather[event.bucket]) else self._least)[event]
            for event in self._events
        }
        self._raise(gaps)
        return self._in_order(gaps)

    def _raise(self, gaps: dict[_Event, int]) -> None:
        """Raises the values to the least that keep the constraints."""
        after = {event: list(behind) for event, behind in self._behind.items()}
        for one, other in self._tied:
            after[other].append(one)
        _settle(gaps, after, max)

    def _lower(self, gaps: dict[_Event, int]) -> None:
        """Lowers the values to the greatest that keep the constraints."""
        before: dict[_Event, list[_Event]] = {event: [] for event in self._events}
        for event, behind in self._behind.items():
            for other in behind:
                before[other].append(event)
        for one, other in self._tied:
            before[one].append(other)
        _settle(gaps, before, min)

    def _in_order(self, gaps: dict[_Event, int]) -> list[Step] | None:
        missing = dict.fromkeys(self._events, 0)
        for behind in self._behind.values():
            for event in behind:
                missing[event] += 1
        ready = [event for event in self._events if not missing[event]]
        steps = []
        while ready:
            event = min(ready, key=lambda each: (gaps[each], each.is_start, each.bucket))
            ready.remove(event)
            steps.append(Step(gaps[event], event.is_start, self._buckets[event.bucket]))
            for other in self._behind[event]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        return steps if len(steps) == len(self._events) else None


def _settle(
    gaps: dict[_Event, int], arrows: dict[_Event, list[_Event]], better: Callable[[int, int], int]
) -> None:
    """Propagates values along arrows until nothing changes; values move only towards ``better``."""
    pending = deque(gaps)
    while pending:
        event = pending.popleft()
        for other in arrows[event]:
            value = better(gaps[other], gaps[event])
            if value != gaps[other]:
                gaps[other] = value
                pending.append(other)
