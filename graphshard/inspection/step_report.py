"""Combines halves into the report of a step: time, memory, throughput, and the largest exposures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..capture import CapturedStep
from ..cost import HardwareCard, model_flops
from ..pipeline import PassRecord
from ..report import (
    CATEGORIES,
    CollectiveCount,
    ComputeEvent,
    Exposure,
    HalfReport,
    MemoryPoint,
    MemoryReport,
    ModelSummary,
    PassStep,
    Report,
    Throughput,
    UnitSummary,
)
from .optimizers import accumulation_seconds

#: Assumptions that every report states.
MODELLED = (
    "Forward and backward are scheduled each on its own: no collective runs from one into the other.",
    "The optimizer is one fused kernel over the shards, after the last collective, bound by memory bandwidth.",
    "Host time, allocator fragmentation and the scratch space of GPU kernels and of the communication library "
    "are not counted.",
    "Operations count causal attention in full, as is usual for utilisation; its time counts the half that runs.",
)

#: The most exposures listed.
NUM_EXPOSURES = 10


def report_of_halves(
    halves: Sequence[HalfReport],
    *,
    model: ModelSummary | None,
    mesh: Mapping[str, int],
    card: HardwareCard,
    settings: Mapping[str, Any],
    persistent: Sequence[int],
    budget_bytes: int | None,
    passes: Sequence[PassStep],
    notes: Sequence[str],
) -> Report:
    """A report without its throughput and its worlds.

    Args:
        halves: the halves, in the order in which they run.
        model, mesh, settings, passes, notes: as in :class:`Report`.
        card: the hardware.
        persistent: bytes by category that live throughout.
        budget_bytes: the most a rank may hold; None for the capacity of the card.
    """
    num_ranks = 1
    for size in mesh.values():
        num_ranks *= size
    step_seconds = sum(half.repeats * half.seconds for half in halves)
    bound = sum(half.repeats * half.bound_seconds for half in halves)
    highest = max(halves, key=lambda half: half.peak.total_bytes)
    limit = int(card.memory_bytes) if budget_bytes is None else budget_bytes
    return Report(
        model=model,
        mesh=mesh,
        num_ranks=num_ranks,
        hardware=card.name,
        card=card.as_dict(),
        settings=settings,
        halves=tuple(halves),
        step_seconds=step_seconds,
        compute_seconds=sum(half.repeats * half.compute_seconds for half in halves),
        exposed_seconds=sum(half.repeats * half.exposed_seconds for half in halves),
        bound_seconds=bound,
        gap=step_seconds / bound - 1.0 if bound else 0.0,
        throughput=None,
        memory=MemoryReport(
            peak_bytes=highest.peak.total_bytes,
            categories=dict(zip(CATEGORIES, highest.peak.num_bytes, strict=True)),
            peak_half=highest.name,
            peak_where=highest.peak_where,
            persistent=dict(zip(CATEGORIES, persistent, strict=True)),
            capacity_bytes=int(card.memory_bytes),
            budget_bytes=budget_bytes,
            fits=highest.peak.total_bytes <= limit,
        ),
        collectives=tuple(_counts(halves)),
        exposures=tuple(_exposures(halves)[:NUM_EXPOSURES]),
        passes=tuple(passes),
        worlds=(),
        stage_seconds={},
        notes=tuple(notes),
    )


def _counts(halves: Sequence[HalfReport]) -> list[CollectiveCount]:
    found: dict[tuple[str, str, str, int], CollectiveCount] = {}
    for half in halves:
        for one in half.collectives:
            key = (half.name, one.kind, one.group, one.num_bytes)
            known = found.get(key)
            count = half.repeats + (known.count if known else 0)
            exposed = half.repeats * one.exposed_seconds + (known.exposed_seconds if known else 0.0)
            found[key] = CollectiveCount(
                half=half.name, kind=one.kind, group=one.group, num_bytes=one.num_bytes, count=count,
                seconds=one.seconds, exposed_seconds=exposed,
            )  # fmt: skip
    return sorted(found.values(), key=lambda one: -one.num_bytes * one.count)


def _exposures(halves: Sequence[HalfReport]) -> list[Exposure]:
    found = [
        Exposure(half=half.name, collective=one, step_seconds=half.repeats * one.exposed_seconds)
        for half in halves
        for one in half.collectives
        if one.exposed_seconds > 0
    ]
    return sorted(found, key=lambda one: -one.step_seconds)


def optimizer_half(name: str, seconds: float, live: Sequence[int], flops: int) -> HalfReport:
    """The step of the optimizer: one stretch of compute; ``live`` are the bytes live then, by category."""
    start = MemoryPoint(seconds=0.0, num_bytes=tuple(live))
    stretch = ComputeEvent(label=name, kind="compute", start=0.0, seconds=seconds, num_nodes=1)
    return HalfReport(
        name="optimizer",
        repeats=1,
        seconds=seconds,
        compute_seconds=seconds,
        exposed_seconds=0.0,
        bound_seconds=seconds,
        gap=0.0,
        bounds={"compute": seconds},
        solver="none",
        flops=flops,
        num_nodes=1,
        compute=(stretch,) if seconds else (),
        collectives=(),
        schedule=(),
        memory=(start, replace(start, seconds=seconds)),
        peak=start,
        peak_where=name,
    )


def with_accumulation(half: HalfReport, gradient_bytes: int, card: HardwareCard) -> HalfReport:
    """A backward with the time to add its gradients to those of earlier micro-batches."""
    seconds = accumulation_seconds(gradient_bytes, card)
    stretch = ComputeEvent(
        label="accumulate gradients", kind="compute", start=half.seconds, seconds=seconds, num_nodes=1
    )
    bound = half.bound_seconds + seconds
    return replace(
        half,
        seconds=half.seconds + seconds,
        compute_seconds=half.compute_seconds + seconds,
        bound_seconds=bound,
        gap=(half.seconds + seconds) / bound - 1.0 if bound else 0.0,
        compute=(*half.compute, stretch),
    )


def flops_by_dtype(gm: fx.GraphModule) -> dict[str, int]:
    """Operations of a graph by the dtype of their operands, causal attention in full."""
    found: dict[str, int] = {}
    for node in gm.graph.nodes:
        flops = model_flops(node)
        if flops:
            values = [source.meta.get("val") for source in node.all_input_nodes]
            dtype = next(value.dtype for value in values if isinstance(value, torch.Tensor))
            name = str(dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + flops
    return found


def throughput(
    report: Report, joint_flops: Mapping[str, int], tokens: int | None, card: HardwareCard
) -> Throughput | None:
    """Utilisation and tokens per second; None for a model without products.

    Args:
        report: a report with its times.
        joint_flops: operations of forward and backward of one micro-batch without recomputation, by dtype.
        tokens: tokens of one rank and micro-batch.
        card: the hardware.
    """
    if not joint_flops or not report.step_seconds:
        return None
    repeats = report.halves[0].repeats
    dtype = max(joint_flops, key=lambda name: joint_flops[name])
    executed = sum(half.repeats * half.flops for half in report.halves if half.name != "optimizer")
    needed = repeats * sum(joint_flops.values())
    available = card.peak(dtype) * report.step_seconds
    in_all = None if tokens is None else repeats * tokens * report.num_batches / report.step_seconds
    return Throughput(
        model_flops=needed,
        executed_flops=executed,
        peak_flops=card.peak(dtype),
        dtype=dtype,
        mfu=needed / available,
        hfu=executed / available,
        tokens=tokens,
        tokens_per_second_per_rank=None if in_all is None else in_all / report.num_ranks,
        tokens_per_second=in_all,
    )


def pass_step(graph: str, record: PassRecord) -> PassStep:
    """A pass in the report, from its record."""
    return PassStep(
        graph=graph,
        name=record.name,
        seconds=record.seconds,
        num_nodes=record.num_nodes,
        num_collectives=record.num_collectives,
        collective_bytes=record.collective_bytes,
        counts=dict(record.report.counts),
        skipped=tuple(record.report.skipped),
        text=record.text,
    )


def model_summary(name: str, module: nn.Module, captured: CapturedStep) -> ModelSummary:
    """What is trained: the size of the model and of its units."""
    params = dict(module.named_parameters())
    units: dict[str, list[nn.Parameter]] = {}
    gathered: dict[str, int] = {}
    for binding in captured.context.parameters:
        param = params[binding.name]
        units.setdefault(binding.unit, []).append(param)
        piece = math.prod(captured.pieces.get(binding.name, param.shape))
        gathered[binding.unit] = gathered.get(binding.unit, 0) + piece * param.element_size()
    return ModelSummary(
        name=name,
        num_elements=sum(param.numel() for param in params.values()),
        num_trained=sum(param.numel() for param in params.values() if param.requires_grad),
        units=tuple(
            UnitSummary(
                name=unit,
                num_parameters=len(members),
                num_elements=sum(param.numel() for param in members),
                full_bytes=gathered[unit],
            )
            for unit, members in units.items()
        ),
    )
