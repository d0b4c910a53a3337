"""Other entries than forward, and going on after an exception."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, pick_fully_shard, world_mesh
from support.parity import check_sharded_parity
from torch import Tensor, nn


class Encoder(nn.Module):
    """`encode` uses parameters without `forward`; `forward` may fail in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.outer = nn.Linear(5, 3)
        self.fails = False

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        if self.fails:
            raise KeyError("in the middle")
        return self.outer(hidden)


def _pair(implementation: str) -> tuple[Encoder, Any]:
    torch.manual_seed(42)
    reference = Encoder()
    model = copy.deepcopy(reference)
    fully_shard = pick_fully_shard(implementation)
    fully_shard(model.outer, mesh=world_mesh())
    return reference, fully_shard(model, mesh=world_mesh())


def _inputs() -> list[Tensor]:
    return [torch.full((2, 4), 1.0 + rank) for rank in range(dist.get_world_size())]


def call_a_registered_method(implementation: str) -> None:
    if implementation == "fsdp2":
        from torch.distributed.fsdp import register_fsdp_forward_method
    else:
        from graphshard import register_fsdp_forward_method
    reference, model = _pair(implementation)
    register_fsdp_forward_method(model, "encode")
    encode: Callable[..., Tensor] = model.encode
    if implementation == "compiled":
        encode = torch.compile(encode, backend="graphshard", fullgraph=True)
    for _ in range(2):
        for each in _inputs():
            (reference.encode(each).sum() / 2).backward()
        encode(_inputs()[dist.get_rank()]).sum().backward()
        check_sharded_parity(reference, model)
    assert model.inner.weight.grad is not None


@pytest.mark.parametrize("implementation", EVERY)
def test_a_registered_method_gathers(run_on_gloo_ranks: Callable[..., list[Any]], implementation: str) -> None:
    run_on_gloo_ranks(2, call_a_registered_method, implementation)


def go_on_after_an_exception(implementation: str) -> None:
    """A micro-batch waits unreduced, the next forward fails: both are dropped, the step after is right."""
    reference, model = _pair(implementation)
    forward = torch.compile(model, backend="graphshard") if implementation == "compiled" else model
    x = _inputs()[dist.get_rank()]
    model.set_requires_gradient_sync(False)
    forward(x).sum().backward()
    model.fails = True
    with pytest.raises(KeyError, match="in the middle"):
        model(x)
    model.fails = False
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    for each in _inputs():
        (reference(each).sum() / 2).backward()
    forward(x).sum().backward()
    if implementation == "fsdp2":  # keeps gradients in the parameters it has gathered
        return
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_training_goes_on_after_an_exception(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    run_on_gloo_ranks(2, go_on_after_an_exception, implementation)
