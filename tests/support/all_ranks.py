"""A training step on all ranks in one process, and the same step of the unsharded model.

Parameters enter as padded shards whose padding is NaN: nothing may read it. Numbers are float64, so
that a difference beyond rounding shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphshard.ir.mesh import MeshLayout
from graphshard.ir.params import padded_shape
from graphshard.pipeline.context import PassContext
from graphshard.testing import run_on_all_ranks
from support.small_models import MODELS, example_batch


@dataclass
class StepResult:
    """What a step gives: each rank's output, and each rank's (padded) gradient shards by name."""

    outputs: list[Tensor]
    gradients: list[dict[str, Tensor]]


@dataclass
class StepInputs:
    """Full parameters by name; for each rank a batch and the gradient of its output."""

    parameters: dict[str, Tensor]
    batches: list[Tensor]
    tangents: list[Tensor]


def pieces(full: Tensor, dim: int, num_ranks: int, padding: float = float("nan")) -> list[Tensor]:
    """The padded shard of each rank."""
    rows = padded_shape(full.shape, dim, num_ranks)[dim]
    missing = list(full.shape)
    missing[dim] = rows * num_ranks - full.shape[dim]
    padded = torch.cat([full, full.new_full(missing, padding)], dim)
    return [piece.contiguous() for piece in padded.split(rows, dim)] if rows else [padded] * num_ranks


def step_inputs(name: str, num_ranks: int, seed: int = 0) -> tuple[StepInputs, StepResult]:
    """Random inputs of one step, and what the unsharded model makes of them."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = MODELS[name]().double()
    batches = [example_batch(name, generator, torch.float64) for _ in range(num_ranks)]
    outputs = [model(batch) for batch in batches]
    tangents = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outputs]
    torch.autograd.backward(outputs, tangents)
    named = dict(model.named_parameters(remove_duplicate=False))
    shards = {
        key: pieces(param.grad / num_ranks, 0, num_ranks, padding=0.0)
        for key, param in named.items()
        if param.grad is not None
    }
    expected = StepResult(
        outputs=[out.detach() for out in outputs],
        gradients=[{key: shard[rank] for key, shard in shards.items()} for rank in range(num_ranks)],
    )
    return StepInputs({key: param.detach() for key, param in named.items()}, batches, tangents), expected


#: In place of a unit's handle: it leads nowhere.
NO_UNITS = [torch.empty(0, dtype=torch.int8)]


def is_handle(node: fx.Node) -> bool:
    """True for the input that stands for a unit."""
    return node.op == "placeholder" and node.meta["val"].dtype is torch.int8


def placeholder_values(gm: fx.GraphModule, ctx: PassContext, inputs: StepInputs) -> list[list[Tensor]]:
    """The values of a joint or forward graph's placeholders, for each rank."""
    columns = []
    for node in gm.graph.find_nodes(op="placeholder"):
        binding = ctx.binding(node.name)
        if is_handle(node):
            columns.append(NO_UNITS * len(inputs.batches))
        elif binding is not None:
            columns.append(pieces(inputs.parameters[binding.name], binding.dim, binding.group_size))
        else:
            columns.append(inputs.tangents if node.name.startswith("tangents_") else inputs.batches)
    return [list(row) for row in zip(*columns, strict=True)]


def run_joint(gm: fx.GraphModule, ctx: PassContext, inputs: StepInputs) -> StepResult:
    """A step of a joint graph, at either level."""
    results = run_on_all_ranks(gm, placeholder_values(gm, ctx, inputs), ctx.mesh)
    return StepResult(
        outputs=[result[0] for result in results],
        gradients=[_gradients(result[ctx.first_gradient :], ctx) for result in results],
    )


def run_halves(
    forward: fx.GraphModule, backward: fx.GraphModule, ctx: PassContext, inputs: StepInputs
) -> StepResult:
    """A step of a forward and a backward graph, the values saved by one fed to the other."""
    names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    num_saved = sum(not name.startswith("tangents_") for name in names)
    first = run_on_all_ranks(forward, placeholder_values(forward, ctx, inputs), ctx.mesh)
    saved = [list(result[len(result) - num_saved :]) for result in first]
    values = [[*kept, tangent] for kept, tangent in zip(saved, inputs.tangents, strict=True)]
    second = run_on_all_ranks(backward, values, ctx.mesh)
    return StepResult(
        outputs=[result[0] for result in first], gradients=[_gradients(result, ctx) for result in second]
    )


def _gradients(values: Sequence[Tensor | None], ctx: PassContext) -> dict[str, Tensor]:
    found = {one.name: values[one.gradient] for one in ctx.parameters if one.gradient >= 0}
    return {name: value for name, value in found.items() if value is not None}


def assert_same(actual: StepResult, expected: StepResult, *, bitwise: bool = False) -> None:
    """Outputs and gradients agree: to the last bit, or to float64 rounding."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(actual.outputs, expected.outputs, **tolerance)
    for mine, theirs in zip(actual.gradients, expected.gradients, strict=True):
        assert mine and mine.keys() <= theirs.keys()  # a tied parameter has one name here, several there
        torch.testing.assert_close(mine, {name: theirs[name] for name in mine}, **tolerance)


def assert_all_gradients(actual: StepResult, ctx: PassContext, trainable: int) -> None:
    """Every rank has a gradient for each of ``trainable`` parameters."""
    assert [len(gradients) for gradients in actual.gradients] == [trainable] * ctx.mesh.num_ranks


def run_values(
    graphs: fx.GraphModule | Sequence[fx.GraphModule], inputs: Sequence[Sequence[Tensor]], mesh: MeshLayout
) -> list[list[Tensor]]:
    """Outputs of each rank as lists of tensors; inputs and outputs without those of the handles."""
    per_rank = [graphs] * len(inputs) if isinstance(graphs, fx.GraphModule) else graphs
    rows = []
    for gm, values in zip(per_rank, inputs, strict=True):
        given = iter(values)
        nodes = gm.graph.find_nodes(op="placeholder")
        rows.append([NO_UNITS[0] if is_handle(node) else next(given) for node in nodes])
    results = run_on_all_ranks(per_rank, rows, mesh)
    return [[value for value in result if value is not None] for result in results]
