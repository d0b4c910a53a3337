"""Complex parameters: gathered and reduced as reals, exact in both parts."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, shard_units
from support.thorough import is_thorough
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing import assert_close


class Spectral(nn.Module):
    """Complex weights with uneven rows beside real ones; one is read twice, one has no imaginary gradient."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.real = dtype.to_real()
        self.enter = nn.Linear(6, 5, dtype=self.real)
        self.mix = nn.Parameter(torch.randn(5, 6, dtype=dtype))
        self.scale = nn.Parameter(torch.randn(3, dtype=dtype))
        self.leave = nn.Linear(3, 3, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.fft.fft(self.enter(x).to(self.real))
        mixed = self.leave((hidden @ self.mix)[:, :3] * self.scale.conj())
        return mixed.abs().square().mean() + 0.1 * self.mix.real.sum()


def batch_of(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(10 * step + rank))


def train(
    implementation: str, dtype: torch.dtype, options: dict[str, Any], num_copies: int, num_steps: int = 3
) -> None:
    """Three steps; the second accumulates two micro-batches, without a reduction after the first.

    Not Adam: torch 2.13's does not update a DTensor of complex numbers with one dim that is cut unevenly.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(42)
    reference = Spectral(dtype)
    model = copy.deepcopy(reference)
    shape = (num_copies, world_size // num_copies)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fully_shard = pick_fully_shard(implementation)
    for module in (model.leave, model):
        fully_shard(module, mesh=mesh, **options)
    forward = compile_if_asked(implementation, model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (reference, model)]
    for step in range(num_steps):
        for micro in (0, 1) if step == 1 else (1,):
            model.set_requires_gradient_sync(bool(micro))
            for one in range(world_size):
                (reference(batch_of(one, step + micro, dtype.to_real())) / world_size).backward()
            forward(batch_of(rank, step + micro, dtype.to_real())).backward()
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert param.grad.dtype == expected.dtype, name
            assert_close(param.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(param.full_tensor(), expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.compiles("complex64")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_training_is_that_of_the_unsharded_model(run_on_gloo_ranks, implementation, dtype):
    run_on_gloo_ranks(2, train, implementation, dtype, {}, 1)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_hybrid_sharding_and_another_reduction_dtype(run_on_gloo_ranks, implementation):
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}
    run_on_gloo_ranks(4, train, implementation, torch.complex64, options, 2)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_copies_without_shards(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train, implementation, torch.complex64, {"reshard_after_forward": False}, 2)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_cut_along_the_last_dim(run_on_gloo_ranks, implementation):
    """The last dim of the reals behind it is not cut."""
    run_on_gloo_ranks(2, train_with_columns, implementation)


def train_with_columns(implementation: str) -> None:
    train(implementation, torch.complex64, {"shard_placement_fn": lambda param: Shard(param.dim() - 1)}, 1)


def train_in_bfloat16(implementation: str) -> None:
    """``param_dtype`` is for real parameters: complex ones keep their dtype, and both parts of their gradients."""
    torch.manual_seed(42)
    reference = Spectral()
    model = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_units(implementation, model, [model.leave], mp_policy=policy)
    forward = compile_if_asked(implementation, model)
    for rank in range(dist.get_world_size()):
        (reference(batch_of(rank, 0, torch.float32)) / dist.get_world_size()).backward()
    forward(batch_of(dist.get_rank(), 0, torch.float32)).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        found = param.grad.full_tensor()
        error = (found - expected.grad).abs().max() / expected.grad.abs().max()
        assert error < 0.03, f"{name}: {error}"


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_mixed_precision_keeps_both_parts(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_in_bfloat16, implementation)


def show_and_save(implementation: str) -> None:
    torch.manual_seed(42)
    reference = Spectral()
    with torch.no_grad():
        reference.scale.copy_(reference.scale.conj())
    model = shard_units(implementation, copy.deepcopy(reference), [])
    model.unshard()
    assert_close(model.mix, reference.mix)
    model.reshard()
    saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert_close(saved["scale"], reference.scale.detach())
    twin = copy.deepcopy(model)
    model, twin = (compile_if_asked(implementation, one) for one in (model, twin))
    x = batch_of(dist.get_rank(), 0, torch.float32)
    assert_close(twin(x), model(x))
    with torch.no_grad():
        assert_close(model(x), reference(x))


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_shown_saved_and_copied(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, show_and_save, implementation)


class Unread(Spectral):
    """Ranks beside the first read no complex parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if dist.get_rank() == 0 else self.enter(x).square().mean()


def reduce_unused() -> None:
    torch.manual_seed(42)
    model = Unread()
    shard_units("sharded", model, [])
    model.set_reduce_scatter_unused_params(True)
    model(batch_of(0, 0, torch.float32)).backward()
    reference = Spectral()
    reference.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
    (reference(batch_of(0, 0, torch.float32)) / 2).backward()
    assert_close(model.mix.grad.full_tensor(), reference.mix.grad)


def test_zeros_are_reduced_where_a_rank_does_not_read_them(run_on_gloo_ranks):
    run_on_gloo_ranks(2, reduce_unused)


@pytest.mark.inductor
def test_through_inductor(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train, "compiled", torch.complex64, {}, 1, 3 if is_thorough() else 1)


class Normalising(Spectral):
    """Writes to a complex weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mix.div_(self.mix.abs().max())
            self.scale.data.mul_(0.5j)
        return super().forward(x)


def write_in_forward(implementation: str) -> None:
    torch.manual_seed(42)
    reference = Normalising()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    forward = compile_if_asked(implementation, model)
    x = batch_of(0, 0, torch.float32)
    expected, found = reference(x), forward(x)
    assert_close(found, expected)
    expected.backward()
    found.backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(param.full_tensor(), other, msg=lambda text, name=name: f"{name}: {text}")
        assert_close(param.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name}.grad: {text}")


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_writes_in_a_forward_hold(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, write_in_forward, implementation)
