"""Gradient accumulation under FullyShardedDataParallel: any interleaving of synchronised and other batches.

The matrix of torch's own test of FSDP1: the gradients of K batches, one after another, are those of their
concatenation, whichever of them run inside `no_sync()`.
"""

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.fsdp1 import full_gradients, sgd, wrap
from support.implementations import GRAPHSHARD, compile_if_asked
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.testing import assert_close

#: (inside no_sync, number of batches)
INTERLEAVINGS = (((True, 3), (False, 3), (True, 3)), ((False, 3), (True, 3), (False, 3)))
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
PREFETCHES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Tied(nn.Module):
    """Layers between an embedding and an output that share a weight; long and float buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([Layer(6) for _ in range(2)])
        self.output = nn.Linear(6, 7)
        self.output.weight = self.tokens.weight
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("offset", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens + self.offset) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")


def different_batches(rank: int, number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    first = torch.randint(7, (3, 2), generator=generator)
    batches = [first] + [torch.randint(7, (3, 2), generator=generator) for _ in range(number - 1)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(batches, 2))
    return batches


def accumulate(implementation: str, interleaving: tuple[tuple[bool, int], ...], **options: Any) -> None:
    torch.manual_seed(0)
    reference = Tied()
    torch.manual_seed(0)
    wrapper = wrap(implementation, Tied(), auto_wrap_policy=ModuleWrapPolicy({Layer}), **options)
    number = sum(count for _, count in interleaving)
    batches = [different_batches(rank, number) for rank in range(2)]
    whole = [loss_of(reference, torch.cat(each)) for each in batches]
    (sum(whole) / 2).backward()
    forward, losses, left = compile_if_asked(implementation, wrapper), [], iter(batches[dist.get_rank()])
    for place, (is_unsynced, count) in enumerate(interleaving):
        for index in range(count):
            # The last batch is always synchronised.
            is_last = place == len(interleaving) - 1 and index == count - 1
            context = wrapper.no_sync() if is_unsynced and not is_last else contextlib.nullcontext()
            with context:
                loss = loss_of(forward, next(left))
                loss.backward()
            losses.append(loss.detach())
    assert_close(sum(losses), whole[dist.get_rank()].detach())
    gradients = full_gradients(wrapper)
    expected = {name: param.grad for name, param in reference.named_parameters()}
    assert_close({name: gradients[name] for name in expected}, expected)
    sgd(wrapper).step()


@pytest.mark.sampled
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("interleaving", INTERLEAVINGS, ids=["unsynced first", "synced first"])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_interleaved_batches(run_on_gloo_ranks, implementation, interleaving, prefetch, strategy, use_orig_params):
    run_on_gloo_ranks(2, accumulate_case, implementation, interleaving, prefetch, strategy, use_orig_params)


def accumulate_case(implementation, interleaving, prefetch, strategy, use_orig_params) -> None:
    accumulate(
        implementation,
        interleaving,
        backward_prefetch=prefetch,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )


def accumulate_offloaded() -> None:
    for strategy in STRATEGIES:
        accumulate("sharded", ((True, 3),), cpu_offload=CPUOffload(offload_params=True), sharding_strategy=strategy)


def test_offloaded_parameters(run_on_gloo_ranks):
    run_on_gloo_ranks(2, accumulate_offloaded)


def count(implementation: str) -> None:
    """Inside `no_sync` nothing is reduced; SHARD_GRAD_OP then keeps parameters, FULL_SHARD gathers them again."""
    for strategy, later_gathers in ((ShardingStrategy.FULL_SHARD, True), (ShardingStrategy.SHARD_GRAD_OP, False)):
        wrapper = wrap(implementation, Tied(), auto_wrap_policy=ModuleWrapPolicy({Layer}), sharding_strategy=strategy)
        forward = compile_if_asked(implementation, wrapper)
        with wrapper.no_sync(), wrapper.no_sync():
            loss_of(forward, torch.zeros(1, 2, dtype=torch.long)).backward()
        with wrapper.no_sync(), count_collectives() as inside:
            loss_of(forward, torch.zeros(1, 2, dtype=torch.long)).backward()
        assert inside["reductions"] == 0 and bool(inside["gathers"]) == later_gathers
        assert all(param.grad is None for param in wrapper.parameters())
        with count_collectives() as after:
            loss_of(forward, torch.zeros(1, 2, dtype=torch.long)).backward()
        # A compiled backward may merge the reductions of units.
        assert after["reductions"] == 3 if implementation == "sharded" else after["reductions"] > 0
        with count_collectives() as next_step:
            loss_of(forward, torch.zeros(1, 2, dtype=torch.long)).backward()
        assert next_step["gathers"] > 0


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_collectives_of_no_sync(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, count, implementation)
