"""Searches placements of weights that are cheaper than the ready plans, for ``placements="auto"``.

The model is exported with one of its equal blocks, once for each way to hold the values between its parts: whole, or
along the sequence as a ready plan states it. The placements of one part (attention, MLP, embedding, output layer) are
tried in all combinations, one part after the other, until none improves. A trial runs the passes of training on the
joint graph and sums the prices of its kernels and collectives. It counts no overlap on the axis: values that are moved
between placements are needed at once. What a search finds is then predicted like any candidate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import Placement

from ..capture import (
    ExportedModel,
    PlacedStep,
    export_model,
    num_repeated_blocks,
    stack_paths,
    with_blocks,
)
from ..cost import CostModel, GroupTopology, compute_seconds
from ..errors import GraphShardError
from ..ir import MeshAxis, MeshLayout, is_collective, remembered_results
from ..parallel import Choice, Stated, WeightGroup, choice_of, parameters_of, parts_of, weight_groups
from ..propagation import remembered_rules
from .settings import Settings

#: Seconds of trials on the axis of the placements: by the topology of the axis, the text of the placements that the
#: search began at, and the choice. They do not depend on the other axes.
TrialSeconds = dict[tuple[GroupTopology, str, Choice], float]

#: Trials after which a search keeps the best that it has found. No clock stops it: ranks must find the same.
MOST_TRIALS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSearch:
    """Searches for one model.

    Attributes:
        settings: of the inspection; its rules have the mesh.
        module: the model.
        args, kwargs, loss: of the step.
        most_trials: trials after which the search ends.
        known: trials of searches on meshes with other axes of data parallelism; trials are added.
    """

    settings: Settings
    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    most_trials: int = MOST_TRIALS
    known: TrialSeconds = field(default_factory=dict)

    def best(self, plan: Stated) -> tuple[Stated, int]:
        """The cheapest placements that are found, and the number of trials.

        Args:
            plan: where the search begins. Its placements of values stay.

        Raises:
            GraphShardError: the model cannot be exported with one block of each stack.
        """
        settings, axis = self.settings, self.settings.rules.placed_axis
        assert axis is not None, "one rank has no placements"
        num_blocks = num_repeated_blocks(self.module)
        short = with_blocks(self.module, 1) if num_blocks else self.module
        held_in_short = _of(short, plan)
        with ExitStack() as stack, remembered_results(), remembered_rules():
            exported = export_model(
                stack, short, self.args, self.kwargs, rules=settings.rules, loss=self.loss, needs_loss=True,
                placed=PlacedStep(axis=axis, stated=held_in_short), checkpoint=settings.checkpoint,
                device_type=settings.card.device_type,
            )  # fmt: skip
            inputs = {node.name: node for node in exported.outputs.primals}
            weights = {each.call.name: inputs[each.placeholder] for each in exported.plain_parameters(None)}
            trials = _Trials(
                exported=exported, axis=axis, held=held_in_short, num_blocks=num_blocks,
                groups=weight_groups(short, weights, axis.size), prices=settings.prices(_layout(settings.rules.mesh)),
                stacks=stack_paths(self.module), before=self.known, start=repr(held_in_short),
            )  # fmt: skip
            choice = _descend(trials, choice_of(trials.groups, plan), self.most_trials)
        parameters = parameters_of(self.module, trials.groups, choice)
        return Stated(parameters=parameters, inputs=plan.inputs, outputs=plan.outputs), len(trials.known)


@dataclass(slots=True, kw_only=True)
class _Trials:
    """Prices of choices on one exported model.

    Attributes:
        exported: the model with one block of each stack.
        axis: the axis of the placements.
        held: placements of values.
        groups: what is chosen.
        prices: of the mesh.
        stacks, num_blocks: what is inside of a stack counts ``num_blocks`` times.
        known: prices by choice.
        before: seconds on the axis that are known already; those of ``start`` count.
        start: text of the placements that the search began at.
    """

    exported: ExportedModel
    axis: MeshAxis
    held: Stated
    groups: tuple[WeightGroup, ...]
    prices: CostModel
    stacks: tuple[str, ...]
    num_blocks: int
    before: TrialSeconds
    start: str
    known: dict[Choice, float] = field(default_factory=dict)

    def seconds(self, choice: Choice) -> float:
        """The price of a choice; infinite if the passes refuse it."""
        if choice not in self.known:
            parameters = parameters_of(self.exported.model, self.groups, choice)
            placed = PlacedStep(
                axis=self.axis,
                stated=Stated(parameters=parameters, inputs=self.held.inputs, outputs=self.held.outputs),
            )
            key = (self.prices.topology(self.axis.label), self.start, choice)
            if key not in self.before:
                self.before[key] = self._on_axis(placed)
            seconds = self.before[key]
            self.known[choice] = seconds if math.isinf(seconds) else seconds + self._of_shards(placed)
        return self.known[choice]

    def _on_axis(self, placed: PlacedStep) -> float:
        """Kernels and collectives of the axis, one after the other; infinite if the passes refuse the placements."""
        try:
            gm = self.exported.on_one_rank(placed)
        except GraphShardError:
            return math.inf
        total = 0.0
        computed = compute_seconds(gm, self.prices.card)
        for node in gm.graph.nodes:
            seconds = self.prices.node_seconds(node) if is_collective(node) else computed.get(node, 0.0)
            total += seconds * self._weight(_path(node))
        return total

    def _of_shards(self, placed: PlacedStep) -> float:
        """Gathers and reductions of shards: those outside of blocks count, those of blocks only beyond compute."""
        sizes: dict[str, int] = {}
        for each in self.exported.plain_parameters(placed):
            size = math.prod(each.call.shape) * (each.call.dtype or each.dtype).itemsize
            sizes[each.call.unit] = sizes.get(each.call.unit, 0) + size
        if self.prices.topology("shard").num_ranks == 1:
            return 0.0
        found = {
            unit: self.prices.collective_seconds("all_gather", size, "shard")
            + self.prices.collective_seconds("reduce_scatter", size, "shard")
            for unit, size in sizes.items()
        }
        return sum(
            seconds * self._weight(unit) * (1.0 if unit == "root" else 0.1) for unit, seconds in found.items()
        )

    def _weight(self, path: str) -> int:
        inside = any(f".{stack}.0." in f".{path}." for stack in self.stacks)
        return self.num_blocks if inside else 1


def _descend(trials: _Trials, start: Choice, most_trials: int) -> Choice:
    best, has_improved = start, True
    trials.seconds(start)
    while has_improved:
        has_improved = False
        for part in parts_of(trials.groups):
            for choice in _combinations(trials.groups, part, best):
                if len(trials.known) >= most_trials:
                    return best
                if trials.seconds(choice) < trials.seconds(best):
                    best, has_improved = choice, True
    return best


def _combinations(groups: Sequence[WeightGroup], part: Sequence[int], best: Choice) -> Iterator[Choice]:
    for options in itertools.product(*(groups[index].options for index in part)):
        chosen: dict[int, Placement] = dict(zip(part, options, strict=True))
        yield tuple(chosen.get(index, each) for index, each in enumerate(best))


def _of(short: nn.Module, plan: Stated) -> Stated:
    paths = {path for path, _ in short.named_modules()}
    return Stated(
        inputs={path: each for path, each in plan.inputs.items() if path in paths},
        outputs={path: each for path, each in plan.outputs.items() if path in paths},
    )


def _layout(mesh: Mapping[str, int]) -> MeshLayout:
    axes = [MeshAxis(label=name, size=size, group_name=name) for name, size in mesh.items()]
    return MeshLayout.of_axes(axes)


def _path(node: fx.Node) -> str:
    """Path of the module that a node was traced in, in either half."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("L['self'].").replace("._modules['", ".").replace("']", "")
