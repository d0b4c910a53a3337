"""torch.distributed.checkpoint.state_dict: full and sharded, flat and nested, from one rank and from all."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import UNCOMPILED, compile_if_asked, shard_units
from support.parity import Lockstep, check_sharded_parity, local_piece, make_adam, start_lockstep
from support.toy_models import WORKLOADS, build_mlp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

WORKLOAD = WORKLOADS["mlp_5_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Options to take a state with, and to give it to another model with."""

    take: StateDictOptions
    give: StateDictOptions
    is_full: bool = False
    only_on_rank_0: bool = False


FULL_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ROUTES = {
    "sharded": Route(take=StateDictOptions(), give=StateDictOptions()),
    "sharded_flat": Route(
        take=StateDictOptions(flatten_optimizer_state_dict=True),
        give=StateDictOptions(flatten_optimizer_state_dict=True),
    ),
    "sharded_cpu": Route(take=StateDictOptions(cpu_offload=True), give=StateDictOptions()),
    "full": Route(
        take=StateDictOptions(full_state_dict=True), give=StateDictOptions(full_state_dict=True), is_full=True
    ),
    "full_on_rank_0": Route(take=FULL_CPU, give=FROM_RANK_0, is_full=True, only_on_rank_0=True),
}


def all_tensors(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of nested dicts and lists, with its path."""
    items = enumerate(state) if isinstance(state, list) else state.items() if isinstance(state, dict) else ()
    for key, value in items:
        if isinstance(value, Tensor):
            yield f"{path}/{key}", value
        else:
            yield from all_tensors(value, f"{path}/{key}")


def check_equals_unsharded(state: Any, reference_state: Any, route: Route) -> None:
    """The keys of the unsharded model's state in the same order, and whole tensors or the right shards."""
    found, expected = list(all_tensors(state)), list(all_tensors(reference_state))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, value), (_, full) in zip(found, expected, strict=True):
        if value.ndim == 0:
            assert value.item() == full.item(), path
        elif route.is_full:
            assert not isinstance(value, DTensor), path
            assert_close(value, full.detach(), msg=path)
        else:
            assert isinstance(value, DTensor), path
            assert_close(value.to_local(), local_piece(full.detach()), msg=path)


def move_state(implementation: str, route_name: str) -> None:
    """Model and optimizer state equal the unsharded ones', and another model trains on from them."""
    route = ROUTES[route_name]
    lockstep = start_lockstep(WORKLOAD, implementation)
    lockstep.train(2)
    flat = route.take.flatten_optimizer_state_dict
    expected = get_state_dict(
        lockstep.reference,
        lockstep.optimizers[0],
        options=StateDictOptions(flatten_optimizer_state_dict=flat),
    )
    # Through the compiled module where there is one, as scripts do: names have no _orig_mod prefix.
    state = get_state_dict(lockstep.forward, lockstep.optimizers[1], options=route.take)
    if route.only_on_rank_0 and dist.get_rank() != 0:
        assert state == ({}, {})
    else:
        check_equals_unsharded(state[0], expected[0], route)
        check_equals_unsharded(state[1], expected[1], route)
    state = copy.deepcopy(state)
    torch.manual_seed(7)
    model = WORKLOAD.build()
    shard_units(implementation, model, WORKLOAD.list_units(model))
    optimizer = make_adam(model.parameters())
    # One call for both would not do: torch's set_state_dict takes an empty model state for "no model".
    set_model_state_dict(model, state[0], options=route.give)
    set_optimizer_state_dict(model, optimizer, state[1], options=route.give)
    other = Lockstep(
        workload=WORKLOAD,
        reference=lockstep.reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[lockstep.optimizers[0], optimizer],
    )
    lockstep.model.zero_grad()
    for step in (2, 3):
        other.backward(step)
        other.update(step)


