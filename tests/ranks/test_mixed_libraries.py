"""Models that are sharded by two libraries, or by another one than they are compiled by: what is mixed is said."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from support.implementations import world_mesh
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from graphshard import fully_shard
from graphshard.errors import GraphShardError, ShardingError

Run = Callable[..., list[Any]]

torch_fully_shard = torch.distributed.fsdp.fully_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x * self.scale))


def shard_what_torch_has_sharded() -> None:
    mesh = world_mesh()
    named: list[tuple[str, Callable[[Model], Any], Callable[[Model], Any]]] = [
        ("first (FSDPBlock)", lambda model: torch_fully_shard(model.first, mesh=mesh), lambda model: model),
        (
            "the module itself (FSDPBlock)",
            lambda model: torch_fully_shard(model.first),
            lambda model: model.first,
        ),
        ("the module itself (Block)", lambda model: torch_fully_shard(model), lambda model: model.first),
        (
            "second (FSDPBlock)",
            lambda model: torch_fully_shard([model.first, model.second]),
            lambda model: model,
        ),
        ("first (ReplicateBlock)", lambda model: replicate(model.first), lambda model: model),
    ]
    for text, shard, pick in named:
        model = Model()
        shard(model)
        with pytest.raises(ShardingError, match="Import fully_shard from graphshard") as caught:
            fully_shard(pick(model), mesh=mesh)
        assert text in str(caught.value)


def shard_what_torch_replicates() -> None:
    """With DistributedDataParallel, under the older ``replicate`` too."""
    for wrap, text in (
        (DistributedDataParallel, "first (DistributedDataParallel)"),
        (replicate_by_ddp, "first (DDPBlock)"),
    ):
        model = Model()
        model.first = wrap(model.first)
        with pytest.raises(ShardingError, match=r"would reduce its gradients as well") as caught:
            fully_shard(model, mesh=world_mesh())
        assert text in str(caught.value)
        fully_shard(model, mesh=world_mesh(), ignored_params=set(model.first.parameters()))
        model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    model = fully_shard(Model(), mesh=world_mesh())
    with pytest.raises(ShardingError, match=r"torch\.distributed\.fsdp cannot shard scale"):
        replicate_by_ddp(model)


def shard_what_graphshard_has_sharded() -> None:
    mesh = world_mesh()
    named: list[tuple[str, Callable[[Model], Any], Callable[[Model], Any]]] = [
        ("layer.weight, layer.bias", lambda model: model.first, lambda model: torch_fully_shard(model)),
        ("layer.weight", lambda model: model.first, lambda model: torch_fully_shard(model.first, mesh=mesh)),
        ("first.layer.weight", lambda model: model, lambda model: torch_fully_shard(model.first)),
        ("first.layer.weight", lambda model: model, lambda model: torch_fully_shard(model.first.layer)),
        ("layer.weight", lambda model: model.first, lambda model: replicate(model)),
        ("scale", lambda model: model, lambda model: torch_fully_shard(copy.deepcopy(model))),
    ]
    for text, pick, shard in named:
        model = Model()
        fully_shard(pick(model), mesh=mesh)
        get_model_state_dict(model)  # asks for the APIs that were applied, and is answered
        with pytest.raises(ShardingError, match=r"torch\.distributed\.fsdp cannot shard") as caught:
            shard(model)
        assert text in str(caught.value), str(caught.value)
        assert isinstance(caught.value, GraphShardError)


def compile_what_torch_has_sharded() -> None:
    """It runs, and one of the warnings names the module that torch has sharded."""
    model = Model()
    torch_fully_shard(model.first)
    torch_fully_shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend="graphshard")(torch.ones(2, 4)).sum().backward()
    texts = [str(each.message) for each in caught if "graphshard:" in str(each.message)]
    assert any("FSDPModel was sharded by torch.distributed.fsdp" in text for text in texts), texts
    assert not any("none of the" in text for text in texts), texts
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "function",
    [
        shard_what_torch_has_sharded,
        shard_what_torch_replicates,
        shard_what_graphshard_has_sharded,
        compile_what_torch_has_sharded,
    ],
)
def test_mixed_libraries(run_on_gloo_ranks: Run, function: Callable[[], None]) -> None:
    run_on_gloo_ranks(2, function)
