"""Stock optimizers and gradient clipping on sharded parameters do what they do on whole ones."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from .implementations import EVERY, GRAPHSHARD, UNCOMPILED, compile_if_asked, shard_units, world_mesh
from .parity import backward_on_all_batches, check_sharded_parity, start_lockstep
from .toy_models import WORKLOADS


def adamw_foreach(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def adamw_fused(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sgd_momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3)


OPTIMIZERS = {"adamw_foreach": adamw_foreach, "adamw_fused": adamw_fused, "sgd_momentum": sgd_momentum}


def train_with_optimizer(implementation: str, optimizer: str, workload: str) -> None:
    lockstep = start_lockstep(WORKLOADS[workload], implementation, make_optimizer=OPTIMIZERS[optimizer])
    lockstep.train(4)
    state = lockstep.optimizers[1].state
    for name, parameter in lockstep.model.named_parameters():
        values = [value for value in state[parameter].values() if isinstance(value, torch.Tensor)]
        moments = [value for value in values if value.ndim]
        assert moments and all(isinstance(value, DTensor) for value in moments), name


def train_in_double(implementation: str) -> None:
    """`.to(float64)` after sharding: shards and gradients are double, the values exact."""
    workload = WORKLOADS["mlp_7_15_3"]
    torch.manual_seed(42)
    reference = workload.build()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, workload.list_units(model))
    model.to(torch.float64)
    reference.to(torch.float64)
    forward = compile_if_asked(implementation, model)
    optimizers = [adamw_foreach(reference.parameters()), adamw_foreach(model.parameters())]
    rank = world_mesh().get_local_rank()
    for step in range(4):
        expected = backward_on_doubles(reference, step)
        (inputs,) = workload.batch_of(rank, step)
        loss = workload.loss(forward, (inputs.double(),))
        loss.backward()
        assert_close(loss.detach(), expected[rank], rtol=1e-12, atol=1e-12)
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            dtypes = {parameter.dtype, local.dtype, parameter.grad.dtype, parameter.grad.to_local().dtype}
            assert dtypes == {torch.float64}, name
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_sharded_parity(reference, model)


def backward_on_doubles(reference: nn.Module, step: int) -> list[torch.Tensor]:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return reference(inputs.double())

    return backward_on_all_batches(WORKLOADS["mlp_7_15_3"], forward, step)


def clip_gradients(implementation: str, workload_name: str, norm_type: float) -> None:
    """The total norm is the unsharded model's, on every rank, and the clipped gradients too."""
    lockstep = start_lockstep(WORKLOADS[workload_name], implementation)
    for step in range(3):
        lockstep.backward(step)
        expected, found = (
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1, norm_type=norm_type)
            for model in (lockstep.reference, lockstep.model)
        )
        assert expected > 0.1, "nothing would be clipped"
        assert_close(found.full_tensor(), expected)
        lockstep.update(step)


def train_with_early_optimizer(implementation: str) -> None:
    """An optimizer made before sharding holds the unsharded parameters, so its steps would change nothing."""
    from graphshard.errors import GraphShardError

    workload = WORKLOADS["mlp_even"]
    model = workload.build()
    optimizer = adamw_foreach(model.parameters())
    with pytest.raises(GraphShardError, match=r"(?is)optimizer.*after"):
        shard_units(implementation, model, workload.list_units(model))
        workload.loss(compile_if_asked(implementation, model), workload.batch_of(0, 0)).backward()
        optimizer.step()


@pytest.mark.parametrize("workload", ["mlp_5_rows", "transformer"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_optimizer_steps_like_unsharded(run_on_gloo_ranks, implementation, optimizer, workload):
    run_on_gloo_ranks(2, train_with_optimizer, implementation, optimizer, workload)


def test_compiled_model_with_fused_optimizer(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_with_optimizer, "compiled", "adamw_fused", "mlp_even")


@pytest.mark.parametrize("implementation", EVERY)
def test_cast_to_double_after_sharding(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_in_double, implementation)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=["l1", "l2", "max"])
@pytest.mark.parametrize(("world_size", "workload"), [(2, "transformer"), (4, "mlp_16_17_8")])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_clip_grad_norm(run_on_gloo_ranks, implementation, world_size, workload, norm_type):
    run_on_gloo_ranks(world_size, clip_gradients, implementation, workload, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0], ids=["l1", "l2"])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_clip_grad_norm_with_empty_shards(run_on_gloo_ranks, implementation, norm_type):
    """Not the maximum norm: torch refuses it on a rank whose shard is empty."""
    run_on_gloo_ranks(4, clip_gradients, implementation, "mlp_5_rows", norm_type)


@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["l2", "max"])
def test_clip_grad_norm_of_compiled_model(run_on_gloo_ranks, norm_type):
    run_on_gloo_ranks(2, clip_gradients, "compiled", "mlp_even", norm_type)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_optimizer_made_before_sharding_is_refused(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_early_optimizer, implementation)
