"""Hugging Face Trainer: with `fsdp=True`, and with a model that transformers shards when it loads it."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.trainer_jobs import Trained, as_launched, compare_with_fsdp2, gathered, need
from torch import nn

import graphshard

pytestmark = need("accelerate", "transformers")

Run = Callable[..., list[Any]]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def _rows() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in rows]


def _trainer(model: nn.Module, folder: str, **arguments: Any) -> Any:
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # each is one object a process

    class TrainerOnCPU(Trainer):
        """Accelerate takes its way of FSDP on GPUs; on CPUs it knows DDP alone."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if self.args.fsdp_plugin_args is not None:
                from accelerate import FullyShardedDataParallelPlugin

                state = self.accelerator.state
                state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
                state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
                self.is_fsdp_enabled = True

    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 0.02,
        "max_grad_norm": 1.0,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "steps" if arguments else "no",
        "save_steps": 2,
    }
    return TrainerOnCPU(model=model, args=TrainingArguments(**settings, **arguments), train_dataset=_rows())


def _train(trainer: Any, implementation: str, **options: Any) -> Trained:
    trainer.train(**options)
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert isinstance(model, graphshard.FSDPModule) == (implementation != "fsdp2"), type(model)
    assert isinstance(model.model.layers[0], graphshard.FSDPModule) == (implementation != "fsdp2")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses += [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return losses, gathered(model)


def _with_fsdp_arguments(implementation: str, folder: str) -> Trained:
    arguments = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}

    def make() -> Any:
        model = _llama()
        if implementation == "compiled":
            model.compile(backend="graphshard")
        return _trainer(model, folder, **arguments)

    with nullcontext() if implementation == "fsdp2" else graphshard.patch_torch():
        losses, trained = _train(make(), implementation)
        _, resumed = _train(make(), implementation, resume_from_checkpoint=f"{folder}/checkpoint-2")
    for name, value in resumed.items():
        torch.testing.assert_close(
            value, trained[name], msg=lambda text, name=name: f"resumed {name}: {text}"
        )
    return losses, trained


def _sharded_when_loaded(implementation: str, folder: str) -> Trained:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        _llama().save_pretrained(f"{folder}/pretrained")
    dist.barrier()
    with nullcontext() if implementation == "fsdp2" else graphshard.patch_torch():
        model = LlamaForCausalLM.from_pretrained(
            f"{folder}/pretrained", distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())
        )
    if implementation == "compiled":
        model.compile(backend="graphshard")
    return _train(_trainer(model, folder), implementation)


def test_fsdp_arguments(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2, _with_fsdp_arguments, str(tmp_path))


def test_sharded_when_loaded(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2, _sharded_when_loaded, str(tmp_path))


def ask_for_what_cannot_work(folder: str) -> None:
    with as_launched():
        model = _llama()
        graphshard.fully_shard(model)
        with pytest.raises(RuntimeError, match=r"Sharding propagation failed|mixed torch.Tensor and DTensor"):
            _trainer(model, folder).train()
        # A backend that accelerate does not list; the environment that it is told in ends with this block.
        with pytest.raises(ValueError, match="'GRAPHSHARD' is not a valid DynamoBackend"):
            _trainer(_llama(), folder, torch_compile_backend="graphshard")


def test_what_docs_say_cannot_work(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, ask_for_what_cannot_work, str(tmp_path))
