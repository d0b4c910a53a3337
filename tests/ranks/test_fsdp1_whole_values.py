"""Whole values under FullyShardedDataParallel: of parts with several names, inside summon_full_params, of stages."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.fsdp1 import full_parameters, whole, wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from graphshard import FullyShardedDataParallel
from graphshard.errors import ParameterStateError, StaleOptimizerError

FIRST_ONLY = {"rank0_only": True, "offload_to_cpu": True}


def two_linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


class TwoNames(nn.Module):
    """One embedding and one normalisation under two names each, as T5 and ALBERT have them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"table": nn.Embedding(5, 4), "norm": nn.BatchNorm1d(4)})
        self.decoder = nn.ModuleDict({"table": self.encoder["table"], "norm": self.encoder["norm"]})
        self.out = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder["norm"](self.encoder["table"](tokens))
        return self.out(self.decoder["norm"](hidden + self.decoder["table"](tokens)))


def save_and_load_two_names(wraps_table: bool) -> None:
    """The whole state has both names of a shared module, as the unsharded model's. Torch's FSDP1 crashes here."""
    torch.manual_seed(0)
    plain = TwoNames()
    policy = {"auto_wrap_policy": ModuleWrapPolicy({nn.Embedding})}
    half = {"mixed_precision": MixedPrecision(buffer_dtype=torch.float16)}
    model = wrap("sharded", copy.deepcopy(plain), **(policy if wraps_table else half))
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    twice = {name: 2 * value for name, value in plain.state_dict().items()}
    model.load_state_dict(twice)
    assert_close(dict(model.state_dict()), twice)
    config = FullStateDictConfig(**FIRST_ONLY)
    with (
        pytest.warns(FutureWarning),
        FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config),
    ):
        assert list(model.state_dict()) == (list(twice) if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("wraps_table", [False, True])
def test_modules_with_two_names(run_on_gloo_ranks, wraps_table):
    run_on_gloo_ranks(2, save_and_load_two_names, wraps_table)


class Tied(nn.Module):
    """The output layer comes before the embedding that it is tied to."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.body, self.tokens = nn.Linear(4, 6, bias=False), nn.Linear(4, 4), nn.Embedding(6, 4)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.body(self.tokens(tokens)))


def show_tied_parameters() -> None:
    """Wrappers of one tied parameter show one whole parameter, and a write to it by either name is kept."""
    wrapper = wrap("sharded", Tied(), auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}))
    for value, module in ((3.0, wrapper.module.tokens.module), (4.0, wrapper.module.output)):
        with FullyShardedDataParallel.summon_full_params(wrapper):
            assert wrapper.module.output.weight is wrapper.module.tokens.module.weight
            with torch.no_grad():
                module.weight.fill_(value)
        assert (full_parameters(wrapper)["output.weight"] == value).all()


def test_tied_parameters_of_two_wrappers(run_on_gloo_ranks):
    run_on_gloo_ranks(2, show_tied_parameters)


def save_and_load_inside_summon(implementation: str) -> None:
    """Whole values go out and come in, to the wrapper and to the module inside, and are kept."""
    torch.manual_seed(1)
    wrapper = wrap(implementation, two_linears())
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).state_dict()
    for factor, target in ((1, wrapper), (2, wrapper.module)):
        given = {name: factor * value for name, value in other.items()}
        with type(wrapper).summon_full_params(wrapper):
            before = {name: tuple(value.shape) for name, value in wrapper.state_dict().items()}
            assert before == {name: tuple(value.shape) for name, value in other.items()}
            target.load_state_dict(given)
        assert_close(full_parameters(wrapper), given)


@pytest.mark.parametrize("implementation", ["fsdp1", "sharded"])
def test_state_dicts_inside_summon(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, save_and_load_inside_summon, implementation)


def step_around_summon() -> None:
    """FSDP1 shows the same parameter objects inside, so optimizers work across the border. Here they are refused."""
    wrapper, cls = wrap("sharded", two_linears()), FullyShardedDataParallel
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    before = full_parameters(wrapper)
    wrapper(torch.ones(2, 4)).sum().backward()
    with (
        pytest.raises(ParameterStateError, match=r"0\.weight, .* were changed inside summon_full_params"),
        cls.summon_full_params(wrapper),
    ):
        optimizer.step()
    stepped = full_parameters(wrapper)
    assert all(not torch.equal(stepped[name], before[name]) for name in before), "the step is not undone"
    assert all(isinstance(param, DTensor) for param in wrapper.parameters())
    with cls.summon_full_params(wrapper, writeback=False):
        optimizer.step()
    assert not torch.equal(full_parameters(wrapper)["0.weight"], stepped["0.weight"])
    stepped = full_parameters(wrapper)
    with cls.summon_full_params(wrapper, with_grads=True):
        inside = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        inside.step()
    assert not torch.equal(full_parameters(wrapper)["0.weight"], stepped["0.weight"]), "written, so kept"
    with pytest.raises(StaleOptimizerError, match=r"SGD holds 0\.weight, .* as summon_full_params\(\) has shown"):
        inside.step()


def test_optimizers_around_summon(run_on_gloo_ranks):
    run_on_gloo_ranks(2, step_around_summon)


def keep_a_state() -> None:
    """A whole state of an optimizer does not follow the training, not in its step counts either."""
    for implementation in ("fsdp1", "sharded"):
        wrapper = wrap(implementation, two_linears())
        optimizer = torch.optim.Adam(wrapper.parameters())
        states = []
        for _ in range(2):
            wrapper(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            states.append(type(wrapper).optim_state_dict(wrapper, optimizer))
        steps = [{float(each["step"]) for each in state["state"].values()} for state in states]
        assert steps == [{1.0}, {2.0}], implementation


def test_whole_optimizer_states_are_kept(run_on_gloo_ranks):
    run_on_gloo_ranks(2, keep_a_state)


def save_stages() -> None:
    """Each stage of a pipeline is a hybrid model of its own: it gathers, and its first rank keeps, its own states."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "replicate", "shard"))
    stage, cls = mesh.get_local_rank("pp"), FullyShardedDataParallel
    module = nn.Sequential()
    module.add_module(f"stage{stage}", nn.Linear(4, 4))
    ranks = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh["replicate", "shard"]}
    model = wrap("sharded", module, **ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    names = [f"stage{stage}.weight", f"stage{stage}.bias"]
    state = cls.optim_state_dict(model, optimizer)
    assert list(state["state"]) == names
    configs = FullStateDictConfig(**FIRST_ONLY), FullOptimStateDictConfig(**FIRST_ONLY)
    with pytest.warns(FutureWarning):
        cls.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs)
    kept = cls.optim_state_dict(model, optimizer)
    assert list(kept.get("state", ())) == list(model.state_dict()) == (names if dist.get_rank() % 2 == 0 else [])
    loaded = cls.optim_state_dict_to_load(model, optimizer, kept)
    buffers = [each["momentum_buffer"].full_tensor() for each in loaded["state"].values()]
    assert_close(buffers, [state["state"][name]["momentum_buffer"] for name in names])


