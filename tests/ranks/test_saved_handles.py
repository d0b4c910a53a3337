"""Backwards of compiled code under hooks of saved tensors: they know their units, and what the user has set on them.

Such hooks are in force around each uncompiled forward of a unit, so also around the pieces of a model with a break.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import shard_units
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from graphshard.errors import UnsupportedShardingError

from .test_comm_hooks import CountingReduceScatter

Run = Callable[..., list[Any]]


class Block(nn.Module):
    """Torch compiles no layer of its own by itself."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_inputs, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Net(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.breaks = Block(4, 6), Block(6, 4), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "hooks of the user": lambda: saved_tensors_hooks(Tensor.detach, lambda value: value),
    "activations on the CPU": save_on_cpu,
    "hooks that copy": lambda: saved_tensors_hooks(Tensor.clone, lambda value: value),
}


def _pair(case: str) -> tuple[Net, Net, Callable[[Tensor], Tensor]]:
    """The unsharded model, the sharded one, and its compiled forward."""
    reference = Net("break" in case)
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model.first, model.second])
    if "blocks" in case:
        for block in (model.first, model.second):
            block.compile(backend="graphshard", options={"hardware": None})
        return reference, model, model
    return reference, model, torch.compile(model, backend="graphshard", options={"hardware": None})


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def accumulate(case: str) -> None:
    """Of three micro-batches only the last reduces, with the user's collective."""
    counters.clear()
    reference, model, forward = _pair(case)
    reduce = CountingReduceScatter()
    model.first.set_custom_reduce_scatter(reduce)
    hooks = next((make for name, make in HOOKS.items() if name in case), nullcontext)
    for step in range(3):
        for rank in range(dist.get_world_size()):
            (reference(_batch(step, rank)).square().mean() / dist.get_world_size()).backward()
        model.set_requires_gradient_sync(step == 2)
        with hooks():
            loss = forward(_batch(step, dist.get_rank())).square().mean()
        with count_collectives() as counts:
            loss.backward()
        if step < 2:
            assert all(parameter.grad is None for parameter in model.parameters()), "the gradients wait"
            assert not counts["reductions"] and not reduce.sizes
    assert reduce.sizes == [30]
    check_sharded_parity(reference, model)
    assert counters["stats"]["unique_graphs"] == (1 if case in HOOKS else 2)


@pytest.mark.parametrize(
    "case",
    [
        "break",
        "blocks",
        "hooks of the user",
        "activations on the CPU",
        "break, hooks that copy",
        "blocks, hooks that copy",
    ],
)
def test_gradients_wait_and_are_reduced_by_the_users_collective(run_on_gloo_ranks: Run, case: str) -> None:
    run_on_gloo_ranks(2, accumulate, case)


def refuse_copies() -> None:
    _, _, forward = _pair("whole")
    with HOOKS["hooks that copy"]():
        loss = forward(_batch(0, dist.get_rank())).sum()
    with pytest.raises(UnsupportedShardingError, match="tensors without elements as they are, and use save_on_cpu"):
        loss.backward()


def test_hooks_that_copy_what_leads_to_units_are_refused(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, refuse_copies)
