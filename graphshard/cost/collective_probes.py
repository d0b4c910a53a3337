"""Measures the collectives of a process group: alone, queued behind others, and the compute time they take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from .._compat import reduce_scatter_single, uses_gloo
from .._compat_gloo import gather_single, start_gather
from ..ir import EagerEmitter, emit_sum_of_exchange
from ..units import size_text, time_text
from .cards import LinkClass, MeasuredCollective
from .probes import ProbeSizes, Report, cold_product, say_nothing, typical

_EMIT = EagerEmitter()

#: Collectives in flight at once when shared latency is measured.
_AT_ONCE = 6

#: Sizes of gathers from which shared latency and spread are measured.
_NUM_USUAL = 3

#: Collectives of one kind in flight at once when queueing is measured, and at how many sizes: the largest usual size
#: and the next two.
_QUEUED = 3

_NUM_QUEUED_SIZES = 3

#: Calls in a row after a barrier. The first is not timed: right after a barrier ranks are in step, unlike in training.
_IN_A_ROW = 4

#: Ranks compute for about this long before each collective, as in training.
_APART_SECONDS = 0.01

#: Side of the matrices that ranks multiply before and during collectives.
_BLOCK_SIDE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CommProbe:
    """Measured entries of a card that describe a process group; the names are those of the card."""

    link: LinkClass
    collective_start_seconds: float
    overlapped_latency_seconds: float
    collective_spread_seconds: float
    comm_compute_seconds_per_byte: float


def slowest(device: torch.device, seconds: float, group: dist.ProcessGroup | None = None) -> float:
    found = torch.tensor(seconds, device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.item()


def probe_collectives(
    device: torch.device,
    sizes: ProbeSizes,
    *,
    report: Report = say_nothing,
    group: dist.ProcessGroup | None = None,
) -> CommProbe:
    """Measures a process group, by default that of all ranks. Each of its ranks calls it and gets the same numbers.

    - A time is the :func:`typical` one over calls and ranks. On a CPU each rank computes before and during the
      collective, as in training.
    - Where a collective takes longer queued behind others of its kind and size than alone, the longer time counts.
    - Link latency is the time of the smallest gather; bandwidth is the difference of the two largest.
    - The compute time that a collective takes, fixed and per byte, comes from a small and a large gather.
    - Several gathers at once give the part of latency that overlaps.
    """
    num_ranks, is_cpu = dist.get_world_size(group), device.type == "cpu"
    whole_sizes = list(dict.fromkeys(_whole(size, num_ranks) for size in sizes.collective_bytes))
    asked = [_Asked(op, size) for op in sizes.kinds for size in whole_sizes]
    # A device runs the collectives of a group one after the other, on one stream.
    several = [_Asked("all_gather", size, _AT_ONCE) for size in _usual(asked)] if is_cpu else []
    queued = _queued(asked) if is_cpu else []
    found = _timings([*asked, *several, *queued], device, sizes, group)
    at_once = [(found[replace(each, at_once=1)], found[each]) for each in several]
    shared, largest_usual = _overlapped_latency(at_once), _usual(asked)[-1]
    known = {each: shared if is_cpu and each.num_bytes <= largest_usual else None for each in asked}
    timings = {
        op: {each.num_bytes: _behind_others(each, found, known[each]) for each in asked if each.op == op}
        for op in sizes.kinds
    }
    for op, of_sizes in timings.items():
        shown = (f"{size_text(size)} {time_text(timing.seconds)}" for size, timing in of_sizes.items())
        report(f"{op}: " + ", ".join(shown))
    gathers = timings["all_gather"]
    rows = tuple(
        MeasuredCollective(
            op=each.op,
            num_ranks=num_ranks,
            num_bytes=each.num_bytes,
            seconds=timings[each.op][each.num_bytes].seconds,
            overlapped_seconds=_overlapped(
                each, timings[each.op][each.num_bytes].seconds, found, known[each]
            ),
        )
        for each in asked
    )
    (less, soon), (more, late) = [(size, timing.seconds) for size, timing in gathers.items()][-2:]
    usual = max(len(whole_sizes) - 2, 1)  # the largest is larger than buckets are
    small, large = whole_sizes[0], whole_sizes[usual]
    start = gathers[small].lost_seconds
    of_bytes = gathers[large].lost_seconds - start if is_cpu else 0.0
    core_seconds = max(of_bytes, 0.0) / (large - small)
    moved = (num_ranks - 1) / num_ranks
    bandwidth = moved * (more - less) / (late - soon) if late > soon else moved * more / late
    latency = max(gathers[small].seconds - start, 1e-7) / (num_ranks - 1)
    return CommProbe(
        link=LinkClass(latency_seconds=latency, bandwidth=bandwidth, efficiency=1.0, measured=rows),
        collective_start_seconds=start,
        overlapped_latency_seconds=shared,
        collective_spread_seconds=_spread([one for one, _ in at_once]),
        comm_compute_seconds_per_byte=core_seconds,
    )


def _usual(asked: Sequence[_Asked]) -> Sequence[int]:
    """Up to three sizes that buckets have: all but the smallest and the largest, if there are others."""
    some = [each.num_bytes for each in asked if each.op == "all_gather"]
    return (some[1:-1] or some)[:_NUM_USUAL]


def _queued(asked: Sequence[_Asked]) -> list[_Asked]:
    """For each kind, several collectives at once, at the largest usual size and the next two."""
    sizes = sorted({each.num_bytes for each in asked})
    first = sizes.index(_usual(asked)[-1])
    chosen = sizes[first : first + _NUM_QUEUED_SIZES]
    return [replace(each, at_once=_QUEUED) for each in asked if each.num_bytes in chosen]


def _behind_others(asked: _Asked, found: Mapping[_Asked, _Timing], shared: float | None) -> _Timing:
    """The timing of a collective alone, or, if each of several adds more time, that time plus the ``shared`` latency.

    A link that lets some bytes through at once after a pause (a token bucket) is faster alone than in a step.
    """
    one, several = found[asked], found.get(replace(asked, at_once=_QUEUED))
    if several is None or (added := _added(one, several, _QUEUED)) <= one.seconds:
        return one
    return replace(one, seconds=added + (shared or 0.0))


def _added(one: _Timing, several: _Timing, num: int) -> float:
    """Seconds that each of ``num`` collectives at once adds, without the first."""
    return (several.seconds - one.seconds) / (num - 1)


def _overlapped(
    asked: _Asked, seconds: float, found: Mapping[_Asked, _Timing], shared: float | None
) -> float | None:
    """Seconds of a collective that overlap with the previous one; None if not measured.

    Args:
        asked: the collective and its size.
        seconds: its time alone.
        found: all timings.
        shared: for usual sizes the mean over sizes, which is less noisy than one size; None for other sizes.
    """
    several = found.get(replace(asked, at_once=_QUEUED))
    if shared is None and several is not None:
        shared = seconds - _added(found[asked], several, _QUEUED)
    return None if shared is None else min(shared, seconds)


def _spread(gathers: Sequence[_Timing]) -> float:
    """Half-width, in seconds, of the uniform distribution of end times of usual gathers; the mean over sizes.

    End times vary because ranks are not in step and the system decides which thread runs first. The mean deviation of
    a uniform distribution is half of its half-width.
    """
    return 2 * _mean([timing.deviation_seconds for timing in gathers])


def _overlapped_latency(gathers: Sequence[tuple[_Timing, _Timing]]) -> float:
    """Seconds of a usual gather that overlap with the previous one; the mean over sizes.

    ``gathers`` holds the timings of one alone and of several at once, for each size.
    """
    found = [one.seconds - _added(one, several, _AT_ONCE) for one, several in gathers]
    return max(_mean(found), 0.0)


def _mean(values: Sequence[float]) -> float:
    """The mean; 0 of an empty sequence."""
    return sum(values) / max(len(values), 1)


def _whole(num_bytes: int, num_ranks: int) -> int:
    """``num_bytes`` rounded down to float32 values that divide evenly over the ranks."""
    each = 4 * num_ranks
    return max(num_bytes // each, 1) * each


@dataclass(frozen=True, slots=True)
class _Asked:
    """A measurement to make: ``at_once`` collectives in flight, each with ``num_bytes`` in its larger tensor."""

    op: str
    num_bytes: int
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class _Collective:
    """A collective as compiled graphs run it.

    Attributes:
        start: issues it.
        finish: computes what always follows its end.
    """

    start: Callable[[], dist.Work]
    finish: Callable[[], object] = lambda: None


def _collective(
    op: str, num_bytes: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> _Collective:
    """A collective whose larger tensor has ``num_bytes``."""
    num_ranks = dist.get_world_size(group)
    whole = torch.ones(num_bytes // 4, device=device, dtype=torch.float32)
    part = torch.ones(whole.numel() // num_ranks, device=device, dtype=torch.float32)
    received, reduced = torch.empty_like(whole), torch.empty_like(part)  # memory is new in a step, too
    exchange = partial(dist.all_to_all_single, received, whole, group=group, async_op=True)
    if op == "reduce_scatter" and device.type == "cpu" and uses_gloo(group or dist.group.WORLD):
        # As the pass exchange_reductions lowers it.
        return _Collective(exchange, partial(emit_sum_of_exchange, _EMIT, received, "sum", num_ranks))
    starts = {
        "all_gather": partial(start_gather, received, part, group or dist.group.WORLD),
        "reduce_scatter": partial(reduce_scatter_single, reduced, whole, group=group, async_op=True),
        "all_reduce": partial(dist.all_reduce, whole, group=group, async_op=True),
        "all_to_all": exchange,
        "broadcast": partial(dist.broadcast, whole, group=group, group_src=0, async_op=True),
    }
    return _Collective(starts[op])


class _Beside:
    """Times collectives; beside those of gloo it computes, since gloo's threads share the core with compute."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._is_beside = device.type == "cpu" and uses_gloo(group or dist.group.WORLD)
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        # Short blocks: a collective that ends within a block is seen to end with the block.
        self._block = cold_product(device, torch.float32, _BLOCK_SIDE) if self._is_beside else lambda: None

    def seconds(self, collectives: Sequence[_Collective]) -> tuple[float, float]:
        """Seconds from the start of the first collective to the end of all, and the compute seconds lost in between.

        The loss is at least the time to start them: other work on the machine that ends meanwhile is no gain.
        """
        alone = self._block_seconds() if self._is_beside else 0.0
        self._synchronize()
        begin = time.perf_counter()
        works = [collective.start() for collective in collectives]
        lost = started = time.perf_counter() - begin
        if self._is_beside:
            ends, blocks = [work.get_future() for work in works], 0
            while not all(end.done() for end in ends):
                self._block()
                blocks += 1
            lost = time.perf_counter() - begin - blocks * alone
        for work, collective in zip(works, collectives, strict=True):
            work.wait()
            collective.finish()
        self._synchronize()
        return time.perf_counter() - begin, max(lost, started)

    def _block_seconds(self) -> float:
        begin, blocks = time.perf_counter(), 0
        while time.perf_counter() - begin < _APART_SECONDS:
            self._block()
            blocks += 1
        return (time.perf_counter() - begin) / blocks


