"""Measures this machine and its process group, and writes what it found as a hardware card.

Under torchrun the ranks it started are measured, each at work at the same time as the others;
otherwise ranks of gloo are spawned on this machine.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .._compat import gather_single, reduce_scatter_single, uses_gloo
from ..errors import CalibrationError
from ..ir import EagerEmitter, emit_sum_of_exchange
from .cards import COLLECTIVE_KINDS, HardwareCard, LinkClass, MeasuredCollective, load_card
from .probes import ComputeProbe, ProbeSizes, cold_product, probe_compute, say_nothing, typical

#: Environment that torchrun gives its ranks.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

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

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """What every rank is told to do.

    Attributes:
        out: file of the card; rank 0 writes it.
        device_type: "cpu" or "cuda".
        sizes: what to measure.
        num_threads: threads of each rank; 0 leaves torch's choice.
        like: a card that gives the links which were not measured; "" copies the measured ones.
    """

    out: Path
    device_type: str
    sizes: ProbeSizes
    num_threads: int = 0
    like: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommProbe:
    """What was measured of a process group; names as in the card."""

    link: LinkClass
    collective_start_seconds: float
    overlapped_latency_seconds: float
    collective_spread_seconds: float
    comm_compute_seconds_per_byte: float


def calibrate(
    job: CalibrationJob, *, num_ranks: int = 2, report: Report = say_nothing
) -> HardwareCard | None:
    """Measures and writes a card.

    Args:
        job: what to measure, and where the card goes.
        num_ranks: ranks of gloo to spawn, at least 2; ignored under torchrun.
        report: takes lines of progress.

    Returns:
        The card; None under torchrun on ranks other than 0.

    Raises:
        CalibrationError: the folder does not exist, the card would be a folder, too few ranks, several nodes with
            several ranks each, or a rank failed.
    """
    if not job.out.parent.is_dir():
        raise CalibrationError(f"no folder {job.out.parent} to write {job.out.name} to; make it first")
    if job.out.is_dir():
        raise CalibrationError(f"{job.out} is a folder: name the file of the card, {job.out / 'here.json'}")
    if is_launched():
        return _calibrate_launched(job, report)
    if num_ranks < 2:
        raise CalibrationError(f"collectives need at least 2 ranks, not {num_ranks}")
    if job.device_type != "cpu":
        raise CalibrationError("without torchrun only the CPU can be measured; start one rank per device")
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_spawned_rank, (num_ranks, str(Path(folder, "store")), job, report), num_ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise CalibrationError(f"a rank failed: {str(error).strip()}") from error
    return load_card(job.out)


def is_launched() -> bool:
    """True in a process that torchrun started."""
    return all(name in os.environ for name in _LAUNCHED)


def _calibrate_launched(job: CalibrationJob, report: Report) -> HardwareCard | None:
    if job.device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if job.device_type == "cuda" else "gloo")
    try:
        measure_group(job, int(os.environ["LOCAL_WORLD_SIZE"]), report)
        return load_card(job.out) if dist.get_rank() == 0 else None
    finally:
        if started:
            dist.destroy_process_group()


def _spawned_rank(rank: int, num_ranks: int, store: str, job: CalibrationJob, report: Report) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    measure_group(job, num_ranks, report)
    dist.barrier()
    dist.destroy_process_group()


def measure_group(job: CalibrationJob, local_ranks: int, report: Report = say_nothing) -> None:
    """Body of every rank of the default process group; rank 0 writes the card.

    Args:
        job: what to measure, and where the card goes.
        local_ranks: how many of the ranks are on one node: all, or one.
        report: takes lines of progress, on rank 0.

    Raises:
        CalibrationError: one rank, or several nodes with several ranks each.
    """
    num_ranks = dist.get_world_size()
    if 1 < local_ranks < num_ranks:
        raise CalibrationError(
            f"{num_ranks} ranks, {local_ranks} of them in a node: the times of such a group cannot be told "
            "apart into links; start the ranks of one node, or one rank on each node"
        )
    if num_ranks < 2:
        raise CalibrationError("collectives need at least 2 ranks; start more with --nproc-per-node")
    if job.num_threads:
        torch.set_num_threads(job.num_threads)
    device = torch.device(job.device_type, torch.cuda.current_device() if job.device_type == "cuda" else None)
    tell = report if dist.get_rank() == 0 else say_nothing
    slowest = partial(_slowest, device)
    compute = probe_compute(device, job.sizes, report=tell, together=dist.barrier, slowest=slowest)
    comm = probe_collectives(device, job.sizes, report=tell)
    if dist.get_rank() == 0:
        _card(job, compute, comm, local_ranks).save(job.out)
    dist.barrier()


def _slowest(device: torch.device, seconds: float) -> float:
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
            spent[each] += _slowest(device, sum(seconds for seconds, _ in row))  # the same on all ranks
    return {each: _timing(rows, device) for each, rows in times.items()}


def _timing(times: Sequence[tuple[float, float]], device: torch.device) -> _Timing:
    own = torch.tensor(times, device=device, dtype=torch.float64)
    found = own.new_empty(dist.get_world_size() * len(own), 2)
    gather_single(found, own)
    all_seconds, all_lost = found.t().tolist()
    seconds = typical(all_seconds)
    deviation = typical([abs(each - seconds) for each in all_seconds])
    return _Timing(seconds=seconds, deviation_seconds=deviation, lost_seconds=typical(all_lost))


def _card(job: CalibrationJob, compute: ComputeProbe, comm: CommProbe, local_ranks: int) -> HardwareCard:
    num_ranks = dist.get_world_size()
    values: dict[str, Any] = {each.name: getattr(compute, each.name) for each in fields(compute)}
    values |= {each.name: getattr(comm, each.name) for each in fields(comm) if each.name != "link"}
    if job.device_type == "cpu":
        values["memory_bytes"] = compute.memory_bytes // local_ranks
    source = f"measured by graphshard calibrate: {describe_machine(job.device_type)}"
    measured = "intra_node" if local_ranks > 1 else "inter_node"
    other = "inter_node" if local_ranks > 1 else "intra_node"
    like = load_card(job.like) if job.like else None
    links: dict[str, Any] = {
        measured: comm.link,
        other: getattr(like, other) if like else _without_rows(comm.link),
    }
    sources = dict.fromkeys((*values, measured), source)
    sources["efficiency.vector"] = "vector_flops is what a pointwise kernel reached"
    sources[other] = f"card {job.like}" if job.like else f"not measured; as {measured}"
    sources["ranks_per_node"] = "the ranks started on this machine"
    sources["device_type"] = "where it was measured"
    return HardwareCard(
        name=job.out.stem,
        summary=f"{describe_machine(job.device_type)}, {num_ranks} ranks of {dist.get_backend()}",
        device_type=job.device_type,
        ranks_per_node=local_ranks,
        sources=sources,
        **values,
        **links,
    )


def _without_rows(link: LinkClass) -> LinkClass:
    return LinkClass(
        latency_seconds=link.latency_seconds, bandwidth=link.bandwidth, efficiency=link.efficiency
    )


def describe_machine(device_type: str) -> str:
    """Processor or device, threads a rank and torch's version."""
    if device_type == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    threads = f"{torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "1 thread"
    return f"{model or platform.machine()}, {threads} a rank, torch {torch.__version__}"
