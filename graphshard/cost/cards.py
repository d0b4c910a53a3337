"""Hardware cards: what a rank, its memory and its links can do, as numbers with their sources.

A card is data: JSON files ship beside this module, ``graphshard calibrate`` writes one for the
machine at hand, and anyone can write one. Every rate is a peak that a datasheet or a measurement
gives, times an efficiency between 0 and 1, so no prediction is faster than the hardware.
docs/understand/cost-model.md says what each entry means and where the shipped numbers come from.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CardError
from ..machine import Machine
from .curves import Curve

#: Classes of kernels; a card has an efficiency for each. The first four are fractions of ``peak_flops``, by FLOPs of
#: the kernel. "vector" is a fraction of ``vector_flops``, by FLOPs. "memory" (kernels that stream) and "gather"
#: (kernels that read scattered rows) are fractions of ``memory_bandwidth``, by bytes moved.
KERNEL_CLASSES = (
    "matmul", "attention", "attention_backward", "convolution", "vector", "memory", "gather",
)  # fmt: skip

#: The collectives that have a price.
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")

#: What ``device_type`` may be.
DEVICE_TYPES = ("cuda", "cpu")

#: Smaller than any figure of hardware in its unit. A division by less could overflow.
_LEAST = 1e-30

#: Entries that may be 0.
_MAY_BE_ZERO = (
    "overlapped_latency_seconds",
    "collective_spread_seconds",
    "comm_compute_seconds_per_byte",
)
RANK_NUMBERS = (
    "vector_flops",
    "memory_bandwidth",
    "memory_bytes",
    "host_bandwidth",
    "kernel_overhead_seconds",
    "ranks_per_node",
    "collective_start_seconds",
    "overlapped_latency_seconds",
    "collective_spread_seconds",
    "comm_compute_seconds_per_byte",
)
LINKS = ("intra_node", "inter_node")
LINK_NUMBERS = ("latency_seconds", "bandwidth", "efficiency")
ROW_ENTRIES = ("op", "num_ranks", "num_bytes", "seconds", "overlapped_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A way to use a link that trades bandwidth for latency, as NCCL's LL and LL128 do.

    Attributes:
        name: equal names in both link classes belong together.
        latency_seconds: latency of one hop.
        bandwidth_fraction: fraction of the bandwidth that the link reaches without the protocol, in (0, 1].
    """

    name: str
    latency_seconds: float
    bandwidth_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One measured time of a collective.

    Attributes:
        op: one of :data:`COLLECTIVE_KINDS`.
        num_ranks: ranks of the group.
        num_bytes: bytes of the larger of input and output.
        seconds: from start to end.
        overlapped_seconds: the part of ``seconds`` that passes while the previous collective of the group still moves;
            None if it was not measured.
    """

    op: str
    num_ranks: int
    num_bytes: int
    seconds: float
    overlapped_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """Links of one kind.

    Attributes:
        latency_seconds: latency of one hop, for large messages.
        bandwidth: bytes per second and rank, in one direction.
        efficiency: the fraction of ``bandwidth`` that collectives reach.
        protocols: further ways to use the link.
        measured: measured collectives of groups whose ranks are all joined by this link class. They replace the
            formulas for their op and number of ranks.
    """

    latency_seconds: float
    bandwidth: float
    efficiency: float
    protocols: tuple[Protocol, ...] = ()
    measured: tuple[MeasuredCollective, ...] = ()


#: The dtype of the real and the imaginary part of a complex dtype, by name.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareCard:
    """What one rank and its links can do.

    Attributes:
        name: for reports.
        summary: one line for people.
        peak_flops: FLOP/s of matrix units by dtype name ("bfloat16").
        vector_flops: FLOP/s of the units that run pointwise kernels, in float32.
        efficiency: one curve for each of :data:`KERNEL_CLASSES`; values in (0, 1].
        memory_bandwidth: bytes/s of the device's memory (of its cache, where small kernels reach it).
        memory_bytes: capacity of the device.
        host_bandwidth: bytes/s between the device and host memory.
        kernel_overhead_seconds: what each kernel costs beside its work.
        ranks_per_node: ranks that share a node.
        device_type: torch's word for the device, "cuda" or "cpu": which backend communicates there,
            and so what it copies (:data:`graphshard.memory.model.BACKEND_COPIES`).
        intra_node, inter_node: the links inside a node and between nodes.
        collective_start_seconds: what each collective costs before its first byte moves.
        overlapped_latency_seconds: the part of a collective's latency that passes while the previous collective of its
            process group still moves. Gloo runs several at a time; NCCL runs one (0). A measured collective may have
            a value of its own.
        collective_spread_seconds: a collective ends within this many seconds of its time, with equal probability,
            because ranks are not in step and gloo's threads wait for a core. 0 if it was not measured.
        comm_compute_seconds_per_byte: seconds that a collective takes from the core that computes, per byte of the
            larger of input and output (gloo copies and adds on a core).
        sources: where each entry comes from, by entry ("peak_flops", "efficiency.matmul").
        machine: of a CPU, the processor and the threads of a rank that were measured; None if they are not known.
        file: the file that the card was read from; None for one that ships with the package or was made in code.

    Raises:
        CardError: entries that are not positive, fractions above 1, or names that are no text; lists all of them.
    """

    name: str
    peak_flops: Mapping[str, float]
    vector_flops: float
    efficiency: Mapping[str, Curve]
    memory_bandwidth: float
    memory_bytes: int
    host_bandwidth: float
    kernel_overhead_seconds: float
    ranks_per_node: int
    intra_node: LinkClass
    inter_node: LinkClass
    collective_start_seconds: float
    overlapped_latency_seconds: float = 0.0
    collective_spread_seconds: float = 0.0
    comm_compute_seconds_per_byte: float = 0.0
    device_type: str = "cuda"
    summary: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    file: Path | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = list(_value_problems(self))
        if problems:
            raise CardError(complaint(f"card {self.name!r}", problems))

    def peak(self, dtype_name: str) -> float:
        """FLOP/s of the matrix units.

        A complex multiply-add is four real ones. Unless the card has a number for a complex dtype, its peak is a
        quarter of that of its parts. Without a number for a float8 dtype it is that of bfloat16, which units with
        float8 exceed.

        Raises:
            CardError: the card has no number for this dtype.
        """
        if dtype_name not in self.peak_flops and dtype_name in _PARTS:
            return self.peak(_PARTS[dtype_name]) / 4
        if dtype_name not in self.peak_flops and dtype_name.startswith("float8"):
            return self.peak("bfloat16")
        if dtype_name not in self.peak_flops:
            raise CardError(
                f"card {self.name!r} has no peak_flops for {dtype_name}, but for "
                f"{', '.join(sorted(self.peak_flops))}; add it to the card's file"
            )
        return self.peak_flops[dtype_name]

    def as_dict(self) -> dict[str, Any]:
        """The card as :func:`load_card` reads it."""
        return {
            "name": self.name,
            "summary": self.summary,
            "device_type": self.device_type,
            "peak_flops": dict(self.peak_flops),
            "efficiency": {kind: _curve_data(curve) for kind, curve in self.efficiency.items()},
            **{name: getattr(self, name) for name in RANK_NUMBERS},
            **{name: _link_data(getattr(self, name)) for name in LINKS},
            **({} if self.machine is None else {"machine": self.machine.as_data()}),
            "sources": dict(self.sources),
        }

    def save(self, path: Path) -> None:
        """Writes the card as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")


