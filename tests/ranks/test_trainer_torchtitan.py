"""Torchtitan's Llama at debug size, made parallel by torchtitan's own function, with FSDP2 and with graphshard."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from support.trainer_jobs import Trained, compare_with_fsdp2, gathered, need
from torch import nn

import graphshard

pytestmark = need("torchtitan", "triton")

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())

Run = Callable[..., list[Any]]


def _spec() -> Any:
    """The debug model with two layers, and with torchtitan's attention that CPUs have too."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def _train(implementation: str, folder: str) -> Trained:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import parallel_dims as meshes

    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from examples.torchtitan_model import with_graphshard

    meshes.device_type = "cpu"  # torchtitan takes "cuda" where there is no accelerator
    spec = _spec() if implementation == "fsdp2" else with_graphshard(_spec())
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=dist.get_world_size(), spmd_backend="partial_dtensor"
    )
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    parallel_dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=implementation == "compiled"),
        ac_config=None,
        dump_folder=folder,
    )
    assert isinstance(model, graphshard.FSDPModule) == (implementation != "fsdp2")
    for unit in model.modules():
        if isinstance(unit, torch.distributed.fsdp.FSDPModule) and implementation == "fsdp2":
            unit.set_force_sum_reduction_for_comms(True)  # gloo has none of FSDP2's scaled sums
    torch.manual_seed(3)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tokens = torch.randint(2048, (3, 2, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for batch in tokens:
        logits = model(batch[:, :-1])
        # torchtitan divides by the tokens of all ranks, and has gradients summed.
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum") / 64
        loss.backward()
        losses.append(loss.item())
        losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gathered(model)


@pytest.mark.slow
def test_llama(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2, _train, str(tmp_path))
