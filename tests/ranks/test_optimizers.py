"""Stock optimizers and gradient clipping on sharded parameters do what they do on whole ones."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from support.implementations import EVERY, GRAPHSHARD, UNCOMPILED, compile_if_asked, shard_units, world_mesh
from support.parity import backward_on_all_batches, check_sharded_parity, start_lockstep
from support.toy_models import WORKLOADS
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import lr_scheduler
from torch.testing import assert_close


def adamw_foreach(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def adamw_fused(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sgd_momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw_loop(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False, amsgrad=True)


def adagrad(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2)


def rmsprop(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5)


def adam_grouped(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups of different rates and decays, as weights and biases often get."""
    weights, biases = [], []
    for parameter in parameters:
        (weights if parameter.ndim > 1 else biases).append(parameter)
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3e-3, "weight_decay": 0.0}],
        lr=1e-2,
    )


OPTIMIZERS = {
    "adamw_foreach": adamw_foreach,
    "adamw_fused": adamw_fused,
    "sgd_momentum": sgd_momentum,
    "adamw_loop": adamw_loop,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "adam_grouped": adam_grouped,
}
COMMON_OPTIMIZERS = ["adamw_foreach", "adamw_fused", "sgd_momentum"]

SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3),
    "warmup_then_cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        milestones=[3],
    ),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6),
}


def train_with_optimizer(implementation: str, optimizer: str, workload: str) -> None:
    lockstep = start_lockstep(WORKLOADS[workload], implementation, make_optimizer=OPTIMIZERS[optimizer])
    lockstep.train(4)
    state = lockstep.optimizers[1].state
    for name, parameter in lockstep.model.named_parameters():
        values = [value for value in state[parameter].values() if isinstance(value, torch.Tensor)]
        moments = [value for value in values if value.ndim]
        assert moments and all(isinstance(value, DTensor) for value in moments), name


def train_with_scheduler(implementation: str, scheduler: str) -> None:
    """The schedulers set the rate of the sharded step too; a tensor rate is not needed for it."""
    lockstep = start_lockstep(WORKLOADS["mlp_5_rows"], implementation, make_optimizer=adam_grouped)
    schedulers = [SCHEDULERS[scheduler](optimizer) for optimizer in lockstep.optimizers]
    rates = set()
    for step in range(6):
        lockstep.backward(step)
        lockstep.update(step)
        for one in schedulers:
            one.step()
        expected, found = ([group["lr"] for group in opt.param_groups] for opt in lockstep.optimizers)
        assert found == expected
        rates.add(found[0])
    assert len(rates) >= 3, "the schedule changed nothing"


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


def clip_gradients(
    implementation: str, workload_name: str, norm_type: float, foreach: bool | None = None
) -> None:
    """The total norm is the unsharded model's, on every rank, and the clipped gradients too.

    It takes one all-reduce, whatever the number of parameters.
    """
    lockstep = start_lockstep(WORKLOADS[workload_name], implementation)
    for step in range(3):
        lockstep.backward(step)
        options = {"max_norm": 0.1, "norm_type": norm_type, "foreach": foreach}
        expected = nn.utils.clip_grad_norm_(lockstep.reference.parameters(), **options)
        with CommDebugMode() as communication:
            found = nn.utils.clip_grad_norm_(lockstep.model.parameters(), **options)
        counts = {str(key): count for key, count in communication.get_comm_counts().items() if count}
        assert counts == {"c10d_functional.all_reduce": 1}
        assert expected > 0.1, "nothing would be clipped"
        assert_close(found.full_tensor(), expected)
        check_sharded_parity(lockstep.reference, lockstep.model)
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


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in COMMON_OPTIMIZERS])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_rarer_optimizer_steps_like_unsharded(run_on_gloo_ranks, implementation, optimizer):
    run_on_gloo_ranks(2, train_with_optimizer, implementation, optimizer, "mlp_5_rows")


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_rate_schedule(run_on_gloo_ranks, implementation, scheduler):
    run_on_gloo_ranks(2, train_with_scheduler, implementation, scheduler)


def test_rate_schedule_of_compiled_model(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_with_scheduler, "compiled", "step")


@pytest.mark.parametrize("workload", ["mlp_5_rows", "transformer"])
@pytest.mark.parametrize("optimizer", COMMON_OPTIMIZERS)
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


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0], ids=["l1", "l2"])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_clip_grad_norm_with_empty_shards(run_on_gloo_ranks, implementation, norm_type, foreach):
    """Not the maximum norm: torch refuses it on a rank whose shard is empty."""
    run_on_gloo_ranks(4, clip_gradients, implementation, "mlp_5_rows", norm_type, foreach)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=["l1", "l2", "max"])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_clip_grad_norm_without_foreach(run_on_gloo_ranks, implementation, norm_type):
    run_on_gloo_ranks(2, clip_gradients, implementation, "transformer", norm_type, False)


@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["l2", "max"])
def test_clip_grad_norm_of_compiled_model(run_on_gloo_ranks, norm_type):
    run_on_gloo_ranks(2, clip_gradients, "compiled", "mlp_even", norm_type)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_optimizer_made_before_sharding_is_refused(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_early_optimizer, implementation)