@dataclass(frozen=True, slots=True)
class _Timing:
    """Times of one measurement, over all its calls and ranks.

    Attributes:
        seconds: the :func:`typical` time from start to end.
        deviation_seconds: the mean deviation from it.
        lost_seconds: the :func:`typical` compute time lost.
    """

    seconds: float
    deviation_seconds: float
    lost_seconds: float


def _timings(
    asked: Sequence[_Asked],
    device: torch.device,
    sizes: ProbeSizes,
    group: dist.ProcessGroup | None = None,
) -> dict[_Asked, _Timing]:
    """Measures each with :meth:`_Beside.seconds`, in turns, so that a slow spell of the machine falls on all of them.

    A turn is a row of calls without a barrier in between. Turns end with ``sizes.num_samples`` calls, or with enough
    seconds of them. Calls in a row matter because gloo sends both ways over one connection at once only while ranks are
    in step: a rank that starts later first sends, and only then asks for its part.
    """
    beside = _Beside(device, group)
    times: dict[_Asked, list[tuple[float, float]]] = {each: [] for each in asked}
    spent = dict.fromkeys(asked, 0.0)

    def is_short(one: _Asked) -> bool:
        return len(times[one]) < sizes.num_samples and spent[one] < sizes.enough_seconds

    began, next_end, turns = time.perf_counter(), 0.0, 0
    while next_end <= sizes.most_seconds and (turn := list(filter(is_short, asked))):
        for each in turn:
            dist.barrier(group)
            _, *row = [
                beside.seconds(
                    [_collective(each.op, each.num_bytes, device, group) for _ in range(each.at_once)]
                )
                for _ in range(_IN_A_ROW)
            ]
            times[each] += row
            # The same on all ranks.
            spent[each] += slowest(device, sum(seconds for seconds, _ in row), group)
        turns += 1
        if math.isfinite(sizes.most_seconds):
            next_end = slowest(device, time.perf_counter() - began, group) * (turns + 1) / turns
    return {each: _timing(rows, device, group) for each, rows in times.items()}


def _timing(
    times: Sequence[tuple[float, float]], device: torch.device, group: dist.ProcessGroup | None = None
) -> _Timing:
    own = torch.tensor(times, device=device, dtype=torch.float64)
    found = own.new_empty(dist.get_world_size(group) * len(own), 2)
    gather_single(found, own, group=group)
    all_seconds, all_lost = found.t().tolist()
    seconds = typical(all_seconds)
    deviation = typical([abs(each - seconds) for each in all_seconds])
    return _Timing(seconds=seconds, deviation_seconds=deviation, lost_seconds=typical(all_lost))
