"""What `fully_shard` makes of a model: units, classes, names, placements, the default mesh, one rank."""

import pytest
import torch
from support.implementations import (
    EVERY,
    UNCOMPILED,
    compile_if_asked,
    pick_fsdp_module,
    pick_fully_shard,
    world_mesh,
)
from support.parity import Lockstep, check_shard, check_sharded_parity, local_piece, make_adam, start_lockstep
from support.toy_models import WORKLOADS, Transformer, build_mlp
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close


def check_classes_and_names(implementation: str) -> None:
    model = Transformer()
    names = list(dict(model.named_parameters()))
    block_class = type(model.layers[0])
    fully_shard, fsdp_module = pick_fully_shard(implementation), pick_fsdp_module(implementation)
    assert fully_shard(model.layers[0], mesh=world_mesh()) is model.layers[0]
    assert isinstance(model.layers[0], fsdp_module) and isinstance(model.layers[0], block_class)
    assert not isinstance(model.layers[1], fsdp_module)
    assert not isinstance(model.layers[0].expand, fsdp_module)
    assert not isinstance(model.tokens.weight, DTensor), "only the unit's own parameters are sharded"
    fully_shard(model, mesh=world_mesh())
    assert isinstance(model, fsdp_module) and isinstance(model, Transformer)
    assert not isinstance(model.layers[0].expand, fsdp_module)
    assert list(dict(model.named_parameters())) == names
    assert model.output.weight is model.tokens.weight


def check_local_pieces(implementation: str, num_rows: int) -> None:
    linear = nn.Linear(3, num_rows)
    weight = linear.weight.detach().clone()
    model = pick_fully_shard(implementation)(linear, mesh=world_mesh())
    check_shard("weight", weight, model.weight)
    assert model.weight.to_local().shape == local_piece(weight).shape
    assert_close(model.weight.full_tensor(), weight, rtol=0, atol=0)


def check_parameters_are_shards_around_a_step(implementation: str, reshard_after_forward: bool) -> None:
    model = build_mlp((6, 5), (5, 3))
    fully_shard = pick_fully_shard(implementation)
    fully_shard(model[0], mesh=world_mesh(), reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=world_mesh(), reshard_after_forward=reshard_after_forward)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    compile_if_asked(implementation, model)(torch.ones(2, 6)).sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and tuple(parameter.placements) == (Shard(0),), name
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements, name
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def train_list_of_modules(implementation: str) -> None:
    """Units: [tokens, positions] and [norm, output] of an untied decoder, each block, the (empty) root."""
    workload = WORKLOADS["transformer"]
    torch.manual_seed(42)
    reference, model = untied_transformer(), untied_transformer()
    model.load_state_dict(reference.state_dict())
    fully_shard = pick_fully_shard(implementation)
    units = [[model.tokens, model.positions], *model.layers, [model.norm, model.output], model]
    for unit in units:
        fully_shard(unit, mesh=world_mesh())
    lockstep = Lockstep(
        workload=workload,
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[make_adam(reference.parameters()), make_adam(model.parameters())],
    )
    lockstep.train(3)


def untied_transformer() -> Transformer:
    model = Transformer()
    model.output.weight = nn.Parameter(torch.randn(11, 16) / 4)
    return model


def train_list_of_linears(implementation: str) -> None:
    """The first and the last layer are one unit, the middle one is the root's."""
    torch.manual_seed(42)
    reference, model = (build_mlp((8, 15), (15, 9), (9, 4)) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    pick_fully_shard(implementation)([model[0], model[4]], mesh=world_mesh())
    train_three_steps(implementation, reference, pick_fully_shard(implementation)(model, mesh=world_mesh()))


def train_three_steps(implementation: str, reference: nn.Module, model: nn.Module) -> None:
    Lockstep(
        workload=WORKLOADS["mlp_even"],
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[make_adam(reference.parameters()), make_adam(model.parameters())],
    ).train(3)


def train_nested_units(implementation: str) -> None:
    """A unit inside a unit inside the root."""
    torch.manual_seed(42)
    reference = nn.Sequential(build_mlp((8, 12), (12, 8)), nn.Linear(8, 5))
    model = nn.Sequential(build_mlp((8, 12), (12, 8)), nn.Linear(8, 5))
    model.load_state_dict(reference.state_dict())
    for unit in (model[0][0], model[0], model):
        pick_fully_shard(implementation)(unit, mesh=world_mesh())
    train_three_steps(implementation, reference, model)


def train_on_default_mesh(implementation: str) -> None:
    model = build_mlp((8, 4))
    reference = build_mlp((8, 4))
    reference.load_state_dict(model.state_dict())
    pick_fully_shard(implementation)(model)
    check_sharded_parity(reference, model)


def count_collectives_of_a_step(implementation: str) -> int:
    """Collectives of any kind that two training steps run, by the profiler's record."""
    lockstep = start_lockstep(WORKLOADS["mlp_even"], implementation)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        lockstep.train(2)
    names = [event.name for event in profile.events()]
    assert any("addmm" in name or "mm" in name for name in names), "the profiler saw no compute"
    prefixes = ("c10d::", "_c10d_functional::", "gloo:")
    return sum(name.startswith(prefixes) and "wait_tensor" not in name for name in names)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_classes_and_names(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, check_classes_and_names, implementation)


@pytest.mark.parametrize("num_rows", [8, 5, 3, 1])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_local_piece_is_the_chunk_of_this_rank(run_on_gloo_ranks, implementation, num_rows):
    run_on_gloo_ranks(4, check_local_pieces, implementation, num_rows)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("implementation", EVERY)
def test_parameters_stay_the_same_shards_around_a_step(
    run_on_gloo_ranks, implementation, reshard_after_forward
):
    run_on_gloo_ranks(2, check_parameters_are_shards_around_a_step, implementation, reshard_after_forward)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_lists_of_modules_are_units(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_list_of_modules, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_list_of_linears_is_one_unit(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_list_of_linears, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_nested_units(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_nested_units, implementation)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default mesh is the accelerator's")
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_default_mesh_is_the_world(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_on_default_mesh, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_one_rank_runs_no_collective(run_on_gloo_ranks, implementation):
    assert run_on_gloo_ranks(1, count_collectives_of_a_step, implementation) == [0]


@pytest.mark.parametrize("implementation", EVERY)
def test_two_ranks_run_collectives(run_on_gloo_ranks, implementation):
    """The counter of the test above does count."""
    first, second = run_on_gloo_ranks(2, count_collectives_of_a_step, implementation)
    assert first == second > 0
