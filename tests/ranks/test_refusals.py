"""Mistakes are refused with FSDP2's exception type; graphshard's is also a GraphShardError with a remedy."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.implementations import UNCOMPILED, pick_fully_shard, world_mesh
from support.toy_models import build_mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OffloadPolicy

FullyShard = Callable[..., nn.Module]


@contextlib.contextmanager
def expect_error(implementation: str, kind: type[Exception], *, graphshard_says: str) -> Iterator[None]:
    """An error of FSDP2's kind. Graphshard's is also a GraphShardError, and matches `graphshard_says`."""
    with pytest.raises(kind) as caught:
        yield
    if implementation == "fsdp2":
        return
    from graphshard.errors import GraphShardError

    assert isinstance(caught.value, GraphShardError), f"{type(caught.value).__mro__} is no GraphShardError"
    assert re.search(graphshard_says, str(caught.value), re.DOTALL | re.IGNORECASE), str(caught.value)


class Scaled(nn.Module):
    """Has a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / self.temperature


def module_list(fully_shard: FullyShard) -> None:
    fully_shard(nn.ModuleList([nn.Linear(4, 4)]), mesh=world_mesh())


def module_dict(fully_shard: FullyShard) -> None:
    fully_shard(nn.ModuleDict({"one": nn.Linear(4, 4)}), mesh=world_mesh())


def twice(fully_shard: FullyShard) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())


def three_dim_mesh(fully_shard: FullyShard) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=("one", "two", "three"))
    fully_shard(nn.Linear(4, 4), mesh=mesh)


def scalar_parameter(fully_shard: FullyShard) -> None:
    fully_shard(Scaled(), mesh=world_mesh())


def channels_last(fully_shard: FullyShard) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)
    fully_shard(model, mesh=world_mesh())


def reshard_as_text(fully_shard: FullyShard) -> None:
    fully_shard(nn.Linear(4, 4), mesh=world_mesh(), reshard_after_forward="yes")


def reshard_as_float(fully_shard: FullyShard) -> None:
    fully_shard(nn.Linear(4, 4), mesh=world_mesh(), reshard_after_forward=2.0)


def reshard_over_no_divisor(fully_shard: FullyShard) -> None:
    fully_shard(nn.Linear(4, 4), mesh=world_mesh(), reshard_after_forward=3)


def unnamed_two_dim_mesh(fully_shard: FullyShard) -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    fully_shard(nn.Linear(4, 4), mesh=mesh)


def flag_that_is_a_number(fully_shard: FullyShard) -> None:
    fully_shard(nn.Linear(4, 4), mesh=world_mesh()).set_reshard_after_forward(2)


class DiskOffloadPolicy(OffloadPolicy):
    """A policy nobody has written yet."""


def unknown_offload_policy(fully_shard: FullyShard) -> None:
    fully_shard(nn.Linear(4, 4), mesh=world_mesh(), offload_policy=DiskOffloadPolicy())


def forward_on_meta(fully_shard: FullyShard) -> None:
    with torch.device("meta"):
        model = build_mlp((4, 6), (6, 3))
    fully_shard(model[0], mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())
    model(torch.ones(2, 4))


@dataclass(frozen=True, slots=True)
class Refusal:
    """One mistake, FSDP2's exception type, and a pattern of what graphshard's message must hold."""

    mistake: Callable[[FullyShard], None]
    kind: type[Exception]
    graphshard_says: str


REFUSALS = [
    Refusal(module_list, ValueError, r"ModuleList.*forward"),
    Refusal(module_dict, ValueError, r"ModuleDict.*forward"),
    Refusal(twice, AssertionError, r"Linear.*(already|once|twice)"),
    Refusal(three_dim_mesh, ValueError, r"mesh.*3|3.*mesh"),
    Refusal(scalar_parameter, ValueError, r"temperature"),
    Refusal(channels_last, NotImplementedError, r"0\.weight.*contiguous"),
    Refusal(reshard_as_text, ValueError, r"reshard_after_forward.*yes"),
    Refusal(reshard_as_float, ValueError, r"reshard_after_forward.*2\.0"),
    Refusal(reshard_over_no_divisor, ValueError, r"reshard_after_forward.*3"),
    Refusal(unnamed_two_dim_mesh, AssertionError, r"name"),
    Refusal(flag_that_is_a_number, ValueError, r"reshard_after_forward=2"),
    Refusal(forward_on_meta, RuntimeError, r"0\.weight.*0\.bias.*2\.weight.*2\.bias.*to_empty"),
]
UNSUPPORTED = [
    # What FSDP2 ignores.
    Refusal(unknown_offload_policy, NotImplementedError, r"offload_policy=DiskOffloadPolicy is unknown"),
]
REFUSAL_BY_NAME = {refusal.mistake.__name__: refusal for refusal in REFUSALS + UNSUPPORTED}


def make_mistake(implementation: str, name: str) -> None:
    refusal = REFUSAL_BY_NAME[name]
    with expect_error(implementation, refusal.kind, graphshard_says=refusal.graphshard_says):
        refusal.mistake(pick_fully_shard(implementation))


def refuse_before_any_change(implementation: str) -> None:
    """A refused model is left as it was: plain parameters, the same class, and it still works."""
    model = Scaled()
    with expect_error(implementation, ValueError, graphshard_says="temperature"):
        pick_fully_shard(implementation)(model, mesh=world_mesh())
    assert type(model) is Scaled
    assert not hasattr(model.linear.weight, "placements")
    assert model.linear(torch.ones(2, 4)).shape == (2, 4)


def name_every_offender(implementation: str) -> None:
    """Errors of graphshard list all the parameters at fault, not the first."""
    from graphshard.errors import GraphShardError

    model = nn.ModuleDict({"first": Scaled(), "second": Scaled()})
    root = nn.Sequential(model["first"], model["second"])
    with pytest.raises(GraphShardError, match=r"(?s)0\.temperature.*1\.temperature"):
        pick_fully_shard(implementation)(root, mesh=world_mesh())


@pytest.mark.parametrize("name", [refusal.mistake.__name__ for refusal in REFUSALS])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_mistake_is_refused(run_on_gloo_ranks, implementation, name):
    run_on_gloo_ranks(2, make_mistake, implementation, name)



@pytest.mark.parametrize("name", [refusal.mistake.__name__ for refusal in UNSUPPORTED])
def test_unsupported_feature_is_refused(run_on_gloo_ranks, name):
    run_on_gloo_ranks(2, make_mistake, "sharded", name)


def test_refused_model_is_unchanged(run_on_gloo_ranks):
    run_on_gloo_ranks(2, refuse_before_any_change, "sharded")


def test_every_offender_is_named(run_on_gloo_ranks):
    run_on_gloo_ranks(2, name_every_offender, "sharded")
