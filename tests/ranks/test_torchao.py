"""Low-precision training of torchao: float8 linears, with and without a gather in float8, and NF4 with LoRA.

`pip install --no-deps torchao==0.18.0`; without it these tests are skipped.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, world_mesh
from torch import Tensor, nn
from torch.testing import assert_close

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: pip install --no-deps torchao==0.18.0",
)


def _steps(model: nn.Module, forward: Any, after_step: Callable[[nn.Module], None] | None) -> list[Tensor]:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = forward(torch.randn(16, 64)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
    return losses


def _train(
    build: Callable[[], nn.Module],
    implementation: str,
    after_step: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> list[Tensor]:
    torch.manual_seed(0)
    model = build()
    for block in (model[0], model[2]):
        pick_fully_shard(implementation)(block, mesh=world_mesh(), reshard_after_forward=True)
    pick_fully_shard(implementation)(model, mesh=world_mesh())
    return _steps(model, compile_if_asked(implementation, model, **options), after_step)


def _float8(gathers_float8: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    return convert_to_float8_training(model, config=config)


class _QLoRA(nn.Module):
    def __init__(self) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        frozen = to_nf4(0.05 * torch.randn(64, 64), block_size=64, scaler_block_size=4)
        self.weight = nn.Parameter(frozen, requires_grad=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.up(self.down(x))


def train_float8(folder: str) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for gathers_float8, after_step in (
        (False, None),
        (True, None),
        (True, precompute_float8_dynamic_scale_for_fsdp),
    ):
        options = {"dump": folder} if after_step is not None and dist.get_rank() == 0 else {}
        expected, found = (
            _train(partial(_float8, gathers_float8), each, after_step, **options) for each in GRAPHSHARD
        )
        assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_float8_training(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    """The first step finds the scales with an all-reduce for each weight; later ones have them already."""
    run_on_gloo_ranks(2, train_float8, str(tmp_path))
    first, later = ((tmp_path / f"graph{index}.forward.1-lower_shards.txt").read_text() for index in (0, 1))
    for text in (first, later):
        assert text.count("u8[64, 64] = all_gather_into_tensor") == 1
        assert text.count("u8[32, 64] = all_gather_into_tensor") == 1
    assert first.count("= all_reduce(") == 2 and later.count("= all_reduce(") == 0


def train_qlora(folder: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(_QLoRA(), nn.Tanh(), _QLoRA())

    options = {"dump": folder} if dist.get_rank() == 0 else {}
    expected, found = (_train(build, each, **options) for each in GRAPHSHARD)
    assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_qlora(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    """Codes and scales are gathered, for the backward again; no full weight is saved for it."""
    run_on_gloo_ranks(2, train_qlora, str(tmp_path))
    forward, backward = (
        (tmp_path / f"graph0.{half}.0-partitioned.txt").read_text() for half in ("forward", "backward")
    )
    assert forward.count("u8[2048] = unshard(") == 2
    assert backward.count("u8[2048] = unshard(") == 1, "the first layer needs no gradient of its input"
    *_, results = forward.strip().splitlines()
    assert "view" not in results and "mul" not in results and "index" not in results
