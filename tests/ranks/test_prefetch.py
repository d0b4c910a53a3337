"""Explicit prefetching: which gathers start after which unit, and that it changes nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.implementations import EVERY, compile_if_asked, pick_fully_shard, world_mesh
from support.parity import check_sharded_parity
from support.toy_models import build_mlp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard import fully_shard
from graphshard.backend.options import BackendOptions
from graphshard.backend.pipelines import half_pipeline
from graphshard.ir.collectives import GATHERS, REDUCE_SCATTERS, is_wait
from graphshard.pipeline.provenance import reduced_parameters, shards_behind
from graphshard.testing import capture_graphs

SIZES = ((5, 5), (5, 5), (5, 5), (5, 5))


def _shard_layers(fully_shard: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    layers = [module for module in model if isinstance(module, nn.Linear)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return layers


def _set_prefetch(layers: list[nn.Module], distance: int) -> None:
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + distance])
        layer.set_modules_to_backward_prefetch(layers[max(index - distance, 0) : index][::-1])


def _scheduled(model: nn.Module, overlap: bool | str = True) -> dict[str, list[str]]:
    """`start U` and `wait U` of the gathers, and of reductions with a `-`, in each scheduled half."""
    found: dict[str, list[str]] = {}
    graphs = capture_graphs(model, torch.ones(2, 5))
    pipeline = half_pipeline(BackendOptions.parse({"overlap": overlap}))
    halves = {
        "forward": (graphs.forward, graphs.context.for_forward()),
        "backward": (graphs.backward, graphs.context.for_backward()),
    }
    for name, (gm, context) in halves.items():
        for step in pipeline.passes[1:]:  # the captured halves are lowered already
            step.run(gm, context)
        served = reduced_parameters(gm, context)
        labels = {}
        for node in gm.graph.nodes:
            if node.target in GATHERS:
                labels[node] = shards_behind(node, context)[0].unit
            elif node.target in REDUCE_SCATTERS:
                labels[node] = "-" + served[node][0].unit
        order = []
        for node in gm.graph.nodes:
            if node in labels:
                order.append(f"start {labels[node]}")
            elif is_wait(node) and node.args[0] in labels:
                order.append(f"wait {labels[node.args[0]]}")
        found[name] = order
    return found


def _gathers(order: list[str]) -> list[str]:
    return [step for step in order if " -" not in step]


def test_forward_gathers_start_two_ahead(fake_group: Callable[..., DeviceMesh]) -> None:
    model = build_mlp(*SIZES)
    layers = _shard_layers(fully_shard, model, fake_group(2))
    default = _scheduled(model)
    assert _gathers(default["forward"]) == [
        "start 0", "wait 0", "start 2", "wait 2", "start 4", "wait 4", "start 6", "wait 6",
    ]  # fmt: skip
    _set_prefetch(layers, 2)
    assert _gathers(_scheduled(model)["forward"]) == [
        "start 0", "wait 0", "start 2", "start 4", "wait 2", "start 6", "wait 4", "wait 6",
    ]  # fmt: skip


def test_backward_gathers_start_two_ahead(fake_group: Callable[..., DeviceMesh]) -> None:
    model = build_mlp(*SIZES)
    layers = _shard_layers(fully_shard, model, fake_group(2))
    # The first layer's weight is not read: its input needs no gradient.
    assert _gathers(_scheduled(model)["backward"]) == [
        "start 6", "wait 6", "start 4", "wait 4", "start 2", "wait 2",
    ]  # fmt: skip
    _set_prefetch(layers, 2)
    assert _gathers(_scheduled(model)["backward"]) == [
        "start 6", "wait 6", "start 4", "start 2", "wait 4", "wait 2",
    ]  # fmt: skip


def _most_open_reductions(order: list[str]) -> int:
    now = most = 0
    for step in order:
        if " -" in step:
            now += 1 if step.startswith("start") else -1
            most = max(most, now)
    return most


def test_input_buffers_limit_open_reductions(fake_group: Callable[..., DeviceMesh]) -> None:
    model = build_mlp(*SIZES)
    layers = _shard_layers(fully_shard, model, fake_group(2))
    assert _most_open_reductions(_scheduled(model, "always")["backward"]) == 2
    layers[0].set_reduce_scatter_max_input_buffers(3)
    assert _most_open_reductions(_scheduled(model, "always")["backward"]) == 3
    layers[0].set_reduce_scatter_max_input_buffers(1)
    assert _most_open_reductions(_scheduled(model, "always")["backward"]) == 1


def train_with_prefetch(implementation: str, distance: int) -> None:
    torch.manual_seed(42)
    reference = build_mlp(*SIZES)
    torch.manual_seed(42)
    model = build_mlp(*SIZES)
    _set_prefetch(_shard_layers(pick_fully_shard(implementation), model, world_mesh()), distance)
    forward = compile_if_asked(implementation, model)
    for step in range(2):
        inputs = [torch.full((3, 5), 1.0 + rank + step) for rank in range(2)]
        for each in inputs:
            (reference(each).square().mean() / 2).backward()
        forward(inputs[torch.distributed.get_rank()]).square().mean().backward()
        check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_prefetching_changes_no_number(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    run_on_gloo_ranks(2, train_with_prefetch, implementation, 2)


def gathers_under_way(distance: int | None) -> tuple[list[str], list[str], list[str]]:
    """Uncompiled: the units whose gather is under way when each layer computes, in two forwards and the last backward.

    Each layer computes a gradient when it is noted for the backward.
    """
    model = build_mlp(*SIZES)
    layers = _shard_layers(pick_fully_shard("sharded"), model, world_mesh())
    if distance is not None:
        _set_prefetch(layers, distance)
    seen: list[str] = []

    def note(*_: Any) -> None:
        units = [layer._graphshard_unit for layer in layers]
        seen.append(" ".join(unit.label for unit in units if unit._prefetched is not None))

    for layer in layers:
        layer.register_forward_hook(note)
        layer.register_full_backward_hook(note)
    rounds = []
    for _ in range(2):
        loss = model(torch.ones(2, 5, requires_grad=True)).sum()
        assert all(layer._graphshard_unit._prefetched is None for layer in layers)
        rounds.append(list(seen))
        seen.clear()
        loss.backward()
    assert all(layer._graphshard_unit._prefetched is None for layer in layers)
    return rounds[0], rounds[1][len(layers) :], list(seen)


@pytest.mark.parametrize(
    ("distance", "first", "second", "backward"),
    [
        (2, ["2 4", "4 6", "6", ""], ["2 4", "4 6", "6", ""], ["2 4", "0 2", "0", ""]),
        (None, ["", "", "", ""], ["2", "4", "6", ""], ["4", "2", "0", ""]),
    ],
)
def test_uncompiled_gathers_start_early(
    run_on_gloo_ranks: Callable[..., list[Any]], distance: int | None, first: Any, second: Any, backward: Any
) -> None:
    """By default the next unit's, in a forward as soon as one has shown which that is."""
    assert run_on_gloo_ranks(2, gathers_under_way, distance) == [(first, second, backward)] * 2


@pytest.mark.parametrize("method", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_a_plain_module_cannot_be_prefetched(fake_group: Callable[..., DeviceMesh], method: str) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=fake_group(2))
    with pytest.raises(ValueError, match="a Linear is not an FSDPModule; give it to fully_shard first"):
        getattr(model, method)([nn.Linear(4, 4)])
