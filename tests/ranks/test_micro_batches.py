"""Units that a planner keeps gathered between micro-batches: fewer gathers, the gradients of the unsharded model."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import compile_if_asked
from support.parity import check_sharded_parity, start_lockstep
from support.toy_models import mlp_workload
from torch import Tensor, nn
from torch.testing import assert_close

WORKLOAD = mlp_workload((32, 128), (128, 32), (32, 128), (128, 32))
NUM_MICRO_BATCHES = 3


def accumulate(
    budget: str | None, reshard: bool | None = None, between: str = "", sizes: tuple[int, ...] = ()
) -> list[int]:
    """Three steps of the optimizer; the gathers of each micro-batch of the last, when everything is compiled.

    Args:
        between: what happens between micro-batches: an "evaluation", or a "state dict" on one rank.
        sizes: of this rank's batch in the last micro-batch of a step, of each rank; the others have 4 rows.
    """
    lockstep = start_lockstep(WORKLOAD, "sharded", reshard_after_forward=reshard)
    model, rank = lockstep.model, dist.get_rank()
    options = {"hardware": "cpu-ethernet-1g", "bucket": "auto", "memory_budget": budget}
    forward = compile_if_asked("compiled", model, verify="full", **options)
    for step in range(3):
        gathers = []
        for micro in range(NUM_MICRO_BATCHES):
            number = step * NUM_MICRO_BATCHES + micro
            is_last = micro == NUM_MICRO_BATCHES - 1
            rows = sizes if sizes and is_last and step == 1 else (4,) * dist.get_world_size()
            batches = [WORKLOAD.batch_of(other, number, rows[other]) for other in range(dist.get_world_size())]
            for batch in batches:
                (WORKLOAD.loss(lockstep.reference, batch) / dist.get_world_size()).backward()
            model.set_requires_gradient_sync(is_last)
            with count_collectives() as counts:
                WORKLOAD.loss(forward, batches[rank]).backward()
            gathers.append(counts["gathers"])
            if between == "evaluation":
                check_evaluation(lockstep.reference, forward, number)
            if between == "state dict" and rank == 0:
                assert model.state_dict().keys() == lockstep.reference.state_dict().keys()
        check_sharded_parity(lockstep.reference, model)
        lockstep.update(step)
    return gathers


def check_evaluation(reference: nn.Module, forward: Callable[..., Tensor], number: int) -> None:
    (batch,) = WORKLOAD.batch_of(0, number)
    with torch.no_grad():
        expected = reference(batch)
        assert_close(forward(batch), expected)
    with torch.inference_mode():
        assert_close(forward(batch), expected)


@pytest.mark.slow  # with an evaluation in between, too: below
def test_with_room_parameters_are_gathered_once_a_step(run_on_gloo_ranks):
    for first, *others in run_on_gloo_ranks(2, accumulate, "1GB"):
        assert first > 0 and others == [0, 0]


def test_without_room_they_are_gathered_again(run_on_gloo_ranks):
    """Later micro-batches merge less: gradients that wait leave them less of the budget."""
    for first, *others in run_on_gloo_ranks(2, accumulate, "171kB"):
        assert first > 0 and min(others) >= first


@pytest.mark.slow
def test_what_the_user_decided_stays(run_on_gloo_ranks):
    for gathers in run_on_gloo_ranks(2, accumulate, "1GB", True):
        assert min(gathers) > 0 and len(set(gathers)) == 1


@pytest.mark.parametrize("between", ["evaluation", pytest.param("state dict", marks=pytest.mark.slow)])
def test_what_is_gathered_stays_so(run_on_gloo_ranks, between):
    for first, *others in run_on_gloo_ranks(2, accumulate, "1GB", None, between):
        assert first > 0 and others == [0, 0]


@pytest.mark.parametrize("budget", ["1GB", pytest.param(None, marks=pytest.mark.slow)])
def test_a_rank_compiles_alone_when_gradients_no_longer_wait(run_on_gloo_ranks, budget):
    """Its last micro-batch has another size than all before."""
    for first, *others in run_on_gloo_ranks(2, accumulate, budget, None, "", (4, 3)):
        assert first > 0 and (others == [0, 0]) == (budget is not None)
