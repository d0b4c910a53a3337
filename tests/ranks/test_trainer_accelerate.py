"""Accelerate with `fsdp_version=2`: inside `patch_torch()` it shards with graphshard, and trains as with FSDP2."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from support.trainer_jobs import (
    Block,
    Trained,
    compare_with_fsdp2,
    gathered,
    loss_of,
    make_model,
    need,
)
from torch import nn

import graphshard

pytestmark = need("accelerate")

Run = Callable[..., list[Any]]


def _accelerator(*, mixed_precision: str = "no", accumulation: int = 1, **options: Any) -> Any:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # each is one object a process
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
        **options,
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=accumulation,
    )
    # What it does itself on GPUs; on CPUs it knows DDP alone.
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def _train(implementation: str, folder: str) -> Trained:
    """Three steps of two micro-batches with clipping; saved after the second step, loaded into another model."""
    accelerator = _accelerator(accumulation=2)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with nullcontext() if implementation == "fsdp2" else graphshard.patch_torch():
        model, optimizer = accelerator.prepare(model, optimizer)
    is_ours = implementation != "fsdp2"
    assert isinstance(model, graphshard.FSDPModule) == is_ours
    assert isinstance(model[1], graphshard.FSDPModule) == is_ours and isinstance(model[1], Block)
    if implementation == "compiled":
        model.compile(backend="graphshard")
    losses = []
    for step in range(6):
        if step == 4:
            accelerator.save_state(folder)
        with accelerator.accumulate(model):
            loss = loss_of(model, step)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    trained = gathered(model)
    accelerator.load_state(folder)
    for step in (4, 5):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in gathered(model).items():
        torch.testing.assert_close(
            value, trained[name], msg=lambda text, name=name: f"resumed {name}: {text}"
        )
    return losses, trained


def test_trains_saves_and_resumes_as_with_fsdp2(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2, _train, str(tmp_path))


def _train_with_options(implementation: str, _: str) -> Trained:
    """Weights of rank 0 for all, activation checkpointing, bf16."""
    accelerator = _accelerator(
        mixed_precision="bf16", cpu_ram_efficient_loading=True, activation_checkpointing=True
    )
    accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
    model = make_model()
    if not accelerator.is_main_process:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with nullcontext() if implementation == "fsdp2" else graphshard.patch_torch():
        model, optimizer = accelerator.prepare(model, optimizer)
    if implementation == "compiled":
        model.compile(backend="graphshard")
    losses = []
    for step in range(3):
        loss = loss_of(model, step)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gathered(model)


def test_weights_of_one_rank_checkpointing_and_bf16(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2, _train_with_options, str(tmp_path), 1e-2)


def test_accelerate_takes_no_backend_that_it_does_not_list(capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import TorchDynamoPlugin

    with pytest.raises(ValueError, match="'GRAPHSHARD' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="graphshard")
    with pytest.raises(SystemExit):
        launch_command_parser().parse_args(["--dynamo_backend", "graphshard", "train.py"])
    assert "invalid choice: 'graphshard'" in capsys.readouterr().err
