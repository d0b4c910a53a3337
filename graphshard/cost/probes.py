"""Measures how fast this device multiplies, attends, streams and starts kernels; the results are entries of a card.

Probes run with or without a process group. ``together`` is called before each probe, so that ranks that share a machine
are measured while all of them work. ``slowest`` is called after it, since a step is as slow as its slowest rank.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .._compat import spin_gpu
from ..machine import largest_cache_bytes
from ..units import size_text
from .cards import COLLECTIVE_KINDS
from .curves import Curve
from .flops import causal_share
from .kernels import STEPS_OF

#: Takes lines of progress.
Report = Callable[[str], None]

#: Dtypes whose products are measured.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

#: Bytes of operands that products take turns on, more than a cache holds: in a step, too, operands of a product were
#: written a while ago.
_COLD_BYTES = {"cpu": 2**26, "cuda": 2**28}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSizes:
    """What is measured.

    Attributes:
        matmul: sides of square matrices.
        attention: sequence lengths.
        memory_bytes: bytes moved by streaming kernels.
        collective_bytes: bytes of the larger tensor of a collective.
        num_samples: timings; the :func:`typical` one counts.
        sample_seconds: the shortest timing.
        enough_seconds: a collective is timed until its timings add up to this.
        most_seconds: no further turn of all collectives begins that would end later than this.
        kinds: the collectives.
        dtypes: dtypes of products. The others of :data:`DTYPES` are taken to be as fast as the main one.
        classes: "attention" and "convolution", if they are measured. What is left out is taken to be as fast as a
            product.
        compiles: pointwise arithmetic of a GPU is measured by a compiled kernel; if not, float32 products tell it.
    """

    matmul: tuple[int, ...] = (64, 128, 256, 512, 1024)
    attention: tuple[int, ...] = (128, 512)
    memory_bytes: tuple[int, ...] = tuple(2**power for power in range(16, 28, 2))
    collective_bytes: tuple[int, ...] = (2**10, 2**13, 2**16, 2**19, 2**22, 2**24, 2**25)
    num_samples: int = 15
    sample_seconds: float = 2e-3
    enough_seconds: float = 1.5
    most_seconds: float = math.inf
    kinds: tuple[str, ...] = COLLECTIVE_KINDS
    dtypes: tuple[torch.dtype, ...] = DTYPES
    classes: tuple[str, ...] = ("attention", "convolution")
    compiles: bool = True

    @staticmethod
    def for_device(device_type: str, *, quick: bool = False) -> ProbeSizes:
        """Sizes that fit the device; ``quick`` ones take about a second and are inexact."""
        if quick:
            return ProbeSizes(
                matmul=(64, 128),
                attention=(64,),
                memory_bytes=(2**16, 2**20),
                collective_bytes=(2**10, 2**16),
                num_samples=2,
                sample_seconds=1e-4,
            )
        sizes = ProbeSizes()
        if device_type == "cpu":
            return sizes
        return replace(
            sizes,
            matmul=(256, 512, 1024, 2048, 4096, 8192),
            attention=(512, 2048, 8192),
            memory_bytes=tuple(2**power for power in range(20, 32, 2)),
            collective_bytes=tuple(2**power for power in range(12, 31, 3)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProbe:
    """Measured entries of a card that one rank can measure alone; the names are those of the card."""

    peak_flops: dict[str, float]
    vector_flops: float
    efficiency: dict[str, Curve]
    memory_bandwidth: float
    host_bandwidth: float
    kernel_overhead_seconds: float
    memory_bytes: int


def say_nothing(line: str) -> None:
    """Reports no progress."""


def probe_compute(
    device: torch.device,
    sizes: ProbeSizes,
    *,
    report: Report = say_nothing,
    together: Callable[[], None] = lambda: None,
    slowest: Callable[[float], float] = lambda seconds: seconds,
) -> ComputeProbe:
    """Measures a device.

    Args:
        device: where to run.
        sizes: what to run.
        report: takes a line for each finished probe.
        together: called before each probe.
        slowest: returns the largest of the values of all ranks.
    """
    timer = _Timer(device, sizes, together, slowest)
    main = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows = _rates([(2.0 * side**3, timer.seconds(cold_product(device, main, side))) for side in sizes.matmul])
    best = max(rate for _, rate in rows)
    efficiency = {"matmul": _fractions(rows, best)}
    peak = {_name(main): best}
    report(f"matmul {_name(main)}: {best / 1e9:.1f} GFLOP/s")
    side = sizes.matmul[len(sizes.matmul) // 2]
    flops = 2.0 * side**3
    for dtype in (dtype for dtype in DTYPES if dtype != main):
        if dtype not in sizes.dtypes:
            peak[_name(dtype)] = best
            continue
        rate = flops / timer.seconds(cold_product(device, dtype, side))
        peak[_name(dtype)] = rate / efficiency["matmul"].at(flops)  # the curve is that of the main dtype
        report(f"matmul {_name(dtype)}: {rate / 1e9:.1f} GFLOP/s")
    efficiency |= dict.fromkeys(("attention", "attention_backward", "convolution"), efficiency["matmul"])
    if "attention" in sizes.classes:
        forward, backward = _probe_attention(timer, device, main, sizes.attention)
        efficiency["attention"] = _fractions(forward, best)
        efficiency["attention_backward"] = _fractions(backward, best)
        report(f"attention: {forward[-1][1] / 1e9:.1f} GFLOP/s, backward {backward[-1][1] / 1e9:.1f}")
    if "convolution" in sizes.classes:
        efficiency["convolution"] = _fractions([_probe_convolution(timer, device, main)], best)
    streams = _rates([(float(size), timer.seconds(_stream(device, size))) for size in sizes.memory_bytes])
    bandwidth = max(rate for _, rate in streams)
    efficiency["memory"] = _fractions(streams, bandwidth)
    middle = sizes.memory_bytes[len(sizes.memory_bytes) // 2]
    efficiency["gather"] = _fractions([_probe_gather(timer, device, middle)], bandwidth)
    report(
        f"memory: {bandwidth / 1e9:.1f} GB/s, {streams[-1][1] / 1e9:.1f} at {size_text(sizes.memory_bytes[-1])}"
    )
    is_told = device.type != "cpu" and not sizes.compiles
    vector_flops = peak["float32"] if is_told else _probe_vector(timer, device)
    efficiency["vector"] = Curve.constant(1.0)
    overhead = timer.seconds(_tiny(device))
    report(f"vector: {vector_flops / 1e9:.1f} GFLOP/s; a kernel's overhead: {overhead * 1e6:.1f} us")
    return ComputeProbe(
        peak_flops=peak,
        vector_flops=vector_flops,
        efficiency=efficiency,
        memory_bandwidth=bandwidth,
        host_bandwidth=_probe_host(timer, device, sizes.memory_bytes[-1]),
        kernel_overhead_seconds=overhead,
        memory_bytes=device_bytes(device),
    )


def device_bytes(device: torch.device) -> int:
    """Bytes of memory of the device; for the CPU, of the machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


