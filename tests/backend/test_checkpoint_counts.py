"""Activation checkpointing does not change the collectives: one gather serves recomputation and gradient."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from support.checkpointed_models import TRACEABLE, build_checkpointed, units_of
from support.small_graphs import num_targets, run_pass
from support.torch_versions import NEEDS_REGION_BUDGET, region_activation_memory_budget
from test_counts import HELD
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphshard
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from graphshard.ir.rewrite import copy_graph, output_values
from graphshard.passes import BucketCollectives
from graphshard.testing import CapturedGraphs, capture_graphs

NUM_BLOCKS = 2
UNITS = {"root", "blocks.0", "blocks.1"}


def _sharded(form: str, mesh, reshard: bool | None) -> nn.Module:
    model = build_checkpointed(form, num_blocks=NUM_BLOCKS)
    for module in [*units_of(form, model), model]:
        graphshard.fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return model


def _capture(form: str, mesh, reshard: bool | None) -> CapturedGraphs:
    return capture_graphs(_sharded(form, mesh, reshard), torch.randn(2, 6))


@pytest.fixture(scope="module")
def captured_on_2() -> Callable[[str, bool | None], CapturedGraphs]:
    """`captured_on_2(form, reshard)`: the graphs on rank 0 of 2, captured once."""

    @functools.cache
    def capture(form: str, reshard: bool | None) -> CapturedGraphs:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            return _capture(form, init_device_mesh("cpu", (2,)), reshard)
        finally:
            dist.destroy_process_group()

    return capture


def _num_collectives(graphs: CapturedGraphs) -> tuple[int, int, int]:
    """Gathers forward, gathers backward, reductions backward."""
    forward, backward = copy_graph(graphs.forward), copy_graph(graphs.backward)
    run_pass(BucketCollectives(), forward, graphs.context.for_forward(), *HELD)
    run_pass(BucketCollectives(), backward, graphs.context.for_backward(), *HELD)
    assert num_targets(forward, REDUCE_SCATTER) == 0
    return (
        num_targets(forward, ALL_GATHER),
        num_targets(backward, ALL_GATHER),
        num_targets(backward, REDUCE_SCATTER),
    )


def _saved_shapes(graphs: CapturedGraphs) -> list[tuple[int, ...]]:
    placeholders = graphs.backward.graph.find_nodes(op="placeholder")
    num_saved = sum(not node.name.startswith("tangents_") for node in placeholders)
    return [tuple(node.meta["val"].shape) for node in output_values(graphs.forward.graph)[-num_saved:]]


def _num_saved_activations(graphs: CapturedGraphs) -> int:
    """Saved tensors as wide as a hidden layer, which only activations are."""
    return _saved_shapes(graphs).count((2, 7))


@pytest.mark.parametrize(
    ("form", "reshard"),
    [
        pytest.param(form, reshard, marks=[pytest.mark.slow] if reshard is not True and form != "function" else [])
        for form in TRACEABLE
        for reshard in (True, False, None)
    ],
)
def test_collectives_per_step(captured_on_2, form, reshard):
    graphs = captured_on_2(form, reshard)
    backward_gathers = {True: NUM_BLOCKS + 1, False: 0, None: NUM_BLOCKS}[reshard]
    assert _num_collectives(graphs) == (NUM_BLOCKS + 1, backward_gathers, NUM_BLOCKS + 1)


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_checkpointed_activations_are_not_saved(captured_on_2, reshard):
    for form in TRACEABLE:
        expected = NUM_BLOCKS if form in ("none", "selective") else 0
        assert _num_saved_activations(captured_on_2(form, reshard)) == expected, form


@pytest.mark.parametrize("form", TRACEABLE)
def test_no_full_parameter_is_saved_when_resharding(captured_on_2, form):
    graphs = captured_on_2(form, True)
    full = {math.prod(binding.shape) for binding in graphs.context.parameters if len(binding.shape) > 1}
    assert not full & {math.prod(shape) for shape in _saved_shapes(graphs)}


@pytest.mark.parametrize(
    "form",
    [pytest.param("method", marks=pytest.mark.slow), "submodule", pytest.param("wrapper", marks=pytest.mark.slow)],
)
def test_shards_in_checkpointed_regions_enter_padded(fake_group, form):
    """Rank 3 of 4 has no row of the 5: it must trace the graph of the others all the same."""
    texts = []
    for rank in (0, 3):
        graphs = _capture(form, fake_group(4, rank), None)
        assert {binding.unit for binding in graphs.context.parameters} == UNITS
        inputs = graphs.captured.graph.find_nodes(op="placeholder")
        texts.append([str(node.meta["val"].shape) for node in inputs])
        for binding in graphs.context.parameters:
            shard = inputs[binding.position].meta["val"]
            assert type(shard).__name__ == "FakeTensor" and shard.shape[0] == -(-binding.shape[0] // 4)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("form", ["wrapper", "wrapper_unit"])
def test_wrapper_is_no_part_of_names(captured_on_2, fake_group, form):
    plain = [name for name, _ in build_checkpointed("none").named_parameters()]
    graphs = captured_on_2(form, True)
    assert {binding.name for binding in graphs.context.parameters} == set(plain)
    assert {binding.unit for binding in graphs.context.parameters} == UNITS
    assert list(_sharded(form, fake_group(2), None).state_dict()) == plain


def _saved_numel(graphs: CapturedGraphs) -> int:
    """Elements of all saved activations: what has the batch of 2 in front."""
    return sum(math.prod(shape) for shape in _saved_shapes(graphs) if shape[0] == 2)


@pytest.mark.parametrize("reshard", [pytest.param(True, marks=pytest.mark.slow), False])
def test_activation_memory_budget(fake_group, reshard):
    """The budget decides on activations; what is gathered again stays as the unit says.

    Except at 0, where torch keeps the inputs of the graph alone.
    """
    mesh = fake_group(2)
    saved = []
    for budget in (1.0, 0.5, 0.0):
        with functorch_config.patch(activation_memory_budget=budget):
            graphs = _capture("none", mesh, reshard)
        saved.append(_saved_numel(graphs))
        gathers = NUM_BLOCKS + 1 if reshard or budget == 0 else 0
        assert _num_collectives(graphs) == (NUM_BLOCKS + 1, gathers, NUM_BLOCKS + 1)
    assert saved[0] > saved[1] > saved[2] == 2 * 6


@NEEDS_REGION_BUDGET
def test_activation_memory_budget_of_a_region(fake_group):
    model = _sharded("none", fake_group(2), True)

    def step(x: Tensor) -> Tensor:
        with region_activation_memory_budget(0.0):
            return model(x)

    graphs = capture_graphs(step, torch.randn(2, 6))
    assert _num_saved_activations(graphs) == 0
    assert _num_collectives(graphs) == (NUM_BLOCKS + 1,) * 3
