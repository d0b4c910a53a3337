"""torch.amp.GradScaler on sharded gradients: one rank's overflow is every rank's skipped step."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.implementations import UNCOMPILED
from support.parity import Lockstep, backward_on_all_batches, check_sharded_parity, start_lockstep
from support.toy_models import WORKLOADS
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

SCALE = 2.0**10
OVERFLOW_STEP = 2
OVERFLOW_PARAMETER = "0.weight"


def sgd_momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS = {"sgd_momentum": sgd_momentum, "adamw": adamw}


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2, backoff_factor=0.25)


def overflow_on_last_rank(lockstep: Lockstep, step: int) -> None:
    """Put an inf into the last row of a gradient: on the ranks, into the shard of the last one that has rows."""
    if step != OVERFLOW_STEP:
        return
    dict(lockstep.reference.named_parameters())[OVERFLOW_PARAMETER].grad[-1] = torch.inf
    shard = dict(lockstep.model.named_parameters())[OVERFLOW_PARAMETER].grad.to_local()
    holders = torch.tensor([float(dist.get_rank()) if len(shard) else -1.0])
    dist.all_reduce(holders, op=dist.ReduceOp.MAX)
    if dist.get_rank() == int(holders.item()):
        shard[-1] = torch.inf
    elif len(shard):
        assert shard.isfinite().all(), "the overflow must be one rank's only"


def train_with_scaler(implementation: str, optimizer: str, clip: bool) -> list[float]:
    """Five steps beside the unsharded model with a scaler of its own; the scale after each step."""
    lockstep = start_lockstep(WORKLOADS["mlp_5_rows"], implementation, make_optimizer=OPTIMIZERS[optimizer])
    models = (lockstep.reference, lockstep.model)
    scalers = [make_scaler(), make_scaler()]
    workload, rank, scales = lockstep.workload, dist.get_rank(), []
    for step in range(5):
        scaled = [
            scalers[0].scale(workload.loss(lockstep.reference, workload.batch_of(other, step)))
            for other in range(dist.get_world_size())
        ]
        torch.stack(scaled).mean().backward()
        scalers[1].scale(workload.loss(lockstep.forward, workload.batch_of(rank, step))).backward()
        overflow_on_last_rank(lockstep, step)
        before = [parameter.to_local().clone() for parameter in lockstep.model.parameters()]
        for model, opt, scaler in zip(models, lockstep.optimizers, scalers, strict=True):
            if clip:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        check_sharded_parity(*models)
        after = [parameter.to_local() for parameter in lockstep.model.parameters()]
        is_unchanged = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        holds_rows = any(value.numel() for value in after)
        assert is_unchanged == (step == OVERFLOW_STEP or not holds_rows), f"step {step}"
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[1].get_scale())
    return scales


def unscale_gradients(implementation: str) -> None:
    """After unscale_ the gradients are the unscaled model's, and still DTensors."""
    lockstep = start_lockstep(WORKLOADS["transformer"], implementation)
    workload, scaler = lockstep.workload, make_scaler()
    backward_on_all_batches(workload, lockstep.reference, 0)
    scaler.scale(workload.loss(lockstep.forward, workload.batch_of(dist.get_rank(), 0))).backward()
    weight, expected = lockstep.model.tokens.weight, lockstep.reference.tokens.weight
    assert_close(weight.grad.full_tensor(), expected.grad * SCALE, rtol=1e-5, atol=1e-3)
    scaler.unscale_(lockstep.optimizers[1])
    assert isinstance(weight.grad, DTensor)
    check_sharded_parity(lockstep.reference, lockstep.model)


@pytest.mark.parametrize(
    ("optimizer", "clip", "world_size"),
    [("sgd_momentum", True, 2), ("adamw", False, 2), ("adamw", False, 4)],
)
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_overflow_on_one_rank_skips_the_step(run_on_gloo_ranks, implementation, optimizer, clip, world_size):
    scales = run_on_gloo_ranks(world_size, train_with_scaler, implementation, optimizer, clip)
    expected = [SCALE, 2 * SCALE, SCALE / 2, SCALE / 2, SCALE]
    assert scales == [expected] * world_size


def test_overflow_in_compiled_model(run_on_gloo_ranks):
    scales = run_on_gloo_ranks(2, train_with_scaler, "compiled", "adamw", True)
    assert scales == [[SCALE, 2 * SCALE, SCALE / 2, SCALE / 2, SCALE]] * 2


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_unscaled_gradients(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, unscale_gradients, implementation)
