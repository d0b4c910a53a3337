"""Sharded models compiled by a backend that does not plan them: right numbers, and one warning."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import shard_units
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.testing import assert_close

from graphshard.errors import UnsupportedShardingError


def build() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(42)
    reference = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model = copy.deepcopy(reference)
    return reference, shard_units("sharded", model, [model[0], model[2]])


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(backend: str, unshards: str, num_micro: int = 1) -> list[str]:
    """Three steps in lockstep with the unsharded model; what graphshard warned of."""
    reference, model = build()
    forward = torch.compile(model, backend=backend)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
    units = {"": [], "root": [model], "all": [model, model[0], model[2]]}[unshards]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for micro in range(num_micro):
                number = num_micro * step + micro
                for rank in range(2):
                    (reference(batch_of(rank, number)).square().sum() / 2).backward()
                for unit in units:
                    unit.unshard()
                model.set_requires_gradient_sync(micro == num_micro - 1)
                loss = forward(batch_of(dist.get_rank(), number)).square().sum()
                with count_collectives() as counts:
                    loss.backward()
                assert bool(counts["reductions"]) == (micro == num_micro - 1)
            check_sharded_parity(reference, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(each.message) for each in caught if "graphshard" in str(each.message)]


@pytest.mark.parametrize("unshards", ["", "root", "all"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_trains_and_warns_once(run_on_gloo_ranks, backend, unshards):
    for (message,) in run_on_gloo_ranks(2, train, backend, unshards):
        assert 'torch.compile(model, backend="graphshard")' in message


@pytest.mark.parametrize("unshards", ["", "all"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_accumulation(run_on_gloo_ranks, backend, unshards):
    run_on_gloo_ranks(2, train, backend, unshards, 2)


@pytest.mark.slow
def test_trains_with_inductor(run_on_gloo_ranks):
    for messages in run_on_gloo_ranks(2, train, "inductor", "all", 2):
        assert len(messages) == 1


def refuse_hooks() -> str:
    _, model = build()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    forward = torch.compile(model, backend="aot_eager")
    model.set_requires_gradient_sync(False)
    with pytest.warns(UserWarning, match="does not plan"):
        loss = forward(batch_of(0, 0)).sum()
    with pytest.raises(UnsupportedShardingError) as caught:
        loss.backward()
    return str(caught.value)


def test_hooks_of_gradients_that_wait_are_refused(run_on_gloo_ranks):
    for message in run_on_gloo_ranks(2, refuse_hooks):
        assert "parameter 0.weight" in message and 'backend="graphshard"' in message


class Cubes(nn.Module):
    """All that it reads of the weight is an elementwise op: Inductor would write its result over the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.pow(3) + 1) @ x


def evaluate_cubes() -> None:
    torch.manual_seed(0)
    reference = Cubes()
    model = shard_units("sharded", copy.deepcopy(reference), [])
    forward = torch.compile(model, backend="inductor")
    model.unshard()
    x = torch.ones(8, 3)
    with torch.no_grad(), pytest.warns(UserWarning, match="does not plan"):
        for _ in range(2):
            assert_close(forward(x), reference(x))
    assert_close(model.weight.detach(), reference.weight.detach(), rtol=0, atol=0)


@pytest.mark.inductor
def test_nothing_is_written_over_what_is_shown(run_on_gloo_ranks):
    run_on_gloo_ranks(2, evaluate_cubes)
