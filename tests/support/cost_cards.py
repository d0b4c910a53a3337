"""A hardware card with round numbers, so that tests can count by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphshard.cost.cards import KERNEL_CLASSES, HardwareCard, LinkClass, MeasuredCollective
from graphshard.cost.curves import Curve

#: 1 TFLOP/s, 100 GB/s of memory; links of 10 and 1 GB/s with 1 and 10 us a hop; nothing lost anywhere.
ROUND_CARD = HardwareCard(
    name="round",
    peak_flops={"float32": 1e12, "float64": 1e12, "bfloat16": 2e12},
    vector_flops=1e11,
    efficiency={kind: Curve.constant(1.0) for kind in KERNEL_CLASSES},
    memory_bandwidth=1e11,
    memory_bytes=2**30,
    host_bandwidth=1e10,
    kernel_overhead_seconds=1e-9,
    ranks_per_node=8,
    intra_node=LinkClass(latency_seconds=1e-6, bandwidth=1e10, efficiency=1.0),
    inter_node=LinkClass(latency_seconds=1e-5, bandwidth=1e9, efficiency=1.0),
    collective_start_seconds=1e-9,
)


def with_rows(link: LinkClass, op: str, num_ranks: int, *rows: tuple[int, float, float | None]) -> LinkClass:
    """The link with measured rows: bytes, seconds, overlapped seconds."""
    measured = [
        MeasuredCollective(op=op, num_ranks=num_ranks, num_bytes=size, seconds=seconds, overlapped_seconds=overlapped)
        for size, seconds, overlapped in rows
    ]
    return replace(link, measured=(*link.measured, *measured))


def round_card(**changes: Any) -> HardwareCard:
    """:data:`ROUND_CARD` with other entries."""
    return replace(ROUND_CARD, **changes)
