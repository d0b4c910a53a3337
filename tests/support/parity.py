"""Does a sharded model train like the unsharded one? Checks of one state, and whole trainings in lockstep."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

from support.implementations import compile_if_asked, shard_units
from support.thorough import is_thorough
from support.toy_models import WORKLOADS, Workload

LEARNING_RATE = 1e-2


def local_piece(full: Tensor, dim: int = 0) -> Tensor:
    """This rank's piece of a full tensor as torch.chunk cuts it: empty where the pieces run out."""
    pieces = torch.chunk(full, dist.get_world_size(), dim=dim)
    rank = dist.get_rank()
    return pieces[rank] if rank < len(pieces) else full.narrow(dim, 0, 0)


def check_shard(name: str, full: Tensor, sharded: Tensor) -> None:
    """`sharded` is a DTensor on dim 0 whose global shape and local piece are those of `full`."""
    assert isinstance(sharded, DTensor), f"{name} is a {type(sharded).__name__}, not a DTensor"
    assert tuple(sharded.placements) == (Shard(0),), f"{name} is placed {sharded.placements}"
    assert sharded.shape == full.shape, f"{name} has the global shape {tuple(sharded.shape)}"
    assert_close(sharded.to_local(), local_piece(full.detach()), msg=lambda text: f"{name}: {text}")


def check_sharded_parity(reference: nn.Module, model: nn.Module) -> None:
    """Same names in the same order; parameters and gradients the right shards; the same gradients absent."""
    expected, found = dict(reference.named_parameters()), dict(model.named_parameters())
    assert list(found) == list(expected), (list(found), list(expected))
    for name, parameter in found.items():
        assert isinstance(parameter, nn.Parameter), f"{name} is not an nn.Parameter"
        assert parameter.requires_grad == expected[name].requires_grad, name
        check_shard(name, expected[name], parameter)
        gradient, expected_gradient = parameter.grad, expected[name].grad
        has_gradient = gradient is not None
        assert has_gradient == (expected_gradient is not None), f"{name}: has a gradient is {has_gradient}"
        if has_gradient:
            check_shard(f"gradient of {name}", expected_gradient, gradient)


def check_same_shards(expected: nn.Module, found: nn.Module) -> None:
    """Two sharded models agree: parameters and gradients, in spec and in value."""
    for (name, one), (other_name, other) in zip(
        expected.named_parameters(), found.named_parameters(), strict=True
    ):
        assert other_name == name
        assert_close(other.to_local(), one.to_local(), msg=lambda text, name=name: f"{name}: {text}")
        assert other.placements == one.placements and other.shape == one.shape, name
        assert (other.grad is None) == (one.grad is None), f"gradient of {name}"
        if one.grad is not None:
            assert_close(
                other.grad.to_local(), one.grad.to_local(), msg=lambda text, name=name: f"{name}.grad: {text}"
            )


def backward_on_all_batches(
    workload: Workload, reference: nn.Module, step: int, batch_size: int = 4
) -> list[Tensor]:
    """Backward of the mean over ranks of the unsharded model's losses; the loss of each rank's batch."""
    world_size = dist.get_world_size()
    losses = [
        workload.loss(reference, workload.batch_of(rank, step, batch_size)) for rank in range(world_size)
    ]
    (torch.stack(losses).sum() / world_size).backward()
    return [loss.detach() for loss in losses]


@dataclass(kw_only=True)
class Lockstep:
    """An unsharded model and a sharded one with the same weights, trained on the same batches."""

    workload: Workload
    reference: nn.Module
    model: nn.Module
    forward: Callable[..., Any]
    optimizers: list[torch.optim.Optimizer]

    def backward(self, step: int) -> None:
        """Forward and backward of both; losses and gradients agree."""
        expected = backward_on_all_batches(self.workload, self.reference, step)
        rank = dist.get_rank()
        loss = self.workload.loss(self.forward, self.workload.batch_of(rank, step))
        loss.backward()
        assert_close(loss.detach(), expected[rank], msg=lambda text: f"loss of step {step}: {text}")
        check_sharded_parity(self.reference, self.model)

    def update(self, step: int) -> None:
        """Optimizer step and zero_grad of both; parameters agree in between."""
        for optimizer in self.optimizers:
            optimizer.step()
        check_sharded_parity(self.reference, self.model)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        check_sharded_parity(self.reference, self.model)

    def train(self, num_steps: int = 10) -> None:
        for step in range(num_steps):
            self.backward(step)
            self.update(step)


def make_adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def start_lockstep(
    workload: Workload,
    implementation: str,
    *,
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = make_adam,
    prepare: Callable[[nn.Module], object] | None = None,
    fullgraph: bool = True,
    **shard_options: Any,
) -> Lockstep:
    """Build the workload's model twice, shard one, compile it if asked, and make both optimizers.

    `prepare` changes the unsharded model before it is copied.
    """
    torch.manual_seed(42)
    reference = workload.build()
    if prepare is not None:
        prepare(reference)
    model = copy.deepcopy(reference)
    shard_units(implementation, model, workload.list_units(model), **shard_options)
    return Lockstep(
        workload=workload,
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model, fullgraph=fullgraph),
        optimizers=[make_optimizer(reference.parameters()), make_optimizer(model.parameters())],
    )


def train_in_lockstep(workload_name: str, implementation: str, reshard_after_forward: bool | None) -> None:
    """Adam steps against the unsharded model and, unless it is the one tested, FSDP2: ten, in `make test` four."""
    workload = WORKLOADS[workload_name]
    tested = start_lockstep(workload, implementation, reshard_after_forward=reshard_after_forward)
    num_steps = 10 if is_thorough() else 4
    if implementation == "fsdp2":
        tested.train(num_steps)
        return
    fsdp2 = start_lockstep(workload, "fsdp2", reshard_after_forward=reshard_after_forward)
    for step in range(num_steps):
        for pair in (fsdp2, tested):
            pair.backward(step)
        check_same_shards(fsdp2.model, tested.model)
        for pair in (fsdp2, tested):
            pair.update(step)
        check_same_shards(fsdp2.model, tested.model)
