"""Low-precision training of torchao: float8 linears, NF4 with LoRA, int8 weights, MX products, optimizers of few bits.

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
from support.cost_cards import round_card
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, world_mesh
from torch import Tensor, nn
from torch.testing import assert_close

import graphshard

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: pip install --no-deps torchao==0.18.0",
)


def _steps(
    model: nn.Module, forward: Any, after_step: Callable[[nn.Module], None] | None, optimizer_class: Any
) -> list[Tensor]:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer_class(trained, lr=0.01)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = forward(torch.randn(32, 64)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.compiler.set_stance("force_eager"):  # torchao's compile themselves, for minutes
            optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
    return losses


def _train(
    build: Callable[[], nn.Module],
    implementation: str,
    after_step: Callable[[nn.Module], None] | None = None,
    optimizer_class: Any = torch.optim.AdamW,
    **options: Any,
) -> list[Tensor]:
    torch.manual_seed(0)
    model = build()
    for block in (model[0], model[2]):
        pick_fully_shard(implementation)(block, mesh=world_mesh(), reshard_after_forward=True)
    pick_fully_shard(implementation)(model, mesh=world_mesh())
    return _steps(model, compile_if_asked(implementation, model, **options), after_step, optimizer_class)


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
        dump = {"dump": folder} if after_step is not None and dist.get_rank() == 0 else {}
        for options in (dump, {"hardware": "cpu-loopback"}):
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


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def _quantized(config: Any) -> nn.Module:
    from torchao.quantization import quantize_

    model = _plain()
    quantize_(model, config)
    return model


def train_int8() -> None:
    """Weights that are int8 all the time, and weights that are int8 in products alone."""
    from torchao.optim import _AdamW  # torch's asks for an op that these weights do not have
    from torchao.prototype.quantized_training import (
        int8_mixed_precision_training,
        int8_weight_only_quantized_training,
    )

    for config, optimizer in (
        (int8_weight_only_quantized_training(), _AdamW),
        (int8_mixed_precision_training(), torch.optim.AdamW),
    ):
        expected, found = (
            _train(partial(_quantized, config), each, optimizer_class=optimizer) for each in GRAPHSHARD
        )
        assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_int8(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, train_int8)


def train_with_8_bit_optimizers() -> None:
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    for optimizer in (AdamW8bit, AdamW4bit, AdamWFp8):
        expected, found = (_train(_plain, each, optimizer_class=optimizer) for each in GRAPHSHARD)
        assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_8_bit_optimizers(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, train_with_8_bit_optimizers)


def train_mx() -> None:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    expected, found = (_train(partial(_quantized, config), each) for each in GRAPHSHARD)
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_mx(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, train_mx)


def _inspected(model: nn.Module) -> list[tuple[str, int]]:
    report = graphshard.inspect(
        model, [torch.ones(32, 64)], mesh={"shard": 8}, units=["0", "2"], hardware=round_card(), loss=_mean_square
    )
    return [(one.kind, one.num_bytes) for one in report.halves[0].collectives]


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torchao's functions
def test_inspection_shows_what_travels() -> None:
    """float8 has an all-reduce for each scale, and is gathered with the float32 bias; NF4 travels as it is held."""
    assert _inspected(_float8(True)) == [
        ("all_reduce", 4), ("all_gather", 64 * (64 + 4)), ("all_reduce", 4), ("all_gather", 32 * (64 + 4))
    ]  # fmt: skip
    nf4 = _inspected(nn.Sequential(_QLoRA(), nn.Tanh(), _QLoRA()))
    codes, scales = 64 * 64 // 2, 64 + 64 // 4 * 4  # a byte for each block of 64, a float for four of them
    adapters = (8 * 64 + 64 * 4) * 4  # the four rows of the first are padded to eight ranks
    assert nf4 == [("all_gather", codes + scales + adapters)] * 2
    assert not dist.is_initialized()