def take_model_and_optimizer_apart(implementation: str) -> None:
    """The functions for one of the two give what the one for both gives."""
    lockstep = start_lockstep(WORKLOAD, implementation)
    lockstep.train(2)
    model, optimizer = lockstep.model, lockstep.optimizers[1]
    both = get_state_dict(model, optimizer)
    apart = (get_model_state_dict(model), get_optimizer_state_dict(model, optimizer))
    for one, other in zip(both, apart, strict=True):
        pairs = zip(all_tensors(one), all_tensors(other), strict=True)
        for (path, value), (other_path, other_value) in pairs:
            assert path == other_path
            assert value is other_value or value.to_local().data_ptr() == other_value.to_local().data_ptr()
    saved = copy.deepcopy(apart)
    lockstep.backward(2)
    for value in (*lockstep.optimizers,):
        value.step()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    set_model_state_dict(model, saved[0])
    set_optimizer_state_dict(model, optimizer, saved[1])
    again = (get_model_state_dict(model), get_optimizer_state_dict(model, optimizer))
    for (path, value), (_, expected) in zip(all_tensors(list(again)), all_tensors(list(saved)), strict=True):
        if value.ndim:
            assert torch.equal(value.to_local(), expected.to_local()), path


def leave_frozen_out(implementation: str) -> None:
    """Frozen parameters stay out if asked, and strict=False loads what is left."""
    model = WORKLOAD.build()
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    shard_units(implementation, model, WORKLOAD.list_units(model))
    state = get_model_state_dict(
        model, options=StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
    )
    assert list(state) == ["0.bias", "2.bias"]
    weight = model[0].weight.full_tensor()
    ones = {name: torch.ones_like(value) for name, value in model.state_dict().items() if name in state}
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        set_model_state_dict(model, ones)
    set_model_state_dict(model, ones, options=StateDictOptions(strict=False))
    assert torch.equal(model[0].bias.full_tensor(), torch.ones(5))
    assert torch.equal(model[0].weight.full_tensor(), weight)


def fill_meta_model(implementation: str, from_rank_0: bool) -> None:
    """A whole unsharded state, on every rank or on rank 0 only, becomes the shards of a model on meta."""
    torch.manual_seed(42)
    reference = WORKLOAD.build()
    with torch.device("meta"):
        model = WORKLOAD.build()
    shard_units(implementation, model, WORKLOAD.list_units(model))
    is_given = not from_rank_0 or dist.get_rank() == 0
    state = copy.deepcopy(reference.state_dict()) if is_given else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(model, state, options=options)
    check_sharded_parity(reference, model)
    Lockstep(
        workload=WORKLOAD,
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[make_adam(reference.parameters()), make_adam(model.parameters())],
    ).train(2)


def fill_tied_meta_model(implementation: str, retie: bool) -> None:
    """Assigned tensors end a tie in an unsharded model, but not in a sharded one; tying again is harmless.

    FSDP2 restores the tie too, in its first forward, after the optimizer was made.
    """
    workload = WORKLOADS["transformer"]
    torch.manual_seed(42)
    state = workload.build().state_dict()
    with torch.device("meta"):
        reference, model = workload.build(), workload.build()
    shard_units(implementation, model, workload.list_units(model))
    # Clones, as values that share storage would be assigned as views of one storage.
    states = [{name: value.clone() for name, value in state.items()} for _ in range(2)]
    reference.load_state_dict(states[0], assign=True)
    set_model_state_dict(model, states[1], options=StateDictOptions(full_state_dict=True))
    assert reference.output.weight is not reference.tokens.weight
    assert model.output.weight is model.tokens.weight
    reference.output.weight = reference.tokens.weight
    if retie:
        model.output.weight = model.tokens.weight
    Lockstep(
        workload=workload,
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[make_adam(reference.parameters()), make_adam(model.parameters())],
    ).train(2)


