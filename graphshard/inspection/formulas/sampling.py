"""Samples to which expressions are fitted: the numbers of a step at one point, scheduled on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ..._compat import lazy_graph_modules, tree_map
from ...backend import LOWERING
from ...capture import (
    CapturedStep,
    StepNumbers,
    capture_step,
    no_garbage_collection,
    numbers_of,
    reshard_step,
)
from ...cost import (
    HardwareCard,
    Kernel,
    collective_bytes,
    collective_kind,
    executed_flops,
    kernel_class,
    kernel_seconds,
    kernels_merged_as,
    kernels_of,
    memory_seconds,
)
from ...ir import copy_graph, group_name, is_collective, remembered_results
from ...pipeline import PassContext
from ...progress import Stages
from ...report import CATEGORIES
from .. import CategorizedMemory, Inspection, ScheduledHalf, Settings, always_bytes, persistent_bytes
from .interpolation import GraphNumbers, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One capture, scheduled on one mesh.

    Attributes:
        orders: names of the nodes of each half, with its collectives placed.
        persistent: see :func:`graphshard.inspection.persistent_bytes.persistent_bytes`.
        activations, gathered: bytes at the end of the forward.
        live: live bytes at each node of the forward, then of the backward, then in the optimizer's step.
        kernels: kernels of each half with merged sums, without the kernels around its collectives. They are merged as
            the sampler says.
        is_merged_so: whether they would be merged like that at this point by themselves.
        copy_seconds: seconds of the kernels around the collectives of each half.
        traffic: (bytes, number) of the collectives of one micro-batch, by half and kind.
        moved: the same of the reshards over the further axis of the mesh.
    """

    persistent: Mapping[str, int]
    activations: int
    gathered: int
    live: tuple[int, ...]
    kernels: tuple[tuple[Kernel, ...], ...]
    is_merged_so: bool
    copy_seconds: tuple[float, ...]
    orders: Mapping[str, tuple[str, ...]]
    traffic: Mapping[tuple[str, str], tuple[int, int]]
    moved: Mapping[tuple[str, str], tuple[int, int]]

    def whole_numbers(self, groups: Sequence[Sequence[Group]]) -> list[int]:
        """All numbers that are fitted, in one order."""
        works = [works_of(kernels, of_half) for kernels, of_half in zip(self.kernels, groups, strict=True)]
        moved = [num_bytes for num_bytes, _ in self.moved.values()]
        values = [self.activations, self.persistent["inputs"], self.gathered, *moved]
        return [*values, *(work for half in works for work in half.values()), *self.live]


class _Placed(NamedTuple):
    """A step with its collectives placed, and the live bytes at each node of it (:attr:`Sample.live`)."""

    step: CapturedStep
    persistent: Mapping[str, int]
    halves: Sequence[Any]
    live: tuple[int, ...]


#: The bound of a kernel: "memory", or its class and dtype.
Group = str