def complaint(where: str, problems: list[str]) -> str:
    return f"{where}: " + "; ".join(problems)


def is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and not is_too_large(value)


def is_too_large(value: Any) -> bool:
    """True for a whole number above the largest float."""
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _value_problems(card: HardwareCard) -> Iterator[str]:
    """A sentence for each entry whose value is impossible."""
    yield from _text_problems(card)
    if wrong := list(_form_problems(card)):
        yield from wrong
        return
    if not card.peak_flops:
        yield "peak_flops is empty: name at least one dtype"
    if card.device_type not in DEVICE_TYPES:
        yield f"device_type must be one of {', '.join(DEVICE_TYPES)}, not {card.device_type!r}"
    counts = ["memory_bytes", "ranks_per_node"]
    numbers = {f"peak_flops.{name}": value for name, value in card.peak_flops.items()}
    numbers |= {name: getattr(card, name) for name in RANK_NUMBERS}
    fractions = {}
    for name in LINKS:
        link = getattr(card, name)
        numbers |= {f"{name}.{key}": getattr(link, key) for key in LINK_NUMBERS}
        fractions[f"{name}.efficiency"] = link.efficiency
        for way in link.protocols:
            path = f"{name}.protocols.{way.name}"
            numbers[f"{path}.latency_seconds"] = way.latency_seconds
            numbers[f"{path}.bandwidth_fraction"] = way.bandwidth_fraction
            fractions[f"{path}.bandwidth_fraction"] = way.bandwidth_fraction
        for index, row in enumerate(link.measured):
            path = f"{name}.measured[{index}]"
            numbers |= {
                f"{path} ranks": row.num_ranks,
                f"{path} bytes": row.num_bytes,
                f"{path} seconds": row.seconds,
            }
            overlapped = row.overlapped_seconds
            if overlapped is not None and not 0 <= overlapped <= row.seconds:
                yield f"{path} overlapped seconds must be from 0 to its {row.seconds:g} seconds, not {overlapped:g}"
            counts += (f"{path} ranks", f"{path} bytes")
    for kind, curve in card.efficiency.items():
        yield from (f"efficiency.{kind} {problem}" for problem in curve.problems())
        for size, value in curve.rows:
            numbers[f"efficiency.{kind} at {size:g}"] = fractions[f"efficiency.{kind} at {size:g}"] = value
    too_large = [name for name, value in numbers.items() if is_too_large(value)]
    yield from (f"{name} is too large a number" for name in too_large)
    others = [name for name, value in numbers.items() if name not in too_large and not is_number(value)]
    yield from (f"{name} must be a number, not {numbers[name]!r}" for name in others)
    for name in (*too_large, *others):
        del numbers[name]
        fractions.pop(name, None)
    for name in (name for name in counts if name in numbers):
        if math.isfinite(numbers[name]) and numbers[name] != int(numbers[name]):
            yield f"{name} must be a whole number, not {numbers[name]:g}"
    missing = [kind for kind in KERNEL_CLASSES if kind not in card.efficiency]
    yield from (f"efficiency.{kind} is missing" for kind in missing)
    for path, value in numbers.items():
        if not math.isfinite(value) or value < 0 or (value == 0 and path not in _MAY_BE_ZERO):
            yield f"{path} must be positive, not {value:g}"
        elif 0 < value < _LEAST:
            yield f"{path} must be at least {_LEAST:g}, not {value:g}"
    yield from (f"{path} must be at most 1, not {value:g}" for path, value in fractions.items() if value > 1)