def typical(seconds: Sequence[float]) -> float:
    """The mean without the slowest eighth; of four or more, at least one is left out.

    A step is the sum of many calls, slow ones included, so the mean counts. Calls that other work on the machine
    delayed are not typical.
    """
    kept = sorted(seconds)[: len(seconds) - max(len(seconds) // 8, len(seconds) > 3)]
    return sum(kept) / len(kept)


#: More cycles a second than a GPU's clock has.
_MOST_CYCLES_PER_SECOND = 2.2e9


class _Timer:
    """Times calls.

    On a GPU, the kernels wait behind one that spins until the host has queued all of them: what counts is how long the
    device works, not how fast the host starts kernels. One thread on a CPU is timed in CPU seconds, so that other
    work on the machine does not count.
    """

    def __init__(
        self,
        device: torch.device,
        sizes: ProbeSizes,
        together: Callable[[], None],
        slowest: Callable[[float], float],
    ) -> None:
        self._sizes = sizes
        self._together, self._slowest = together, slowest
        self._is_gpu = device.type == "cuda"
        is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if is_one_thread else time.perf_counter

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the slowest rank: the :func:`typical` one of several timings of many calls."""
        self._together()
        call()
        once = self._time(call, 1)
        repeats = max(1, round(self._sizes.sample_seconds / max(once, 1e-9)))
        timed = functools.partial(self._time_queued, once) if self._is_gpu else self._time
        return self._slowest(typical([timed(call, repeats) for _ in range(self._sizes.num_samples)]))

    def _time(self, call: Callable[[], object], repeats: int) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()
        start = self._clock()
        for _ in range(repeats):
            call()
        if self._is_gpu:
            torch.cuda.synchronize()
        return (self._clock() - start) / repeats

    def _time_queued(self, once: float, call: Callable[[], object], repeats: int) -> float:
        """Seconds of the device for one of ``repeats`` calls; ``once`` is what one takes with its start by the host."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spin_gpu(int(_MOST_CYCLES_PER_SECOND * once * repeats))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / repeats


def cold_product(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], object]:
    """A function that multiplies square matrices whose operands are in no cache.

    The values are random: a GPU takes less power, and less time, for operands that are all equal.
    """
    each = 3 * side**2 * dtype.itemsize
    cached = 2 * largest_cache_bytes() if device.type == "cpu" else 0
    drawn = [torch.randn(side, side, device=device, dtype=dtype) for _ in range(3)]
    # Copies: to draw as many values as a large cache holds takes seconds.
    count = max(_COLD_BYTES[device.type], cached) // each + 1
    operands = itertools.cycle([[tensor.clone() for tensor in drawn] for _ in range(count)])

    def multiply() -> None:
        left, right, out = next(operands)
        torch.mm(left, right, out=out)

    return multiply


def _probe_attention(
    timer: _Timer, device: torch.device, dtype: torch.dtype, lengths: Sequence[int]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(FLOPs, FLOP/s) of causal attention with 8 heads of 64, forward and backward."""
    heads, width = 8, 64
    forward, backward = [], []
    for length in lengths:
        q, k, v = (
            torch.randn(2, heads, length, width, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        flops = 4.0 * 2 * heads * length**2 * width * causal_share(length, length)
        with torch.no_grad():
            attend = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            forward.append((flops, flops / timer.seconds(attend)))
        differentiate = functools.partial(
            torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True
        )
        backward.append((2.5 * flops, 2.5 * flops / timer.seconds(differentiate)))
    return forward, backward


def _probe_convolution(timer: _Timer, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    batch, channels = (4, 64) if device.type == "cpu" else (64, 256)
    image = torch.randn(batch, channels, 28, 28, device=device, dtype=dtype)
    weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
    flops = 2.0 * image.numel() * channels * 9
    return flops, flops / timer.seconds(lambda: F.conv2d(image, weight, padding=1))


def _stream(device: torch.device, num_bytes: int) -> Callable[[], object]:
    """A function that adds two tensors: two reads and a write, ``num_bytes`` in all."""
    left, right, out = (
        torch.ones(max(num_bytes // 12, 1), device=device, dtype=torch.float32) for _ in range(3)
    )
    return lambda: torch.add(left, right, out=out)


def _probe_gather(timer: _Timer, device: torch.device, table_bytes: int) -> tuple[float, float]:
    """(bytes, bytes/s) of reading and writing rows of 256 floats in a shuffled order."""
    rows = max(table_bytes // 1024, 2)
    table = torch.ones(rows, 256, device=device)
    index = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(device)
    num_bytes = 2.0 * table.numel() * 4
    return num_bytes, num_bytes / timer.seconds(lambda: F.embedding(index, table))


def _probe_vector(timer: _Timer, device: torch.device) -> float:
    """Operations per second of pointwise kernels that are not bound by memory."""
    if device.type == "cpu":
        values = torch.linspace(-1, 1, 2**15)  # small enough for the cache, large enough to hide the call
        out = torch.empty_like(values)
        return STEPS_OF["exp"] * values.numel() / timer.seconds(lambda: torch.exp(values, out=out))
    repeats = 32

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(repeats):
            x = torch.exp(-x)
        return x

    compiled, values = torch.compile(chain), torch.linspace(-1, 1, 2**24, device=device)
    return repeats * (STEPS_OF["exp"] + 1) * values.numel() / timer.seconds(lambda: compiled(values))


def _tiny(device: torch.device) -> Callable[[], object]:
    value = torch.ones(8, device=device)
    out = torch.empty_like(value)
    return lambda: torch.add(value, value, out=out)


def _probe_host(timer: _Timer, device: torch.device, num_bytes: int) -> float:
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return num_bytes / timer.seconds(lambda: there.copy_(here, non_blocking=True))


def _rates(timings: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(size, size per second) for each (size, seconds)."""
    return [(size, size / seconds) for size, seconds in timings]


def _fractions(rates: Sequence[tuple[float, float]], peak: float) -> Curve:
    return Curve(tuple((size, round(min(rate / peak, 1.0), 4)) for size, rate in rates))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
