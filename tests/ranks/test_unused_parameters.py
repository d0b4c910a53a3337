"""Ranks that use different parameters in one step: zeros where asked for, an error elsewhere, never a hang."""

import copy
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import (
    EVERY,
    GRAPHSHARD,
    UNCOMPILED,
    compile_if_asked,
    pick_fully_shard,
    world_mesh,
)
from support.parity import check_sharded_parity, make_adam
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

LIMIT_S = 3.0
"""Where one rank never comes: what all wait for."""

PATIENT_LIMIT_S = 60.0
"""Where all come, on a busy machine at different times. An error found at this limit would say so."""


class Routed(nn.Module):
    """A gate, and two experts of which `which` names the one that is used; `spare` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 5)
        self.experts = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.spare = nn.Linear(5, 3)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](torch.relu(self.gate(x)))


class RoutedByData(Routed):
    """The sign of the input says which expert is used: a branch Dynamo cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.gate(x))
        if x.sum() > 0:
            return self.experts[0](hidden)
        return self.experts[1](hidden)


class NoInputGradient(nn.Module):
    """On rank 1 the routed unit runs, but nothing of it reaches the output."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = Routed()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        hidden = self.routed(x, 0)
        return self.head(hidden if is_used else torch.zeros_like(hidden))


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def _short_lived_mesh(limit_s: float = PATIENT_LIMIT_S) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=limit_s)), "cpu")


def train_on_different_experts(implementation: str) -> None:
    """Rank r uses expert (r + step) % 2, in one unit with everything else."""
    torch.manual_seed(42)
    reference = Routed()
    model = pick_fully_shard(implementation)(copy.deepcopy(reference), mesh=world_mesh())
    model.set_reduce_scatter_unused_params(True)
    optimizers = [make_adam(reference.parameters()), make_adam(model.parameters())]
    for step in range(3):
        losses = [reference(_inputs(rank, step), (rank + step) % 2).square().mean() for rank in range(2)]
        (torch.stack(losses).sum() / 2).backward()
        for parameter in reference.spare.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rank = dist.get_rank()
        model(_inputs(rank, step), (rank + step) % 2).square().mean().backward()
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_zeros_stand_in_for_unused_experts(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    run_on_gloo_ranks(2, train_on_different_experts, implementation)


def leave_a_unit_out_of_the_backward() -> None:
    torch.manual_seed(42)
    reference = NoInputGradient()
    model = copy.deepcopy(reference)
    fully_shard = pick_fully_shard("sharded")
    fully_shard(model.routed, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())
    model.set_reduce_scatter_unused_params(True)
    rank = dist.get_rank()
    losses = [reference(_inputs(each, 0), each == 0).square().mean() for each in range(2)]
    (torch.stack(losses).sum() / 2).backward()
    for parameter in reference.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model(_inputs(rank, 0), rank == 0).square().mean().backward()
    check_sharded_parity(reference, model)


def test_a_unit_that_one_rank_leaves_out_of_the_backward(
    run_on_gloo_ranks: Callable[..., list[Any]],
) -> None:
    run_on_gloo_ranks(2, leave_a_unit_out_of_the_backward)


def gradient_of_what_nobody_uses(implementation: str, reduces_unused: bool) -> str:
    torch.manual_seed(42)
    model = pick_fully_shard(implementation)(Routed(), mesh=world_mesh())
    model.set_reduce_scatter_unused_params(reduces_unused)
    compile_if_asked(implementation, model)(_inputs(0, 0), 0).sum().backward()
    gradient = model.spare.weight.grad
    if gradient is None:
        return "none"
    return "zeros" if not gradient.full_tensor().any() else "values"


@pytest.mark.parametrize("implementation", EVERY)
def test_unused_everywhere(run_on_gloo_ranks: Callable[..., list[Any]], implementation: str) -> None:
    assert run_on_gloo_ranks(2, gradient_of_what_nobody_uses, implementation, False) == ["none"] * 2
    assert run_on_gloo_ranks(2, gradient_of_what_nobody_uses, implementation, True) == ["zeros"] * 2


def _error_of(step: Callable[[], Any]) -> str:
    """The message of an AgreementError, or of another error with its type."""
    from graphshard.errors import AgreementError

    try:
        step()
    except AgreementError as error:
        return str(error)
    except Exception as error:
        inner = getattr(error, "inner_exception", None)
        return str(inner) if isinstance(inner, AgreementError) else f"{type(error).__name__}: {error}"
    return "no error"


def reduce_different_experts() -> str:
    model = pick_fully_shard("sharded")(Routed(), mesh=_short_lived_mesh())
    loss = model(_inputs(0, 0), dist.get_rank()).sum()
    return _error_of(loss.backward)


def test_different_gradients_are_an_error_at_once(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for message in run_on_gloo_ranks(2, reduce_different_experts):
        assert "reduce the gradients of unit root: gate.weight, gate.bias, experts.0.weight" in message
        assert "experts.1.weight" in message and "set_reduce_scatter_unused_params(True)" in message


def gather_different_units() -> str:
    mesh = _short_lived_mesh()
    model = Routed()
    fully_shard = pick_fully_shard("sharded")
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _error_of(lambda: model(_inputs(0, 0), dist.get_rank()))


def test_experts_of_equal_size_are_never_mixed_up(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for message in run_on_gloo_ranks(2, gather_different_units):
        assert "gather unit experts.0: experts.0.weight, experts.0.bias" in message
        assert "gather unit experts.1" in message and "as one unit" in message


def end_without_the_others() -> str:
    model = pick_fully_shard("sharded")(Routed(), mesh=_short_lived_mesh(LIMIT_S))
    if dist.get_rank() == 1:
        return "did nothing"
    return _error_of(lambda: model(_inputs(0, 0), 0))


def test_a_rank_that_never_comes_is_an_error_at_the_limit(
    run_on_gloo_ranks: Callable[..., list[Any]],
) -> None:
    message, other = run_on_gloo_ranks(2, end_without_the_others)
    assert other == "did nothing"
    assert "within 3 s only 1 of 2 ranks came to do the same" in message


def _routed_by_data(mesh: DeviceMesh) -> Callable[..., Tensor]:
    torch.manual_seed(42)
    model = RoutedByData()
    fully_shard = pick_fully_shard("compiled")
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return compile_if_asked("compiled", model, fullgraph=False)


def compile_different_branches() -> str:
    forward = _routed_by_data(_short_lived_mesh())
    sign = 1.0 if dist.get_rank() == 0 else -1.0
    return _error_of(lambda: forward(sign * torch.ones(2, 5)))


@pytest.mark.slow
def test_different_branches_do_not_compile(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for message in run_on_gloo_ranks(2, compile_different_branches):
        assert "of experts.0.bias, experts.0.weight" in message, message
        assert "of experts.1.bias, experts.1.weight" in message, message


def part_on_new_ground() -> str:
    """Both branches are compiled and agreed on; then the ranks part where nothing has followed yet."""
    forward = _routed_by_data(world_mesh())
    with torch.no_grad():
        for sign in (1.0, -1.0):
            forward(sign * torch.ones(2, 5))
        sign = 1.0 if dist.get_rank() == 0 else -1.0
        return _error_of(lambda: forward(sign * torch.ones(2, 5)))


def test_compiled_branches_that_part(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for message in run_on_gloo_ranks(2, part_on_new_ground):
        assert "is about to run graph" in message and "same branches of compiled code" in message, message
        assert re.search(r"graph \d+ \(inference\) of [\w.]+ and \d+ more, but", message), message
        assert "leave that module out with torch.compiler.disable" in message, message


def part_from_the_known_path() -> str:
    """Only the positive branch has ever run together: rank 1 leaves the known path, rank 0 does not."""
    forward = _routed_by_data(_short_lived_mesh())
    with torch.no_grad():
        for _ in range(2):
            forward(torch.ones(2, 5))
        sign = 1.0 if dist.get_rank() == 0 else -1.0
        return _error_of(lambda: forward(sign * torch.ones(2, 5)))


@pytest.mark.slow
def test_compiled_branches_that_part_from_the_known_path(
    run_on_gloo_ranks: Callable[..., list[Any]],
) -> None:
    first, second = run_on_gloo_ranks(2, part_from_the_known_path)
    assert "no error" not in (first, second)
    assert "rank 0 published no verdict" in second, second
    assert "Every rank must take the same branches of compiled code" in second, second


def accumulate_over_unused(implementation: str) -> None:
    """Two micro-batches with different experts, one reduction: zeros are added, nothing is lost."""
    torch.manual_seed(42)
    reference = Routed()
    model = pick_fully_shard(implementation)(copy.deepcopy(reference), mesh=world_mesh())
    model.set_reduce_scatter_unused_params(True)
    rank = dist.get_rank()
    forward = compile_if_asked(implementation, model)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        for each in range(2):
            (reference(_inputs(each, micro), micro).square().mean() / 2).backward()
        forward(_inputs(rank, micro), micro).square().mean().backward()
    for name, parameter in model.named_parameters():
        expected = dict(reference.named_parameters())[name].grad
        expected = torch.zeros(parameter.shape) if expected is None else expected
        assert_close(parameter.grad.full_tensor(), expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_accumulation_over_unused_parameters(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    run_on_gloo_ranks(2, accumulate_over_unused, implementation)