def test_stages_of_hybrid_models(run_on_gloo_ranks):
    run_on_gloo_ranks(4, save_stages)


def set_kind(wrapper: nn.Module, kind: StateDictType) -> None:
    with pytest.warns(FutureWarning):
        type(wrapper).set_state_dict_type(wrapper, kind)


def buffers_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [whole(each["momentum_buffer"]).clone() for each in optimizer.state_dict()["state"].values()]


def keep_sharded_states() -> None:
    """Sharded states do not follow the training either, as FSDP1's do not: loading one goes back to it."""
    warnings.simplefilter("ignore", FutureWarning)  # of ShardedTensor
    for implementation in ("fsdp1", "sharded"):
        wrapper = wrap(implementation, two_linears())
        cls, optimizer = type(wrapper), torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
        set_kind(wrapper, StateDictType.SHARDED_STATE_DICT)

        def step(wrapper=wrapper, optimizer=optimizer) -> None:
            wrapper(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        kept, kept_of_optimizer = wrapper.state_dict(), cls.optim_state_dict(wrapper, optimizer)
        parameters, buffers = full_parameters(wrapper), buffers_of(optimizer)
        step()
        assert all((new != old).any() for new, old in zip(buffers_of(optimizer), buffers, strict=True))
        wrapper.load_state_dict(kept)
        cls.optim_state_dict_to_load(wrapper, optimizer, kept_of_optimizer, load_directly=True)
        assert_close(full_parameters(wrapper), parameters)
        assert_close(buffers_of(optimizer), buffers)


def test_sharded_states_are_kept(run_on_gloo_ranks):
    run_on_gloo_ranks(2, keep_sharded_states)


def save_local_states(folder: str) -> None:
    """DCP saves the local values of every rank, as it does FSDP1's, which are ShardedTensors."""
    warnings.simplefilter("ignore", FutureWarning)  # of ShardedTensor
    for implementation in ("fsdp1", "sharded"):
        options = {"use_orig_params": False} if implementation == "fsdp1" else {}
        saved, loaded = (wrap(implementation, two_linears(), **options) for _ in range(2))
        with torch.no_grad():
            for param in loaded.parameters():
                param.zero_()
        for wrapper in (saved, loaded):
            set_kind(wrapper, StateDictType.LOCAL_STATE_DICT)
        dcp.save(saved.state_dict(), checkpoint_id=f"{folder}/{implementation}")
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{implementation}")
        loaded.load_state_dict(state)
        assert_close(full_parameters(loaded), full_parameters(saved))


def test_local_states_through_dcp(run_on_gloo_ranks, tmp_path):
    run_on_gloo_ranks(2, save_local_states, str(tmp_path))
