"""Measures the collectives of a process group: alone, behind others of their kind, and what compute loses to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from .._compat import gather_single, reduce_scatter_single, uses_gloo
from ..ir import EagerEmitter, emit_sum_of_exchange
from .cards import COLLECTIVE_KINDS, LinkClass, MeasuredCollective
from .probes import ProbeSizes, Report, cold_product, say_nothing, typical

_EMIT = EagerEmitter()

#: So many collectives are under way when it is measured how they share their latency.
_AT_ONCE = 6

#: So many sizes of gathers tell that, and how far their times are spread.
_NUM_USUAL = 3

#: So many of a kind tell what one takes behind others, at so many sizes: the largest of those and the next two.
_QUEUED = 3

_NUM_QUEUED_SIZES = 3

#: So many calls in a row. The first is not timed: ranks have just met, and are in step as they never are in training.
_IN_A_ROW = 4

#: A collective whose timings add up to so much needs no more of them.
_ENOUGH_SECONDS = 1.5

#: Ranks compute for about so long before each collective, as in training.
_APART_SECONDS = 0.01

#: Then, and beside collectives, they multiply matrices of this side.
_BLOCK_SIDE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CommProbe:
    """What was measured of a process group; names as in the card."""

    link: LinkClass
    collective_start_seconds: float
    overlapped_latency_seconds: float
    collective_spread_seconds: float
    comm_compute_seconds_per_byte: float


def slowest(device: torch.device, seconds: float) -> float:
    found = torch.tensor(seconds, device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def probe_collectives(device: torch.device, sizes: ProbeSizes, *, report: Report = say_nothing) -> CommProbe:
    """Measures the default process group; every rank calls it and gets the same numbers.

    A time is the :func:`typical` of calls in rows and of ranks; on a CPU each rank computes before and meanwhile, as it
    does in training. Where one adds more behind others of its kind and size than it takes alone, that counts. Latency
    and bandwidth of the link come from the gathers: the smallest is all latency, and the two largest differ by
    bandwidth. So does what one takes of the core that computes: in all, and for each byte more. Several at a time tell
    how much of their latency passes side by side.
    """
    num_ranks, is_cpu = dist.get_world_size(), device.type == "cpu"
    asked = [_Asked(op, size) for op in COLLECTIVE_KINDS for size in map(_whole, sizes.collective_bytes)]
    # The stream of a device runs the collectives of a group one after the other.
    several = [_Asked("all_gather", size, _AT_ONCE) for size in _usual(asked)] if is_cpu else []
    queued = _queued(asked) if is_cpu else []
    found = _timings([*asked, *several, *queued], device, sizes.num_samples)
    at_once = [(found[replace(each, at_once=1)], found[each]) for each in several]
    shared, largest_usual = _overlapped_latency(at_once), _usual(asked)[-1]
    known = {each: shared if is_cpu and each.num_bytes <= largest_usual else None for each in asked}
    timings = {
        op: {each.num_bytes: _behind_others(each, found, known[each]) for each in asked if each.op == op}
        for op in COLLECTIVE_KINDS
    }
    for op, of_sizes in timings.items():
        shown = (f"{size} bytes {timing.seconds * 1e6:.0f} us" for size, timing in of_sizes.items())
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
    usual = max(len(sizes.collective_bytes) - 2, 1)  # the largest is larger than buckets are
    small, large = _whole(sizes.collective_bytes[0]), _whole(sizes.collective_bytes[usual])
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
    """Three sizes that buckets have: without the smallest and the largest, where there are others."""
    some = [each.num_bytes for each in asked if each.op == "all_gather"]
    return (some[1:-1] or some)[:_NUM_USUAL]


def _queued(asked: Sequence[_Asked]) -> list[_Asked]:
    """Several of each kind at once, of the largest usual size and the next two."""
    sizes = sorted({each.num_bytes for each in asked})
    first = sizes.index(_usual(asked)[-1])
    chosen = sizes[first : first + _NUM_QUEUED_SIZES]
    return [replace(each, at_once=_QUEUED) for each in asked if each.num_bytes in chosen]


def _behind_others(asked: _Asked, found: Mapping[_Asked, _Timing], shared: float | None) -> _Timing:
    """The timing of one alone; where each of several is seen to add more, that and what is ``shared`` with them.

    A link that lets some bytes through at once after a pause (a token bucket) is faster alone than in a step.
    """
    one, several = found[asked], found.get(replace(asked, at_once=_QUEUED))
    if several is None or (added := _added(one, several, _QUEUED)) <= one.seconds:
        return one
    return replace(one, seconds=added + (shared or 0.0))


def _added(one: _Timing, several: _Timing, num: int) -> float:
    """How much later ``num`` at once end for each beside the first."""
    return (several.seconds - one.seconds) / (num - 1)


def _overlapped(
    asked: _Asked, seconds: float, found: Mapping[_Asked, _Timing], shared: float | None
) -> float | None:
    """How much sooner each of several ends than one after the other; None where that was not measured.

    Args:
        asked: one, with its size.
        seconds: what it takes alone.
        found: all timings.
        shared: what is known of usual sizes, whose single times say less than their mean; None of others.
    """
    several = found.get(replace(asked, at_once=_QUEUED))
    if shared is None and several is not None:
        shared = seconds - _added(found[asked], several, _QUEUED)
    return None if shared is None else min(shared, seconds)


def _spread(gathers: Sequence[_Timing]) -> float:
    """Within how many seconds of their time usual gathers end, if evenly spread; the mean over sizes.

    Beside compute it is a lottery which thread the system lets run first, and ranks are not in step. Evenly spread
    times are half of that away from their mean, on average.
    """
    return 2 * _mean([timing.deviation_seconds for timing in gathers])


def _overlapped_latency(gathers: Sequence[tuple[_Timing, _Timing]]) -> float:
    """How much sooner each of several usual gathers ends than one after the other, the mean over sizes.

    Given are one, and several at once, for each size.
    """
    found = [one.seconds - _added(one, several, _AT_ONCE) for one, several in gathers]
    return max(_mean(found), 0.0)


def _mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / max(len(values), 1)


def _whole(num_bytes: int) -> int:
    """Bytes of floats that every rank has as many of."""
    each = 4 * dist.get_world_size()
    return max(num_bytes // each, 1) * each


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be timed: so many collectives at once, each with so many bytes in its larger tensor."""

    op: str
    num_bytes: int
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class _Collective:
    """A collective as compiled graphs run it.

    Attributes:
        start: issues it.
        finish: computes what follows its end at once.
    """

    start: Callable[[], dist.Work]
    finish: Callable[[], object] = lambda: None


