"""Lightning: Fabric and Trainer with `ModelParallelStrategy`, whose functions call our `fully_shard`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import pick_fully_shard
from support.trainer_jobs import (
    Trained,
    as_launched,
    compare_with_fsdp2,
    gathered,
    loss_of,
    make_model,
    need,
)
from torch import nn

pytestmark = need("lightning")

Run = Callable[..., list[Any]]


def _shard(implementation: str, model: nn.Module, mesh: Any) -> nn.Module:
    fully_shard = pick_fully_shard(implementation)
    for module in (model[1], model[2], model):
        fully_shard(module, mesh=mesh)
    if implementation == "compiled":
        model.compile(backend="graphshard")
    return model


def _with_fabric(implementation: str, folder: str) -> Trained:
    """Three steps of two micro-batches with clipping; saved after the second step, loaded into another model."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def set_up() -> tuple[Any, Any, Any]:
        strategy = ModelParallelStrategy(
            parallelize_fn=lambda model, mesh: _shard(implementation, model, mesh["data_parallel"]),
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
        )
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        model = fabric.setup(make_model())
        return fabric, model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))

    def train(fabric: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            for part in (2 * step, 2 * step + 1):
                with fabric.no_backward_sync(model, enabled=part % 2 == 0):
                    loss = loss_of(model, part)
                    fabric.backward(loss / 2)
                losses.append(loss.item())
            losses.append(float(fabric.clip_gradients(model, optimizer, max_norm=1.0)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    fabric, model, optimizer = set_up()
    losses = train(fabric, model, optimizer, range(2))
    fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer, "step": 2})
    losses += train(fabric, model, optimizer, range(2, 3))
    trained = gathered(model.module)
    fabric, model, optimizer = set_up()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(f"{folder}/saved", state)
    assert state["step"] == 2
    train(fabric, model, optimizer, range(2, 3))
    for name, value in gathered(model.module).items():
        torch.testing.assert_close(
            value, trained[name], msg=lambda text, name=name: f"resumed {name}: {text}"
        )
    return losses, trained


def _lightning_module(implementation: str, *, wraps: bool) -> Any:
    """The module of a job. With `wraps`, `configure_model` replaces the model by `torch.compile(model)`."""
    import lightning

    class Job(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.losses: list[float] = []
            self.is_configured = False

        def configure_model(self) -> None:
            if self.is_configured:  # Lightning calls it before each stage
                return
            self.is_configured = True
            mesh = self.device_mesh["data_parallel"]
            _shard("sharded" if wraps and implementation != "fsdp2" else implementation, self.model, mesh)
            if wraps:
                backend = "aot_eager" if implementation == "fsdp2" else "graphshard"
                self.model = torch.compile(self.model, backend=backend)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=0.05)

        def training_step(self, _: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.model, 2 * self.current_epoch + index)
            self.losses.append(loss.item())
            return loss

    return Job()


def _fit(job: Any, folder: str, epochs: int, resume_from: str | None = None) -> Any:
    """Epochs of one optimizer step of two micro-batches."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1),
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=None,  # Lightning refuses to clip by norm with this strategy
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(job, torch.arange(2), ckpt_path=resume_from)
    return trainer


def _with_trainer(implementation: str, folder: str, *, wraps: bool = False) -> Trained:
    checkpoint = f"{folder}/saved"
    job = _lightning_module(implementation, wraps=wraps)
    _fit(job, folder, 2).save_checkpoint(checkpoint)
    whole = _lightning_module(implementation, wraps=wraps)
    _fit(whole, folder, 3)
    resumed = _lightning_module(implementation, wraps=wraps)
    _fit(resumed, folder, 3, resume_from=checkpoint)
    assert resumed.losses == pytest.approx(whole.losses[4:], rel=1e-5)
    trained = gathered(whole.model)
    for name, value in gathered(resumed.model).items():
        torch.testing.assert_close(
            value, trained[name], msg=lambda text, name=name: f"resumed {name}: {text}"
        )
    return whole.losses, trained


def test_fabric(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2, _with_fabric, str(tmp_path))


def test_trainer(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2, _with_trainer, str(tmp_path))


def wrap(implementation: str, folder: str) -> None:
    with as_launched(), pytest.raises(RuntimeError, match=r"Missing key.*model\._orig_mod\.0\.weight"):
        _with_trainer(implementation, folder, wraps=True)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["fsdp2", "compiled"])
def test_a_wrapped_model_cannot_resume(run_on_gloo_ranks: Run, tmp_path: Path, implementation: str) -> None:
    """Lightning loads what `get_model_state_dict` names into `Module.load_state_dict`, which wants other names."""
    run_on_gloo_ranks(2, wrap, implementation, str(tmp_path))
