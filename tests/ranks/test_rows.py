"""Compiled training where shards are sent as they lie in memory: real buckets, values of the unsharded model."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.parity import start_lockstep
from support.toy_models import WORKLOADS
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.ir import bucket_ops
from graphshard.ir.shard_rows import lie_in_a_row

NUM_STEPS = 3


@contextlib.contextmanager
def _asked() -> Iterator[list[bool]]:
    """For each bucket of gathers that is sent as it lies, or is to be, whether its shards were neighbours."""
    found: list[bool] = []

    def ask(pieces: object) -> bool:
        found.append(lie_in_a_row(pieces))
        return found[-1]

    with mock.patch.object(bucket_ops, "lie_in_a_row", ask):
        yield found


def train(workload: str, implementation: str, dtype: torch.dtype | None) -> list[bool]:
    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype is not None else MixedPrecisionPolicy()
    lockstep = start_lockstep(WORKLOADS[workload], implementation, mp_policy=policy)
    with _asked() as neighbours:
        if dtype is None:
            lockstep.train(NUM_STEPS)
        else:
            lockstep.workload.loss(lockstep.forward, lockstep.workload.batch_of(dist.get_rank(), 0)).backward()
    return neighbours


def train_after_assignment(workload: str) -> list[bool]:
    """Parameters are replaced by those of a state dict, which lie elsewhere."""
    lockstep = start_lockstep(WORKLOADS[workload], "compiled")
    state = {name: value.detach().clone() for name, value in lockstep.model.state_dict().items()}
    lockstep.model.load_state_dict(state, assign=True)
    lockstep.optimizers[1] = type(lockstep.optimizers[1])(lockstep.model.parameters())
    lockstep.optimizers[0] = type(lockstep.optimizers[0])(lockstep.reference.parameters())
    with _asked() as neighbours:
        lockstep.train(NUM_STEPS)
    return neighbours


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_units_are_sent_as_they_lie(run_on_gloo_ranks, dtype):
    for neighbours in run_on_gloo_ranks(2, train, "transformer", "compiled", dtype):
        assert neighbours and all(neighbours)


def test_parameters_that_lie_elsewhere_are_copied(run_on_gloo_ranks):
    for neighbours in run_on_gloo_ranks(2, train_after_assignment, "transformer"):
        assert neighbours and not any(neighbours)