def _form_problems(card: HardwareCard) -> Iterator[str]:
    """A sentence for each entry of the wrong type."""
    if not isinstance(card.peak_flops, Mapping):
        yield f"peak_flops must be numbers by dtype, not {card.peak_flops!r}"
    curves = card.efficiency
    if not isinstance(curves, Mapping) or not all(isinstance(curve, Curve) for curve in curves.values()):
        yield f"efficiency must be curves by class of kernels, not {curves!r}"
    for name in LINKS:
        if not isinstance(getattr(card, name), LinkClass):
            yield f"{name} must be a LinkClass, not {getattr(card, name)!r}"


def _text_problems(card: HardwareCard) -> Iterator[str]:
    """A sentence for each name, summary or source that is no text."""
    if not isinstance(card.name, str) or not card.name:
        yield f"name must be a text, not {card.name!r}"
    if not isinstance(card.summary, str):
        yield f"summary must be a text, not {card.summary!r}"
    if not isinstance(card.sources, Mapping):
        yield f"sources must say by entry where it comes from, not {card.sources!r}"
        return
    for entry, source in card.sources.items():
        if not isinstance(entry, str) or not isinstance(source, str):
            yield f"sources.{entry} must be a text, not {source!r}"


def _curve_data(curve: Curve) -> float | list[list[float]]:
    return curve.rows[0][1] if len(curve.rows) == 1 else [list(row) for row in curve.rows]


def _link_data(link: LinkClass) -> dict[str, Any]:
    data: dict[str, Any] = {name: getattr(link, name) for name in LINK_NUMBERS}
    if link.protocols:
        data["protocols"] = {
            way.name: {"latency_seconds": way.latency_seconds, "bandwidth_fraction": way.bandwidth_fraction}
            for way in link.protocols
        }
    if link.measured:
        rows = [[getattr(row, name) for name in ROW_ENTRIES] for row in link.measured]
        data["measured"] = [row if row[-1] is not None else row[:-1] for row in rows]
    return data
