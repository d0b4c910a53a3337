"""A unit of norm and output layer that runs once as a part of the model, then again for each chunk of the loss."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.implementations import (
    EVERY,
    GRAPHSHARD,
    compile_if_asked,
    pick_fully_shard,
    shard_units,
    world_mesh,
)
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

NUM_CHUNKS = 4
VOCABULARY = 9


class Chunked(nn.Module):
    """The forward ends with the norm; the output layer is called by whoever wants logits."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.LayerNorm(6)
        self.output = nn.Linear(6, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.body(self.tokens(tokens)))


def tokens_of(rank: int, step: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def losses_by_chunk(
    forward: Callable[[Tensor], Tensor], output: Callable[[Tensor], Tensor], tokens: Tensor
) -> list[Tensor]:
    """The losses of each chunk of the sequence, from hidden states cut off from the graph; their gradient goes on."""
    hidden = forward(tokens[:, :-1])
    cut = hidden.detach().requires_grad_()
    losses = []
    for inputs, targets in zip(
        cut.chunk(NUM_CHUNKS, dim=1), tokens[:, 1:].chunk(NUM_CHUNKS, dim=1), strict=True
    ):
        loss = F.cross_entropy(output(inputs.flatten(0, 1)), targets.flatten(), reduction="sum")
        loss.backward()
        losses.append(loss.detach())
    hidden.backward(cut.grad)
    return losses


def train_in_chunks(implementation: str, tied: bool, as_list: bool) -> None:
    torch.manual_seed(42)
    reference = Chunked(tied)
    model = copy.deepcopy(reference)
    last = [model.norm, model.output]
    if tied:
        last.append(model.tokens)
    for unit in [model.body, *([last] if as_list else last), model]:
        pick_fully_shard(implementation)(unit, mesh=world_mesh())
    forward = compile_if_asked(implementation, model)
    output = compile_if_asked(implementation, model.output)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        expected = [losses_by_chunk(reference, reference.output, tokens_of(each, step)) for each in range(2)]
        for parameter in reference.parameters():
            parameter.grad /= world_size
        found = losses_by_chunk(forward, output, tokens_of(rank, step))
        assert_close(found, expected[rank])
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.compiles("False-True", "True-True")
@pytest.mark.parametrize(("tied", "as_list"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("implementation", EVERY)
def test_output_layer_called_for_each_chunk(run_on_gloo_ranks, implementation, tied, as_list):
    run_on_gloo_ranks(2, train_in_chunks, implementation, tied, as_list)


def accumulate_in_chunks(implementation: str) -> None:
    """Three micro-batches in chunks, reduced with the last."""
    torch.manual_seed(42)
    reference = Chunked(tied=False)
    model = copy.deepcopy(reference)
    for unit in [model.body, [model.norm, model.output], model]:
        pick_fully_shard(implementation)(unit, mesh=world_mesh())
    forward = compile_if_asked(implementation, model)
    output = compile_if_asked(implementation, model.output)
    for step in range(3):
        for each in range(2):
            losses_by_chunk(reference, reference.output, tokens_of(each, step))
        model.set_requires_gradient_sync(step == 2)
        losses_by_chunk(forward, output, tokens_of(dist.get_rank(), step))
    for parameter in reference.parameters():
        parameter.grad /= dist.get_world_size()
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_accumulation_in_chunks(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, accumulate_in_chunks, implementation)


class Checkpointed(nn.Module):
    """Nested units: a layer inside a checkpointed block inside the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + checkpoint(self.block, x, use_reentrant=False))


def difference_of_two_forwards(implementation: str) -> None:
    """The loss of preference training: one backward through two forwards, checkpointed, in nested units."""
    torch.manual_seed(42)
    reference = Checkpointed()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.block[0], model.block])
    forward = compile_if_asked(implementation, model)

    def loss_of(call: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
        chosen, rejected = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        return (call(chosen) - call(rejected)).square().sum()

    for step in range(2):
        for rank in range(2):
            (loss_of(reference, rank, step) / 2).backward()
        loss_of(forward, dist.get_rank(), step).backward()
        check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_one_backward_of_two_checkpointed_forwards(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, difference_of_two_forwards, implementation)
