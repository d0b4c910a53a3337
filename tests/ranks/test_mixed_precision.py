"""Mixed precision trains like torch's FSDP2 under the same policy."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.implementations import (
    EVERY,
    GRAPHSHARD,
    UNCOMPILED,
    compile_if_asked,
    pick_fully_shard,
    shard_units,
    world_mesh,
)
from support.thorough import is_thorough
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16 reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


def _train(implementation: str, policy_name: str) -> None:
    """Three MLP units, compiled in `make test` one, Adam, against FSDP2 on the same batches."""
    torch.manual_seed(42)
    num_units = 1 if implementation == "compiled" and not is_thorough() else 3
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(num_units))
    )
    policy = POLICIES[policy_name]
    losses = []
    models = []
    for name in ("fsdp2", implementation):
        model = copy.deepcopy(plain)
        shard_units(name, model, list(model), mp_policy=policy)
        forward = compile_if_asked(name, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(dist.get_rank())
        found = []
        for step in range(5):
            batch = torch.randn(4, 16, generator=generator)
            loss = forward(batch).float().square().mean()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.dtype == torch.float32 and parameter.grad.dtype == torch.float32
            if step == 0:
                models.append([parameter.grad.full_tensor() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    tolerance = {"rtol": 1.6e-2, "atol": 2e-3}
    for expected, found in zip(*models, strict=True):
        assert_close(found, expected, **tolerance)
    assert_close(losses[1], losses[0], **tolerance)


@pytest.mark.parametrize("policy_name", POLICIES)
def test_uncompiled_like_fsdp2(run_on_gloo_ranks, policy_name):
    run_on_gloo_ranks(2, _train, "sharded", policy_name)


@pytest.mark.inductor
@pytest.mark.parametrize("policy_name", ["bf16 reduced in fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_compiled_like_fsdp2(run_on_gloo_ranks, policy_name):
    run_on_gloo_ranks(2, _train, "compiled", policy_name)


class Checkpointed(nn.Module):
    """Remembers the dtype of what its checkpointed unit is given, in the forward and in the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.seen: list[torch.dtype] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        self.seen.append(y.dtype)
        return y.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def recompute_with_casts(implementation: str) -> list[torch.dtype]:
    """The block computes in bfloat16 and gives float32, in a root that computes in float32."""
    model = Checkpointed()
    fully_shard = pick_fully_shard(implementation)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model.block, mesh=world_mesh(), mp_policy=policy)
    fully_shard(model, mesh=world_mesh())
    model(torch.randn(3, 8)).sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    return model.seen


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_recomputation_casts_like_the_forward(run_on_gloo_ranks, implementation):
    assert run_on_gloo_ranks(2, recompute_with_casts, implementation) == [[torch.float32] * 2] * 2


def thaw_after_a_forward(implementation: str) -> None:
    """Frozen in its first forward, trained in bfloat16 and reduced in float32 from the second on."""
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_units(implementation, model, list(model), mp_policy=policy)
    model.requires_grad_(False)
    forward = compile_if_asked(implementation, model)
    inputs = torch.ones(3, 8)
    assert forward(inputs).dtype == torch.bfloat16
    model.requires_grad_(True)
    output = forward(inputs)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert_close(model[1].bias.grad.full_tensor(), torch.full((2,), 3.0))


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_first_forward_while_frozen(run_on_gloo_ranks, implementation):
    """Not FSDP2, which then gives bfloat16 gradients to float32 parameters (torch 2.13)."""
    run_on_gloo_ranks(2, thaw_after_a_forward, implementation)


class WithScales(nn.Module):
    """A frozen float8 table beside a float32 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(8.0).to(torch.float8_e4m3fn), requires_grad=False)
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.table.to(x.dtype))


def train_beside_float8(implementation: str) -> None:
    torch.manual_seed(42)
    reference = WithScales()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    assert model.table.dtype == torch.float8_e4m3fn
    inputs = torch.ones(3, 8)
    reference(inputs).sum().backward()
    compile_if_asked(implementation, model)(inputs).sum().backward()
    assert model.table.grad is None
    assert_close(model.layer.weight.grad.full_tensor(), reference.layer.weight.grad)


@pytest.mark.parametrize("implementation", EVERY)
def test_frozen_float8_beside_float32(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_beside_float8, implementation)
