"""State dicts of FullyShardedDataParallel: those of torch's FSDP1, in both directions, and through torch's DCP."""

import copy
import itertools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.comm_counts import count_collectives
from support.fsdp1 import full_parameters, whole, wrap
from support.implementations import compile_if_asked, shard_units
from support.toy_models import build_mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from graphshard import FullyShardedDataParallel
from graphshard.errors import OptionError, OptionTypeError, ParameterStateError, TrainingStateError

LINEARS = ModuleWrapPolicy({nn.Linear})
FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups)


def make(kind: str, seed: int = 0, *, is_adam: bool = True, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model after two steps, with its optimizer; `kind` is a wrapper's, "fsdp2" or "plain".

    On the CPU, FSDP1 of torch 2.13 returns the same numbers for both averages of Adam, so its states are compared
    for SGD.
    """
    torch.manual_seed(seed)
    model: Any = build_mlp((4, 5), (5, 3))
    model.insert(0, nn.BatchNorm1d(4, affine=False))  # of inputs: no gradient is noise
    if kind == "fsdp2":
        model = shard_units("sharded", model, [model[1]])
    elif kind != "plain":
        model = wrap(kind, model, **{"auto_wrap_policy": LINEARS, **options})
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}]
    optimizer = adam(groups) if is_adam else torch.optim.SGD(groups, momentum=0.9)
    for _ in range(2):
        model(torch.arange(12.0).view(3, 4) * (seed + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(state: Any) -> Any:
    """The whole tensors in a state, which may be nested."""
    if isinstance(state, dict):
        return {key: values(value) for key, value in state.items()}
    return whole(state) if isinstance(state, torch.Tensor) else state


def local_rows(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def settings(cls: Any, model: nn.Module, kind: StateDictType, **config: Any) -> None:
    full = (FullStateDictConfig(**config), FullOptimStateDictConfig(**config)) if kind is FULL and config else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        cls.set_state_dict_type(model, kind, *full)


def forward_of(model: Any) -> torch.Tensor:
    return model(torch.arange(12.0).view(3, 4))


def interchange() -> None:
    """Written by one and loaded by the other, model and optimizer; then both train on alike."""
    mesh = init_device_mesh("cpu", (2,))
    cases = [
        ("fsdp1", "sharded", FULL, False),
        ("fsdp1", "sharded", SHARDED, True),
        ("fsdp1", "sharded", SHARDED, False),  # without a mesh, FSDP1 reads and writes ShardedTensors
        ("sharded", "fsdp1", FULL, False),
        ("sharded", "fsdp1", SHARDED, True),
        ("sharded", "sharded", FULL, False),
        ("sharded", "sharded", SHARDED, False),
    ]
    for source, target, kind, with_mesh in cases:
        options = {"device_mesh": mesh} if with_mesh else {}
        options["is_adam"] = "fsdp1" not in (source, target)
        old, old_optimizer = make(source, seed=0, **options)
        new, new_optimizer = make(target, seed=1, **options)
        settings(type(old), old, kind)
        settings(type(new), new, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of ShardedTensor
            state, state_of_optimizer = old.state_dict(), type(old).optim_state_dict(old, old_optimizer)
            assert list(state) == list(make("plain")[0].state_dict())
            new.load_state_dict(state)
            new_optimizer.load_state_dict(type(new).optim_state_dict_to_load(new, new_optimizer, state_of_optimizer))
        for model, optimizer in ((old, old_optimizer), (new, new_optimizer)):
            forward_of(model).sum().backward()
            optimizer.step()
        assert_close(full_parameters(new), full_parameters(old))
        assert [group["lr"] for group in new_optimizer.param_groups] == [0.1, 0.2]


def test_interchange_with_fsdp1(run_on_gloo_ranks):
    run_on_gloo_ranks(2, interchange)


def kinds_of_state() -> None:
    """What each kind holds, of models and optimizers; configs; contexts; dtypes of buffers."""
    plain, _ = make("plain")
    model, optimizer = make("sharded")
    cls, rank = FullyShardedDataParallel, dist.get_rank()
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-4, atol=1e-4)
    assert cls.get_state_dict_type(model).state_dict_type is FULL and cls.get_state_dict_type(plain) is None
    settings(cls, model, FULL, rank0_only=True, offload_to_cpu=True)
    assert bool(model.state_dict()) == bool(cls.optim_state_dict(model, optimizer)) == (rank == 0)
    with pytest.warns(FutureWarning, match="are deprecated"), cls.state_dict_type(model, SHARDED):
        state, given = model.state_dict(), cls.get_state_dict_type(model)
        assert given.state_dict_config._use_dtensor and given.optim_state_dict_config._use_dtensor
        assert all(isinstance(value, DTensor) for key, value in state.items() if "weight" in key)
        assert {type(each["exp_avg"]) for each in cls.optim_state_dict(model, optimizer)["state"].values()} == {DTensor}
        assert_close(values(state), values(dict(plain.state_dict())), rtol=1e-4, atol=1e-4)
    assert cls.get_state_dict_type(model).state_dict_type is FULL
    settings(cls, model, LOCAL)
    state, of_optimizer = model.state_dict(), cls.optim_state_dict(model, optimizer)
    average = of_optimizer["state"]["1.weight"]["exp_avg"]
    assert tuple(state["1.weight"].to_local().shape) == ((3, 4) if rank == 0 else (2, 4))
    assert tuple(average.to_local().shape) == tuple(state["1.weight"].to_local().shape)
    assert state["1.weight"].to_local().data_ptr() == model.module[1].weight.to_local().data_ptr()  # as FSDP1's
    for as_rows in (False, True):  # plain tensors of this rank's rows load, too
        other, other_optimizer = make("sharded", seed=1)
        other.load_state_dict(tree_map(local_rows, state) if as_rows else state)
        of_other = tree_map(local_rows, of_optimizer) if as_rows else of_optimizer
        cls.optim_state_dict_to_load(other, other_optimizer, of_other, load_directly=True)
        assert_close(full_parameters(other), full_parameters(model))
        assert_close(cls.optim_state_dict(other, other_optimizer)["state"]["1.weight"]["exp_avg"], whole(average))
    # A module around wrappers, and one wrapper alone.
    settings(cls, model, FULL)
    around = nn.ModuleDict({"net": model})
    assert list(around.state_dict()) == [f"net.{key}" for key in plain.state_dict()]
    around.load_state_dict({f"net.{key}": value for key, value in plain.state_dict().items()})
    assert_close(full_parameters(model), dict(plain.named_parameters()))
    assert list(model[1].state_dict()) == ["weight", "bias"]
    assert list(model.module.state_dict()) == list(plain.state_dict())
    # Values that autograd has made; a part of a state; values that become the parameters.
    twice = {"1.weight": 2 * plain[1].weight}
    model.load_state_dict(twice, strict=False)
    assert_close(full_parameters(model)["1.weight"], twice["1.weight"].detach())
    model.load_state_dict(plain.state_dict(), assign=True)
    assert_close(full_parameters(model), dict(plain.named_parameters()))
    # NO_SHARD, and a buffer whose dtype mixed precision has changed.
    precise = MixedPrecision(buffer_dtype=torch.float16)
    normal = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5))
    weight = normal[1].weight.detach().clone()
    copied = wrap("sharded", normal, sharding_strategy=ShardingStrategy.NO_SHARD, mixed_precision=precise)
    assert copied.module[0].running_mean.dtype is torch.float16
    state = copied.state_dict()
    assert state["0.running_mean"].dtype is torch.float32
    assert_close(state["1.weight"], weight)


def test_kinds_of_state_dicts(run_on_gloo_ranks):
    run_on_gloo_ranks(2, kinds_of_state)


def refuse() -> None:
    model, optimizer = make("sharded")
    cls = FullyShardedDataParallel
    with pytest.warns(FutureWarning):
        for kind, config, text in (
            (FULL, LocalStateDictConfig(), "Expected state_dict_config of type FullStateDictConfig, got a Local"),
            ("FULL", None, "is no torch.distributed.fsdp.StateDictType"),
        ):
            with pytest.raises(OptionTypeError, match=text) as refused:
                cls.set_state_dict_type(model, kind, config)
            assert isinstance(refused.value, RuntimeError) is (config is not None), "as FSDP1's"
        cls.set_state_dict_type(model[1], SHARDED)
    with pytest.raises(TrainingStateError, match="different state-dict settings"):
        cls.get_state_dict_type(model)
    with pytest.raises(ParameterStateError, match=r"1\.weight has the shape \(7, 4\)"):
        model.load_state_dict({**model.state_dict(), "1.weight": torch.ones(7, 4)})
    settings(cls, model[1], FULL)
    state = cls.optim_state_dict(model, optimizer)
    with pytest.raises(ParameterStateError, match="do not have: nothing"):
        cls.optim_state_dict_to_load(model, optimizer, {**state, "state": {"nothing": {}}})
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    with pytest.raises(OptionError, match="that the model does not have"):
        cls.optim_state_dict(model, stranger)


def test_refusals(run_on_gloo_ranks):
    run_on_gloo_ranks(2, refuse)


def gather_states_of_unlike_optimizers() -> None:
    """Ranks may order parameters differently, and may save states without groups; they cannot have other parameters."""
    cls, rank = FullyShardedDataParallel, dist.get_rank()
    model, usual = make("sharded")
    expected = cls.optim_state_dict(model, usual)

    def stepped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adam(params)
        for param in params:
            param.grad = torch.full_like(param, float(param.shape[0]))
        optimizer.step()
        return optimizer

    params = list(model.parameters())
    in_order = cls.optim_state_dict(model, stepped(params))
    turned = cls.optim_state_dict(model, stepped(params[:: 1 - 2 * rank]))
    assert list(turned["state"]) == list(in_order["state"])
    assert_close(turned["state"], in_order["state"])
    with pytest.raises(ParameterStateError, match=r"rank 1 has no 3\.bias\.exp_avg"):
        cls.optim_state_dict(model, stepped(params[: 4 - rank]))
    bare = usual.state_dict()
    groups = bare.pop("param_groups")
    saved = cls.optim_state_dict(model, usual, bare)
    assert set(saved) == {"state"}
    assert_close(saved["state"], expected["state"])
    other, optimizer = make("sharded", seed=1)
    loaded = cls.optim_state_dict_to_load(other, optimizer, saved)
    assert set(loaded) == {"state"}
    optimizer.load_state_dict({**loaded, "param_groups": groups})
    assert_close(values(optimizer.state_dict()["state"]), values(usual.state_dict()["state"]))


def load_by_names() -> None:
    """Optimizers whose keys are names get their own names; load_state_dict() returns and lists clean ones."""
    with warnings.catch_warnings():  # of torch's own torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _NamedOptimizer
    cls = FullyShardedDataParallel
    model, _ = make("sharded")
    around = nn.ModuleDict({"dense": model})
    named = _NamedOptimizer(around.named_parameters(), torch.optim.SGD, module=around, lr=0.1, momentum=0.9)
    model(torch.ones(3, 4)).sum().backward()
    named.step()
    before = cls.optim_state_dict(around, named)
    assert set(before["state"]) == {f"dense.{number}.{kind}" for number in (1, 3) for kind in ("weight", "bias")}
    before = copy.deepcopy(before)
    named.step()
    loaded = cls.optim_state_dict_to_load(around, named, before, is_named_optimizer=True)
    named.load_state_dict(loaded)
    assert_close(cls.optim_state_dict(around, named)["state"], before["state"])
    state = around.state_dict()
    del state["dense.1.weight"]
    state["dense.other"] = torch.ones(1)
    found = around.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["dense.1.weight"], ["dense.other"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "dense\.1\.weight"'):
        around.load_state_dict(state)


@pytest.mark.parametrize("check", [gather_states_of_unlike_optimizers, load_by_names])
def test_names_and_orders(run_on_gloo_ranks, check):
    run_on_gloo_ranks(2, check)


def keep_the_mesh() -> None:
    """States name the mesh that the user gave, with names or without; FSDP1 and ours load each other's."""
    unnamed, named = (init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in (None, ("outer", "inner")))
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "is_adam": False}
    states = {}
    for kind, mesh in (("fsdp1", unnamed), ("sharded", unnamed), ("sharded", named)):
        model, optimizer = make(kind, device_mesh=mesh, **hybrid)
        settings(type(model), model, SHARDED)
        state, of_optimizer = dict(model.state_dict()), type(model).optim_state_dict(model, optimizer)
        found = [*state.values(), *(each["momentum_buffer"] for each in of_optimizer["state"].values())]
        assert {each.device_mesh for each in found if isinstance(each, DTensor)} == {mesh}
        states[kind, mesh] = state, of_optimizer
    ours, of_torch = states["sharded", unnamed], states["fsdp1", unnamed]
    for name, value in ours[0].items():
        assert_close(value, of_torch[0][name])  # an op on both
    for kind, mesh, (state, of_optimizer) in (
        ("sharded", unnamed, of_torch), ("sharded", named, ours), ("fsdp1", unnamed, ours), ("sharded", unnamed, ours)
    ):
        model, optimizer = make(kind, seed=1, device_mesh=mesh, **hybrid)
        settings(type(model), model, SHARDED)
        with count_collectives() as counts:
            model.load_state_dict(state)
            optimizer.load_state_dict(type(model).optim_state_dict_to_load(model, optimizer, of_optimizer))
        assert kind == "fsdp1" or counts["gathers"] == 0  # the rows are where they are needed
        forward_of(model).sum().backward()
        optimizer.step()
        states[kind, mesh] = full_parameters(model)
    assert_close(states["sharded", named], states["fsdp1", unnamed])
    assert_close(states["sharded", unnamed], states["fsdp1", unnamed])