@dataclass(slots=True, kw_only=True)
class Sampler:
    """The steps of one model at any sizes of its dynamic dims: captured, or interpolated between captures.

    Attributes:
        module, args, kwargs, loss, settings: of the inspection.
        dynamic: the dims by name; ``sizes`` has their sizes in the inputs.
        progress: takes each stage.
        known: captured steps by point.
        expected: the number of captures that are needed at least, for ``progress``.
        graphs: gives the graphs at points that were not captured; None until :meth:`interpolate` finds it.
        merged: names of the nodes of each kernel, by half, in all samples; None for those of each sample by itself.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dynamic: Mapping[str, int]
    sizes: Mapping[str, int]
    loss: Callable[[Any], torch.Tensor] | None
    settings: Settings
    progress: Callable[[str], None]
    known: dict[Point, CapturedStep]
    expected: int = 0
    graphs: GraphNumbers | None = None
    merged: Sequence[Sequence[Sequence[str]]] | None = None
    _made: dict[Point, CapturedStep] = field(default_factory=dict)

    def captured(self, point: tuple[int, ...]) -> CapturedStep:
        """The step at a point, captured once."""
        if point not in self.known:
            sizes = dict(zip(self.dynamic, point, strict=True))
            number = len(self.known) + 1
            of_all = f" ({number} of {self.expected}, then the fit)" if number <= self.expected else ""
            self.progress(f"capture {self._text(point)}{of_all}")
            args, kwargs = self._resized(sizes)
            with remembered_results():
                self.known[point] = capture_step(
                    self.module, args, kwargs, rules=self.settings.rules, loss=self.loss,
                    checkpoint=self.settings.checkpoint, needs_loss=True,
                    device_type=self.settings.card.device_type, is_brief=True,
                )  # fmt: skip
        return self.known[point]

    def interpolate(self, points: Sequence[Point], checks: Sequence[Point]) -> None:
        """Interpolates all other points from here on, if captures at some points predict those at others.

        Args:
            points: the reference, and one point for each dim, with another size there.
            checks: the points at which every number has to agree.
        """
        graphs = GraphNumbers.through(points[0], {point: self._numbers(point) for point in points})
        if graphs is not None and all(graphs.agrees(point, self._numbers(point)) for point in checks):
            self.graphs = graphs

    def confirms(self, point: Point) -> bool:
        """Whether a capture at a point is what is interpolated there; if not, nothing is interpolated from here on."""
        if self.graphs is not None and not self.graphs.agrees(point, self._numbers(point)):
            self.graphs = None
            return False
        return True

    def _numbers(self, point: Point) -> StepNumbers | None:
        return numbers_of(self.captured(point), self.module, (), with_joint=False)

    def step(self, point: Point) -> CapturedStep:
        """The step at a point: interpolated if possible, without its joint graph; else captured."""
        if point in self.known or self.graphs is None or 1 in point:  # torch treats sizes of 1 specially
            return self.captured(point)
        if point not in self._made:
            self.progress(f"interpolate {self._text(point)}")
            with no_garbage_collection(), remembered_results():
                made = self.graphs.step(next(iter(self.known.values())), point)
            self._made[point] = self.captured(point) if made is None else made
        return self._made[point]

    def merging(self, point: Point) -> list[list[tuple[str, ...]]]:
        """The names of the nodes of each kernel at a point, by half."""
        step = self.step(point)
        return names_in([kernels_of(of_half) for of_half in self._nodes_before_placing(step, step.context)])

    def _nodes_before_placing(self, step: CapturedStep, context: PassContext) -> list[list[fx.Node]]:
        context = replace(context, device_type=self.settings.card.device_type)
        with lazy_graph_modules():
            halves = [_before_placing(gm, context) for gm in (step.forward, step.backward)]
        return [list(half.graph.nodes) for half in halves]

    def _text(self, point: Point) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.dynamic, point, strict=True))

    def sample(
        self,
        point: tuple[int, ...],
        mesh: Mapping[str, int] | None = None,
        orders: Mapping[str, Sequence[str]] | None = None,
    ) -> Sample:
        """The step at a point on a mesh, by default the reference mesh; in given orders, or as scheduled."""
        with lazy_graph_modules():
            return self._sample(self.step(point), mesh or self.settings.rules.mesh, orders or {})

    def most_bytes(self, point: tuple[int, ...], mesh: Mapping[str, int] | None = None) -> int:
        """The most live bytes at a point on a mesh, also where the passes choose other ops than at the reference."""
        with lazy_graph_modules():
            placed = self._place(self.step(point), mesh or self.settings.rules.mesh, {})
        return max(placed.live)

    def _place(
        self, found: CapturedStep, mesh: Mapping[str, int], orders: Mapping[str, Sequence[str]]
    ) -> _Placed:
        rules = replace(self.settings.rules, mesh=mesh)
        settings = replace(self.settings, rules=rules, budget_bytes=None)
        step = reshard_step(found, mesh)
        inspection = Inspection(
            settings=settings, captured=step, stages=Stages(None), is_brief=True, orders=orders
        )
        with no_garbage_collection(), remembered_results():
            persistent = persistent_bytes(self.module, step, settings.optimizer)
            halves = inspection.scheduled_halves(always_bytes(persistent, settings.micro_batches))
        live = [sum(row) + sum(outside) for _, memory, outside in halves for row in memory.live]
        in_optimizer = sum(persistent[name] for name in ("parameters", "optimizer", "gradients", "inputs"))
        return _Placed(step, persistent, halves, (*live, in_optimizer))

    def _sample(
        self, found: CapturedStep, mesh: Mapping[str, int], orders: Mapping[str, Sequence[str]]
    ) -> Sample:
        settings, further = self.settings, "" if found.placed is None else found.placed.axis.group_name
        step, persistent, halves, live = self._place(found, mesh, orders)
        nodes = self._nodes_before_placing(found, step.context)
        own = kernels = tuple(tuple(kernels_of(of_half)) for of_half in nodes)
        if self.merged is not None:
            kernels = tuple(
                tuple(kernels_merged_as(of_half, names))
                for of_half, names in zip(nodes, self.merged, strict=True)
            )
        at_end = dict(zip(CATEGORIES, halves[0][1].live[-1], strict=True))
        return Sample(
            orders={half.name: tuple(node.name for node in half.gm.graph.nodes) for half, _, _ in halves},
            persistent=persistent,
            activations=at_end["activations"],
            gathered=at_end["gathered"],
            live=live,
            kernels=kernels,
            is_merged_so=names_in(own) == names_in(kernels),
            copy_seconds=tuple(
                _seconds(kernels_of(list(half.gm.graph.nodes)), settings.card)
                - _seconds(before, settings.card)
                for (half, _, _), before in zip(halves, own, strict=True)
            ),
            traffic=_traffic_of(halves, lambda group: group != further),
            moved=_traffic_of(halves, lambda group: group == further),
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

        args, kwargs = tree_map(fitted, (tuple(self.args), dict(self.kwargs)))
        return args, kwargs


def _before_placing(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """A half as lowering leaves it before collectives are placed, but with its shard ops."""
    copied = copy_graph(gm)
    for step in LOWERING.passes[1:]:
        step.run(copied, context)
    return copied


def _seconds(kernels: Sequence[Kernel], card: HardwareCard) -> float:
    return sum(kernel_seconds(kernel, card) for kernel in kernels)


def names_in(kernels: Sequence[Sequence[Kernel]]) -> list[list[tuple[str, ...]]]:
    """Names of the nodes of each kernel, by half."""
    return [[tuple(node.name for node in kernel.nodes) for kernel in of_half] for of_half in kernels]


def _traffic_of(
    halves: Sequence[tuple[ScheduledHalf, CategorizedMemory, list[int]]], counts: Callable[[str], bool]
) -> dict[tuple[str, str], tuple[int, int]]:
    """(bytes, number) of the collectives by half and kind, of the groups that count."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for half, _, _ in halves:
        for node in filter(is_collective, half.gm.graph.nodes):
            if counts(group_name(node)):
                key = (half.name, collective_kind(node))
                num_bytes, count = found.get(key, (0, 0))
                found[key] = (num_bytes + collective_bytes(node), count + 1)
    return found


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