def _collective(op: str, num_bytes: int, device: torch.device) -> _Collective:
    """One whose larger tensor has ``num_bytes``."""
    num_ranks = dist.get_world_size()
    whole = torch.ones(num_bytes // 4, device=device)
    part = torch.ones(whole.numel() // num_ranks, device=device)
    received, reduced = torch.empty_like(whole), torch.empty_like(part)  # memory is new in a step, too
    exchange = partial(dist.all_to_all_single, received, whole, async_op=True)
    if op == "reduce_scatter" and device.type == "cpu" and uses_gloo(dist.group.WORLD):
        # What the pass exchange_reductions makes of it.
        return _Collective(exchange, partial(emit_sum_of_exchange, _EMIT, received, "sum", num_ranks))
    starts = {
        "all_gather": partial(gather_single, received, part, async_op=True),
        "reduce_scatter": partial(reduce_scatter_single, reduced, whole, async_op=True),
        "all_reduce": partial(dist.all_reduce, whole, async_op=True),
        "all_to_all": exchange,
        "broadcast": partial(dist.broadcast, whole, 0, async_op=True),
    }
    return _Collective(starts[op])


class _Beside:
    """Compute to run beside a collective of gloo, whose threads and packets share the core with it."""

    def __init__(self, device: torch.device) -> None:
        self._is_beside = device.type == "cpu" and uses_gloo(dist.group.WORLD)
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        # Short ones: a collective that ends within a block seems to take until its end.
        self._block = cold_product(device, torch.float32, _BLOCK_SIDE) if self._is_beside else lambda: None

    def seconds(self, collectives: Sequence[_Collective]) -> tuple[float, float]:
        """From the start of the first collective to the end of all, and what compute lost in between.

        Never less than starting them took: work elsewhere on the machine that ends meanwhile is no gain.
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
    """Calls of collectives, of all ranks.

    Attributes:
        seconds: from start to end, of a :func:`typical` one.
        deviation_seconds: by how much the others are sooner or later, the mean.
        lost_seconds: what compute beside it loses, of a :func:`typical` one.
    """

    seconds: float
    deviation_seconds: float
    lost_seconds: float


def _timings(asked: Sequence[_Asked], device: torch.device, num_samples: int) -> dict[_Asked, _Timing]:
    """What :meth:`_Beside.seconds` measures of each, in turns, so that a slow spell of the machine falls on all.

    Each turn is a row of calls without a barrier in between, until there are ``num_samples``, or enough seconds of
    them. Over one connection gloo sends both ways at once only while ranks are in step: a rank that starts later
    sends at once, and asks for its part behind that.
    """
    beside = _Beside(device)
    times: dict[_Asked, list[tuple[float, float]]] = {each: [] for each in asked}
    spent = dict.fromkeys(asked, 0.0)
    while turn := [one for one in asked if len(times[one]) < num_samples and spent[one] < _ENOUGH_SECONDS]:
        for each in turn:
            dist.barrier()
            _, *row = [
                beside.seconds([_collective(each.op, each.num_bytes, device) for _ in range(each.at_once)])
                for _ in range(_IN_A_ROW)
            ]
            times[each] += row
            spent[each] += slowest(device, sum(seconds for seconds, _ in row))  # the same on all ranks
    return {each: _timing(rows, device) for each, rows in times.items()}


def _timing(times: Sequence[tuple[float, float]], device: torch.device) -> _Timing:
    own = torch.tensor(times, device=device, dtype=torch.float64)
    found = own.new_empty(dist.get_world_size() * len(own), 2)
    gather_single(found, own)
    all_seconds, all_lost = found.t().tolist()
    seconds = typical(all_seconds)
    deviation = typical([abs(each - seconds) for each in all_seconds])
    return _Timing(seconds=seconds, deviation_seconds=deviation, lost_seconds=typical(all_lost))
