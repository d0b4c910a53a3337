"""Small collectives merged before the search, so that a plan has few, large buckets.

On a GPU each collective costs the host a launch, and NCCL is slow for short messages. Prices have neither, and a copy
into a bucket costs time. So a search for the least predicted time leaves hundreds of collectives alone that a merge
would make slower by almost nothing. :func:`in_large_buckets` restricts a problem: its fixed buckets reach a least
size, a multiple of the size at which half of the time of a collective is latency.

The smallest piece is merged with the smaller one of its neighbours, in the order of need (gathers) or of readiness
(reductions), until all pieces reach the least size. A large parameter stays alone if all others reach it without
it, so little is copied.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from .problem import Problem

#: Least sizes that are tried, the largest first: multiples of the size at which half of the time is latency.
MULTIPLES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.25, 0.0625)


def in_large_buckets(problem: Problem) -> Iterator[Problem]:
    """The problem with its small collectives in fixed buckets, for each least size; equal ones once.

    Collectives that the user puts into buckets or prefetches stay as they are, as do those that compute reads soon.
    """
    free = _free(problem)
    pieces = [_Pieces(problem, members) for members in _lanes(problem, free)]
    restricted: list[tuple[tuple[int, ...], ...]] = []
    for multiple in reversed(MULTIPLES):
        for lane in pieces:
            lane.merge_up_to(multiple)
        buckets = [bucket for lane in pieces for bucket in lane.buckets()]
        buckets += _behind(problem, free, buckets)
        restricted.append(tuple(buckets))
    for fixed in dict.fromkeys(reversed(restricted)):
        if any(len(bucket) > 1 for bucket in fixed):
            yield replace(problem, fixed_buckets=(*problem.fixed_buckets, *fixed))


def _lanes(problem: Problem, free: Set[int]) -> list[list[int]]:
    """Collectives that may be merged, in the order of need or readiness; none that come after another."""
    lanes: dict[tuple[str, ...] | None, list[int]] = {}
    for index, one in enumerate(problem.collectives):
        if index in free and not one.after:
            lanes.setdefault(one.merge_key, []).append(index)
    ones = problem.collectives
    for members in lanes.values():
        is_gather = ones[members[0]].limit == "gather"
        members.sort(key=lambda index: (ones[index].deadline if is_gather else ones[index].earliest, index))
    return list(lanes.values())


def _free(problem: Problem) -> set[int]:
    """Collectives that may be merged and that no constraint of the user names."""
    named = {index for members in (*problem.fixed_buckets, *problem.prefetch) for index in members}
    return {
        index
        for index, one in enumerate(problem.collectives)
        if one.merge_key is not None and one.limit and index not in named
    }


def _behind(
    problem: Problem, free: Set[int], buckets: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Buckets of collectives that come after one other each (all-reduces): as those are, so that nothing is copied."""
    place = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    found: dict[tuple[tuple[str, ...] | None, int], list[int]] = {}
    for index, one in enumerate(problem.collectives):
        if len(one.after) == 1 and one.after[0] in place and index in free:
            found.setdefault((one.merge_key, place[one.after[0]]), []).append(index)
    ones = problem.collectives
    for members in found.values():
        if max(ones[i].earliest for i in members) <= min(ones[i].deadline for i in members):
            yield tuple(members)


class _Pieces:
    """The pieces of one lane: runs that are merged."""

    def __init__(self, problem: Problem, members: list[int]) -> None:
        ones = [problem.collectives[index] for index in members]
        self._members = [[index] for index in members]
        self._bytes = [one.num_bytes for one in ones]
        self._earliest, self._deadline = [one.earliest for one in ones], [one.deadline for one in ones]
        #: The piece in front of each, and behind each; -1 for none.
        self._front = list(range(-1, len(members) - 1))
        self._behind = [*range(1, len(members)), -1]
        self._heap = [(num_bytes, place) for place, num_bytes in enumerate(self._bytes)]
        heapq.heapify(self._heap)
        first, least, most = ones[0], min(self._bytes), sum(self._bytes)
        quick, slow = (
            problem.prices.collective_seconds(first.kind, size, first.queue) for size in (least, most)
        )
        rate = (slow - quick) / max(most - least, 1)
        #: The size at which half of the time is latency, from the least and the largest size that are possible.
        self._half = max(quick - rate * least, 0.0) / rate if rate > 0 else float(most)

    def merge_up_to(self, multiple: float) -> None:
        """Merges the smallest piece while it is below a multiple of the size at which half of the time is latency."""
        while self._heap and self._heap[0][0] < multiple * self._half:
            num_bytes, place = heapq.heappop(self._heap)
            if num_bytes != self._bytes[place] or not self._members[place]:
                continue  # it has grown, or is part of another
            sides = (self._front[place], self._behind[place])
            near = [(self._bytes[side], side) for side in sides if side >= 0 and self._fit(place, side)]
            if near:
                self._merge(*sorted((place, min(near)[1])))

    def buckets(self) -> list[tuple[int, ...]]:
        """The pieces, each in the order of its indices."""
        return [tuple(sorted(members)) for members in self._members if members]

    def _fit(self, one: int, other: int) -> bool:
        latest = max(self._earliest[one], self._earliest[other])
        return latest <= min(self._deadline[one], self._deadline[other])

    def _merge(self, first: int, then: int) -> None:
        self._members[first] += self._members[then]
        self._bytes[first] += self._bytes[then]
        self._earliest[first] = max(self._earliest[first], self._earliest[then])
        self._deadline[first] = min(self._deadline[first], self._deadline[then])
        self._members[then] = []
        self._behind[first] = self._behind[then]
        if self._behind[then] >= 0:
            self._front[self._behind[then]] = first
        heapq.heappush(self._heap, (self._bytes[first], first))
