"""Mixed precision trains like torch's FSDP2 under the same policy."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close

from .implementations import compile_if_asked, shard_units

POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16 reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


def _train(implementation: str, policy_name: str) -> None:
    """Three MLP units, Adam, against FSDP2 on the same batches."""
    torch.manual_seed(42)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3)))
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


@pytest.mark.parametrize("policy_name", ["bf16 reduced in fp32", "fp16"])
def test_compiled_like_fsdp2(run_on_gloo_ranks, policy_name):
    run_on_gloo_ranks(2, _train, "compiled", policy_name)