def test_states_name_the_mesh_that_was_given(run_on_gloo_ranks):
    run_on_gloo_ranks(4, keep_the_mesh)


def use_legacy_names() -> None:
    """The older functions warn and work, and their states are those of FSDP1."""
    plain, plain_optimizer = make("plain", is_adam=False)
    model, optimizer = make("sharded", is_adam=False)
    torch_model, torch_optimizer = make("fsdp1", is_adam=False)
    cls, rank = FullyShardedDataParallel, dist.get_rank()
    with pytest.warns(FutureWarning, match="full_optim_state_dict"):
        state = cls.full_optim_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = type(torch_model).full_optim_state_dict(torch_model, torch_optimizer)
    assert bool(state) == (rank == 0)
    if rank == 0:
        assert_close(state["state"], expected["state"])
        assert state["param_groups"] == expected["param_groups"]
    with pytest.warns(FutureWarning) as caught:
        other, other_optimizer = make("sharded", seed=1, is_adam=False)
        params = list(other.parameters())
        results = [
            cls.scatter_full_optim_state_dict(state or None, other, optim=other_optimizer),
            cls.shard_full_optim_state_dict(
                whole_state := cls.full_optim_state_dict(model, optimizer, rank0_only=False), other, params
            ),
            cls.shard_full_optim_state_dict(whole_state, other, [{"params": params[:2]}, {"params": params[2:]}]),
            cls.flatten_sharded_optim_state_dict(
                cls.sharded_optim_state_dict(model, optimizer), other, other_optimizer
            ),
        ]
    assert any("`optim_input` argument is deprecated" in str(each.message) for each in caught)
    for result in results:
        assert_close(values(result["state"]), values(optimizer.state_dict()["state"]))
    for result in (results[0], results[2], results[3]):
        other_optimizer.load_state_dict(result)
    # For the unsharded model, by numbers, and back.
    by_number = cls.rekey_optim_state_dict(whole_state, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
    fresh = make("plain", seed=1, is_adam=False)[1]
    fresh.load_state_dict(by_number)
    assert_close(fresh.state_dict()["state"], plain_optimizer.state_dict()["state"], rtol=1e-3, atol=1e-3)
    again = cls.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, plain, optim=plain_optimizer)
    assert again["state"].keys() == whole_state["state"].keys()
    assert cls.rekey_optim_state_dict(again, OptimStateKeyType.PARAM_NAME, plain, optim=plain_optimizer) is again
    with pytest.raises(OptionError, match="are not of the 4 parameters"):
        cls.rekey_optim_state_dict({"state": {9: {}}, "param_groups": []}, OptimStateKeyType.PARAM_NAME, plain)


