"""Ops that return nothing, and the tokens that order effects, in the graphs of sharded models.

`torch.linalg.inv` checks its errors with an op that has an ordered effect: AOTAutograd gives its graphs a token as the
first input, and drops it from the halves. Numbers read from tensors leave checks behind, which have no result.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, compile_if_asked, shard_units
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

DIM = 4


class Reads(nn.Module):
    """Computes with its weight between two layers."""

    def __init__(self, compute: str) -> None:
        super().__init__()
        self.compute = compute
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.weight = nn.Parameter(2 * torch.eye(DIM) + 0.1 * torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(getattr(self, self.compute)(self.first(x)))

    def inverse(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(self.weight)

    def solution(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.weight, x.T).T

    def cholesky(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.cholesky(self.weight @ self.weight.T + torch.eye(DIM))

    def ordered_effects(self, x: Tensor) -> Tensor:
        torch.ops.graphshard_tests.note(x.detach())
        x = x @ self.weight
        torch.ops.graphshard_tests.note(x.detach())
        return x

    def number(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().sum().item()
        torch._check(scale >= 0)
        return (x @ self.weight) * scale

    def masked_rows(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[x.detach()[:, 0] < 1e3]

    def slice_of_columns(self, x: Tensor) -> Tensor:
        number = (x.detach() < 1e3).sum().item() // x.shape[0] - 1
        torch._check(number >= 0)
        torch._check(number <= DIM)
        return x @ self.weight + (x @ self.weight)[:, :number].sum()

    def places(self, x: Tensor) -> Tensor:
        places = (x.detach() > 0).nonzero()
        return x @ self.weight + x[places[:, 0], places[:, 1]].sum()

    def number_on_one_rank(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            torch._check(x.detach().abs().sum().item() >= 0)
        return x @ self.weight

    def assertion_on_one_rank(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            torch._assert_async(self.weight.detach().abs().sum() > 0)
        return x @ self.weight


def define_ops() -> list[Tensor]:
    """The op `graphshard_tests::note`, which has an ordered effect: it appends its input to the list returned."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    noted: list[Tensor] = []

    @torch.library.custom_op("graphshard_tests::note", mutates_args=())
    def note(x: Tensor) -> None:
        noted.append(x.clone())

    note.register_fake(lambda x: None)
    _register_effectful_op(torch.ops.graphshard_tests.note.default, _EffectType.ORDERED)
    return noted


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(8, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def check_training(
    reference: nn.Module, model: nn.Module, forward: Callable[..., Tensor], clear: Callable[[], None] = lambda: None
) -> None:
    size = dist.get_world_size()
    for step in range(2):
        losses = [reference(batch_of(rank, step)).square().mean() for rank in range(size)]
        (torch.stack(losses).sum() / size).backward()
        clear()
        loss = forward(batch_of(dist.get_rank(), step)).square().mean()
        loss.backward()
        assert_close(loss, losses[dist.get_rank()])
        check_sharded_parity(reference, model)


def train(implementation: str, compute: str, options: dict[str, object]) -> None:
    torch.manual_seed(42)
    reference = Reads(compute)
    model = shard_units(implementation, copy.deepcopy(reference), [])
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        check_training(reference, model, compile_if_asked(implementation, model, **options))


COMPUTATIONS = (
    "inverse",
    "solution",
    "cholesky",
    "number",
    "masked_rows",
    "slice_of_columns",
    "places",
    "number_on_one_rank",
    "assertion_on_one_rank",
)


@pytest.mark.compiles("masked_rows", "number_on_one_rank", "cholesky")
@pytest.mark.parametrize("compute", COMPUTATIONS)
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_computations_with_checks(run_on_gloo_ranks, implementation, compute):
    run_on_gloo_ranks(2, train, implementation, compute, {})


@pytest.mark.inductor
@pytest.mark.parametrize("compute", ["inverse", "masked_rows"])
def test_computations_with_checks_in_a_plan(run_on_gloo_ranks, compute):
    """A planner chooses for both halves, each value is compared with its op, and Inductor makes the code."""
    options = {"hardware": "cpu-loopback", "memory_budget": "1GiB", "verify": "full"}
    run_on_gloo_ranks(2, train, "compiled", compute, options)


def train_with_effects(implementation: str) -> None:
    """Both effects run, once in each forward, in their order."""
    noted = define_ops()
    torch.manual_seed(42)
    reference = Reads("ordered_effects")
    model = shard_units(implementation, copy.deepcopy(reference), [])
    check_training(reference, model, compile_if_asked(implementation, model), noted.clear)
    hidden = reference.first(batch_of(dist.get_rank(), 1))
    assert_close(noted, [hidden.detach(), (hidden @ reference.weight).detach()])


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_ordered_effects(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_effects, implementation)


def train_parametrized(implementation: str, orthogonal_map: str) -> None:
    torch.manual_seed(42)
    first = parametrizations.orthogonal(nn.Linear(DIM, DIM), orthogonal_map=orthogonal_map)
    reference = nn.Sequential(first, nn.Linear(DIM, 3))
    model = shard_units(implementation, copy.deepcopy(reference), [])
    check_training(reference, model, compile_if_asked(implementation, model))


@pytest.mark.compiles("householder")
@pytest.mark.parametrize("orthogonal_map", ["cayley", "matrix_exp", "householder"])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_orthogonal_parametrization(run_on_gloo_ranks, implementation, orthogonal_map):
    run_on_gloo_ranks(2, train_parametrized, implementation, orthogonal_map)
