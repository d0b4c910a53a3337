"""Modules that are compiled before they are sharded."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import pick_fully_shard, world_mesh
from support.parity import check_shard
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close

Run = Callable[..., list[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() + x


def _compiled(module: nn.Module, backend: str) -> Any:
    return torch.compile(module, backend=backend)


def _plain_names(module: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in module.named_parameters()}


def _build(form: str, backend: str, shard: Callable[..., Any]) -> Any:
    """A sharded model of two blocks; what was compiled depends on `form`."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(), Block())
    if form in ("blocks", "blocks_and_model", "list"):
        for index in range(2):
            model[index] = _compiled(model[index], backend)
    if form == "in_place":
        for block in model:
            block.compile(backend=backend)
    if form in ("model", "model_that_ran"):
        model = _compiled(model, backend)
    if form == "model_that_ran":
        with pytest.warns(UserWarning, match="none of the 4 parameters of this graph is sharded"):
            model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    if form == "list":
        shard([model[0], model[1]], mesh=world_mesh())
    elif form in ("blocks", "blocks_and_model", "in_place"):
        for block in model:
            shard(block, mesh=world_mesh())
    shard(model, mesh=world_mesh())
    return _compiled(model, backend) if form == "blocks_and_model" else model


def _batches() -> list[Tensor]:
    return [torch.full((2, 4), 1.0 + rank) for rank in range(dist.get_world_size())]


def train_compiled_blocks(form: str, implementation: str, backend: str) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block())
    model = _build(form, backend, pick_fully_shard(implementation))
    batches = _batches()
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        for each in batches:
            (reference(each).sum() / len(batches)).backward()
        model(batches[dist.get_rank()]).sum().backward()
        found, expected = _plain_names(model), dict(reference.named_parameters())
        assert list(found) == list(expected)
        for name, parameter in found.items():
            check_shard(name, expected[name].detach(), parameter)
            check_shard(f"gradient of {name}", expected[name].grad, parameter.grad)


def train_with_another_compiler(implementation: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "graphshard: this model was compiled by a backend that does not plan")
        train_compiled_blocks("blocks", implementation, "eager")


FORMS = ("blocks", "blocks_and_model", "list", "in_place", "model", "model_that_ran")


@pytest.mark.compiles("in_place", "list", "model_that_ran")
@pytest.mark.parametrize("form", FORMS)
def test_compile_then_shard(run_on_gloo_ranks: Run, form: str) -> None:
    run_on_gloo_ranks(2, train_compiled_blocks, form, "compiled", "graphshard")


@pytest.mark.parametrize("implementation", ["fsdp2", "sharded"])
def test_another_compiler(run_on_gloo_ranks: Run, implementation: str) -> None:
    run_on_gloo_ranks(2, train_with_another_compiler, implementation)


def copy_and_save_a_compiled_block() -> None:
    """A deep copy has a forward of its own; a checkpoint has the names of the plain model; the policy casts."""
    from graphshard import fully_shard

    torch.manual_seed(0)
    plain = Block()
    x = torch.ones(2, 4)
    expected = plain(x)
    names = set(plain.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    model = fully_shard(_compiled(plain, "graphshard"), mesh=world_mesh(), mp_policy=policy)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter("_orig_mod.layer.weight").zero_()
    assert_close(copied(x), expected)
    assert copied(x).dtype == torch.float32
    full = get_model_state_dict(copied, options=StateDictOptions(full_state_dict=True))
    assert set(full) == names or dist.get_rank() > 0


def test_copies_and_checkpoints(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, copy_and_save_a_compiled_block)