def load_clones_in_place(implementation: str) -> None:
    """Dims 2 to 5, uneven or smaller than the number of ranks: shards alias, clones are copied into them."""
    for dim in (2, 3, 4, 5):
        torch.manual_seed(dim)
        reference = build_mlp((dim, 3 * dim), (3 * dim, dim))
        model = copy.deepcopy(reference)
        shard_units(implementation, model, [model[0]], reshard_after_forward=dim % 2 == 0)
        inputs = torch.ones(2, dim)
        assert_close(model(inputs), reference(inputs))
        state = model.state_dict()
        pointers = {name: value.to_local().data_ptr() for name, value in state.items()}
        found = {name: value.to_local().data_ptr() for name, value in model.named_parameters()}
        assert found == pointers, f"dim {dim}"
        clones = {name: value.detach().clone() + 1 for name, value in state.items()}
        model.load_state_dict(clones)
        after = {name: value.to_local().data_ptr() for name, value in model.named_parameters()}
        assert after == pointers, f"dim {dim}"
        for name, value in reference.state_dict().items():
            assert_close(state[name].full_tensor(), value + 1, msg=f"dim {dim}: {name}")
        reference.load_state_dict({name: value + 1 for name, value in reference.state_dict().items()})
        assert_close(model(inputs), reference(inputs))


def say_how_to_load_unsharded_state(assign: bool) -> None:
    """The refusal lists every parameter and the way; the way works; also through an outer, plain module."""
    from graphshard.errors import GraphShardError

    torch.manual_seed(1)
    other = WORKLOAD.build()
    model = WORKLOAD.build()
    shard_units("sharded", model, WORKLOAD.list_units(model))
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    wrapper = nn.ModuleDict({"inner": model})
    for outer, prefix, source in ((model, "", other), (wrapper, r"inner\.", nn.ModuleDict({"inner": other}))):
        state = source.state_dict()
        pattern = rf"4 value.*{prefix}0\.weight \(5, 4\).*{prefix}2\.bias \(2,\).*set_model_state_dict.*full_state_dict"
        with pytest.raises(RuntimeError, match=pattern) as caught:
            outer.load_state_dict(state, assign=assign)
        assert isinstance(caught.value, GraphShardError)
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), before[name])
    set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    check_sharded_parity(other, model)


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_state_moves_to_another_model(run_on_gloo_ranks, implementation, route):
    run_on_gloo_ranks(2, move_state, implementation, route)


@pytest.mark.parametrize("route", ["sharded", "full_on_rank_0"])
def test_state_moves_over_empty_shards(run_on_gloo_ranks, route):
    run_on_gloo_ranks(4, move_state, "sharded", route)


@pytest.mark.parametrize("route", ["sharded_flat", "full_on_rank_0"])
def test_state_of_compiled_model_moves(run_on_gloo_ranks, route):
    run_on_gloo_ranks(2, move_state, "compiled", route)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_model_and_optimizer_apart(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, take_model_and_optimizer_apart, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_frozen_parameters_left_out(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, leave_frozen_out, implementation)


@pytest.mark.parametrize("from_rank_0", [False, True], ids=["on_every_rank", "on_rank_0"])
@pytest.mark.parametrize(
    ("implementation", "world_size"), [("fsdp2", 2), ("sharded", 2), ("sharded", 4), ("compiled", 2)]
)
def test_whole_state_fills_meta_model(run_on_gloo_ranks, implementation, world_size, from_rank_0):
    run_on_gloo_ranks(world_size, fill_meta_model, implementation, from_rank_0)


@pytest.mark.parametrize(
    ("implementation", "retie"),
    [("sharded", False), ("sharded", True), ("compiled", False)],
)
def test_whole_state_fills_tied_meta_model(run_on_gloo_ranks, implementation, retie):
    run_on_gloo_ranks(2, fill_tied_meta_model, implementation, retie)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_clones_are_loaded_in_place(run_on_gloo_ranks, implementation, world_size):
    run_on_gloo_ranks(world_size, load_clones_in_place, implementation)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_refusal_of_unsharded_state_says_the_way(run_on_gloo_ranks, assign):
    run_on_gloo_ranks(2, say_how_to_load_unsharded_state, assign)
