"""Units that a planner keeps gathered between micro-batches: fewer gathers, the gradients of the unsharded model."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from .comm_counts import count_collectives
from .implementations import compile_if_asked
from .parity import check_sharded_parity, start_lockstep
from .toy_models import mlp_workload

WORKLOAD = mlp_workload((32, 128), (128, 32), (32, 128), (128, 32))
NUM_MICRO_BATCHES = 3


def accumulate(budget: str, reshard: bool | None = None, evaluates: bool = False) -> list[int]:
    """Two steps of the optimizer; the gathers of each micro-batch of the second, when everything is compiled."""
    lockstep = start_lockstep(WORKLOAD, "sharded", reshard_after_forward=reshard)
    model, rank = lockstep.model, dist.get_rank()
    options = {"hardware": "cpu-ethernet-1g", "bucket": "auto", "memory_budget": budget}
    forward = compile_if_asked("compiled", model, verify="full", **options)
    for step in range(2):
        gathers = []
        for micro in range(NUM_MICRO_BATCHES):
            number = step * NUM_MICRO_BATCHES + micro
            for other in range(dist.get_world_size()):
                loss = WORKLOAD.loss(lockstep.reference, WORKLOAD.batch_of(other, number))
                (loss / dist.get_world_size()).backward()
            model.set_requires_gradient_sync(micro == NUM_MICRO_BATCHES - 1)
            with count_collectives() as counts:
                WORKLOAD.loss(forward, WORKLOAD.batch_of(rank, number)).backward()
            gathers.append(counts["gathers"])
            if evaluates:
                check_evaluation(lockstep.reference, forward, number)
        check_sharded_parity(lockstep.reference, model)
        lockstep.update(step)
    return gathers


def check_evaluation(reference: nn.Module, forward: Callable[..., Tensor], number: int) -> None:
    (batch,) = WORKLOAD.batch_of(0, number)
    with torch.no_grad():
        assert_close(forward(batch), reference(batch))


def test_with_room_parameters_are_gathered_once_a_step(run_on_gloo_ranks):
    for first, *others in run_on_gloo_ranks(2, accumulate, "1GB"):
        assert first > 0 and others == [0, 0]


def test_without_room_they_are_gathered_again(run_on_gloo_ranks):
    for gathers in run_on_gloo_ranks(2, accumulate, "150kB"):
        assert min(gathers) > 0 and len(set(gathers)) == 1


@pytest.mark.slow
def test_what_the_user_decided_stays(run_on_gloo_ranks):
    for gathers in run_on_gloo_ranks(2, accumulate, "1GB", True):
        assert min(gathers) > 0 and len(set(gathers)) == 1


def test_an_evaluation_between_two_micro_batches_sees_the_parameters(run_on_gloo_ranks):
    run_on_gloo_ranks(2, accumulate, "1GB", None, True)