def test_legacy_functions(run_on_gloo_ranks):
    run_on_gloo_ranks(2, use_legacy_names)


def checkpoint_across_styles() -> None:
    """Any of FSDP1-style, FSDP2-style and unsharded models loads what another one saved with torch's DCP."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, src=0)
    for number, (source, target) in enumerate(itertools.permutations(("sharded", "fsdp1", "fsdp2", "plain"), 2)):
        if "sharded" not in (source, target):
            continue
        folder = Path(folders[0]) / str(number)
        is_adam = "fsdp1" not in (source, target)
        old, old_optimizer = make(source, seed=0, is_adam=is_adam)
        new, new_optimizer = make(target, seed=1, is_adam=is_adam)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model_state, optimizer_state = get_state_dict(old, old_optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
            model_state, optimizer_state = get_state_dict(new, new_optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(
                new, new_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        for model, optimizer in ((old, old_optimizer), (new, new_optimizer)):
            forward_of(model).sum().backward()
            optimizer.step()
        assert_close(full_parameters(new), full_parameters(old), rtol=1e-4, atol=1e-4)


def test_checkpoints_across_styles(run_on_gloo_ranks):
    run_on_gloo_ranks(2, checkpoint_across_styles)


def use_helpers(implementation: str) -> None:
    """torch's helpers get shards under clean names, whatever kind is set; whole states on request; compiled models."""
    plain, _ = make("plain")
    model, optimizer = make("sharded")
    named = compile_if_asked(implementation, model)
    state = get_model_state_dict(named)
    assert list(state) == list(plain.state_dict()) and isinstance(state["1.weight"], DTensor)
    full = get_model_state_dict(named, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (dist.get_rank() == 0)
    assert set(get_optimizer_state_dict(named, optimizer)["state"]) == {name for name, _ in plain.named_parameters()}
    other, _ = make("sharded", seed=1)
    set_model_state_dict(
        compile_if_asked(implementation, other),
        full,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    assert_close(full_parameters(other), full_parameters(model))
    with FullyShardedDataParallel.summon_full_params(model):
        names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    assert next(iter(dict(model.named_parameters()))).startswith("_fsdp_wrapped_module.")
    assert_close(dict(copy.deepcopy(model).state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("implementation", ["sharded", "compiled"])
def test_helpers_of_torch(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, use_helpers, implementation)
