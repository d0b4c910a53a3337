"""Samples to which expressions are fitted: the numbers of a step at one point, scheduled on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from ...backend import LOWERING
from ...capture import CapturedStep, capture_step, no_garbage_collection, reshard_step
from ...cost import (
    HardwareCard,
    Kernel,
    collective_bytes,
    collective_kind,
    executed_flops,
    kernel_class,
    kernel_seconds,
    kernels_of,
    memory_seconds,
)
from ...ir import copy_graph, is_collective, remembered_results
from ...pipeline import PassContext
from ...progress import Stages
from ...report import CATEGORIES
from .. import Inspection, Settings, always_bytes, persistent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One capture, scheduled on one mesh.

    Attributes:
        structure: names of the nodes, in order, of both halves before any pass.
        orders: names of the nodes of each half, with its collectives placed.
        persistent: see :func:`graphshard.inspection.persistent_bytes.persistent_bytes`.
        activations, gathered: bytes at the end of the forward.
        live: live bytes at each node of the forward, then of the backward, then in the optimizer's step.
        kernels: kernels of each half with merged sums, without the kernels around its collectives.
        copy_seconds: seconds of the kernels around the collectives of each half.
        traffic: (bytes, number) of the collectives of one micro-batch, by half and kind.
    """

    structure: tuple[str, ...]
    persistent: Mapping[str, int]
    activations: int
    gathered: int
    live: tuple[int, ...]
    kernels: tuple[tuple[Kernel, ...], ...]
    copy_seconds: tuple[float, ...]
    orders: Mapping[str, tuple[str, ...]]
    traffic: Mapping[tuple[str, str], tuple[int, int]]

    def whole_numbers(self, groups: Sequence[Sequence[Group]]) -> list[int]:
        """All numbers that are fitted, in one order."""
        works = [works_of(kernels, of_half) for kernels, of_half in zip(self.kernels, groups, strict=True)]
        values = [self.activations, self.persistent["inputs"], self.gathered]
        return [*values, *(work for half in works for work in half.values()), *self.live]


#: The bound of a kernel: "memory", or its class and dtype.
Group = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Captures one model at any sizes of its dynamic dims."""

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dynamic: Mapping[str, int]
    sizes: Mapping[str, int]
    loss: Callable[[Any], torch.Tensor] | None
    settings: Settings
    progress: Callable[[str], None]
    known: dict[tuple[int, ...], CapturedStep]

    def captured(self, point: tuple[int, ...]) -> CapturedStep:
        """The step at a point, captured once."""
        if point not in self.known:
            sizes = dict(zip(self.dynamic, point, strict=True))
            self.progress("capture " + ", ".join(f"{name}={size}" for name, size in sizes.items()))
            args, kwargs = self._resized(sizes)
            with remembered_results():
                self.known[point] = capture_step(
                    self.module, args, kwargs, rules=self.settings.rules, loss=self.loss,
                    checkpoint=self.settings.checkpoint, needs_loss=True,
                    device_type=self.settings.card.device_type, is_brief=True,
                )  # fmt: skip
        return self.known[point]

    def sample(
        self,
        point: tuple[int, ...],
        mesh: Mapping[str, int] | None = None,
        orders: Mapping[str, Sequence[str]] | None = None,
    ) -> Sample:
        """The step at a point on a mesh, by default the reference mesh; in given orders, or as scheduled."""
        mesh = mesh or self.settings.rules.mesh
        rules = replace(self.settings.rules, mesh=mesh)
        settings = replace(self.settings, rules=rules, budget_bytes=None)
        step = reshard_step(self.captured(point), mesh)
        inspection = Inspection(
            settings=settings, captured=step, stages=Stages(None), is_brief=True, orders=orders or {}
        )
        captured = (self.captured(point).forward, self.captured(point).backward)
        context = replace(step.context, device_type=settings.card.device_type)
        kernels = tuple(tuple(kernels_of(list(_before_placing(gm, context).graph.nodes))) for gm in captured)
        with no_garbage_collection(), remembered_results():
            persistent = persistent_bytes(self.module, step, settings.optimizer)
            halves = inspection.scheduled_halves(always_bytes(persistent, settings.micro_batches))
        live = [sum(row) + sum(outside) for _, memory, outside in halves for row in memory.live]
        in_optimizer = sum(persistent[name] for name in ("parameters", "optimizer", "gradients", "inputs"))
        at_end = dict(zip(CATEGORIES, halves[0][1].live[-1], strict=True))
        return Sample(
            structure=tuple(node.name for gm in captured for node in gm.graph.nodes),
            orders={half.name: tuple(node.name for node in half.gm.graph.nodes) for half, _, _ in halves},
            persistent=persistent,
            activations=at_end["activations"],
            gathered=at_end["gathered"],
            live=(*live, in_optimizer),
            kernels=kernels,
            copy_seconds=tuple(
                _seconds(kernels_of(list(half.gm.graph.nodes)), settings.card) - _seconds(own, settings.card)
                for (half, _, _), own in zip(halves, kernels, strict=True)
            ),
            traffic={
                (half.name, kind): found for half, _, _ in halves for kind, found in traffic_of(half.gm)
            },
        )

    def _resized(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def fitted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            shape = list(value.shape)
            for name, dim in self.dynamic.items():
                if dim < len(shape) and shape[dim] == self.sizes[name]:
                    shape[dim] = sizes[name]
            return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)

        return tuple(map(fitted, self.args)), {name: fitted(value) for name, value in self.kwargs.items()}


def _before_placing(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """A half as lowering leaves it before collectives are placed, but with its shard ops."""
    copied = copy_graph(gm)
    for step in LOWERING.passes[1:]:
        step.run(copied, context)
    return copied


def _seconds(kernels: Sequence[Kernel], card: HardwareCard) -> float:
    return sum(kernel_seconds(kernel, card) for kernel in kernels)


def traffic_of(gm: fx.GraphModule) -> Iterator[tuple[str, tuple[int, int]]]:
    """(bytes, number) of the collectives, by kind."""
    found: dict[str, tuple[int, int]] = {}
    for node in filter(is_collective, gm.graph.nodes):
        num_bytes, count = found.get(collective_kind(node), (0, 0))
        found[collective_kind(node)] = (num_bytes + collective_bytes(node), count + 1)
    yield from found.items()


def groups_of(kernels: Sequence[Kernel], card: HardwareCard) -> list[Group]:
    """The bound of each kernel."""
    found = []
    for kernel in kernels:
        seconds = kernel_seconds(kernel, card) - card.kernel_overhead_seconds
        in_memory = memory_seconds(kernel.moved_bytes, card, scattered=kernel.is_scattered)
        kind = None if kernel.is_fused else kernel_class(kernel.nodes[0])
        is_arithmetic = seconds > in_memory * (1 + 1e-9)
        found.append((kind or "vector") if is_arithmetic else "memory")
    return found


def works_of(kernels: Sequence[Kernel], groups: Sequence[Group]) -> dict[Group, int]:
    """The work of each group: bytes or operations."""
    found = dict.fromkeys(sorted(set(groups)), 0)
    for kernel, group in zip(kernels, groups, strict=True):
        if group == "memory":
            found[group] += kernel.moved_bytes
        elif group == "vector":
            found[group] += int(kernel.vector_flops)
        else:
            found[group] += executed_flops(kernel.nodes[0])
    return found
