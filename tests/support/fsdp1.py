"""Models under FSDP1's wrapper: torch's and ours, what tests read of them, and trainings beside the unsharded model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from graphshard import FullyShardedDataParallel
from support.implementations import compile_if_asked
from support.parity import backward_on_all_batches
from support.toy_models import Workload


def wrap(implementation: str, model: nn.Module, **options: Any) -> Any:
    """The model in a wrapper: of torch if `implementation` is "fsdp1", else ours; warnings of deprecation are left out.

    FSDP1 computes on the CPU and shows parameters of their own if it is not told otherwise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if implementation != "fsdp1":
            return FullyShardedDataParallel(model, **options)
        return TorchWrapper(model, **{"use_orig_params": True, "device_id": torch.device("cpu"), **options})


def clean(name: str) -> str:
    wrappers = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by their names in the unwrapped model."""
    if isinstance(model, TorchWrapper):
        with TorchWrapper.summon_full_params(model, writeback=False):
            return {clean(name): param.detach().clone() for name, param in model.named_parameters()}
    return {clean(name): whole(param.detach()) for name, param in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the names of their parameters; without those that are None."""
    if isinstance(model, TorchWrapper):
        with TorchWrapper.summon_full_params(model, writeback=False, with_grads=True):
            found = {clean(name): param.grad for name, param in model.named_parameters()}
            return {name: grad.clone() for name, grad in found.items() if grad is not None}
    found = {clean(name): param.grad for name, param in model.named_parameters()}
    return {name: whole(grad) for name, grad in found.items() if grad is not None}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@dataclass(kw_only=True)
class Training:
    """The unsharded model, torch's wrapper and ours, with the same weights, on the same batches."""

    workload: Workload
    reference: nn.Module
    wrappers: list[nn.Module]
    forwards: list[Callable[..., Any]]
    optimizers: list[torch.optim.Optimizer]
    tolerance: dict[str, float]
    """Of losses and gradients against the unsharded model."""
    against_torch: dict[str, float]
    """Of the same against torch's wrapper."""

    def step(self, step: int) -> None:
        """Losses and gradients agree, then the optimizers step."""
        expected = backward_on_all_batches(self.workload, self.reference, step)[dist.get_rank()]
        losses = []
        for forward in self.forwards:
            loss = self.workload.loss(forward, self.workload.batch_of(dist.get_rank(), step))
            loss.backward()
            losses.append(loss.detach())
        gradients = {name: param.grad for name, param in self.reference.named_parameters() if param.grad is not None}
        of_torch, ours = (full_gradients(wrapper) for wrapper in self.wrappers)
        assert_close(losses[1], losses[0], **self.against_torch)
        assert_close(ours, of_torch, **self.against_torch)
        assert_close(losses[1].to(expected.dtype), expected, **self.tolerance)
        assert_close({name: ours[name] for name in gradients}, gradients, **self.tolerance)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def start_training(
    workload: Workload,
    implementation: str,
    *,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    tolerance: dict[str, float] | None = None,
    against_torch: dict[str, float] | None = None,
    options: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    torch_options: dict[str, Any] | None = None,
) -> Training:
    """Builds the model thrice; `options` are the wrapper's for a model, `torch_options` those of torch's alone."""
    torch.manual_seed(42)
    reference = workload.build()
    prepare(reference)
    models = [copy.deepcopy(reference) for _ in range(2)]
    wrappers = [
        wrap("fsdp1", models[0], **options(models[0]), **(torch_options or {})),
        wrap(implementation, models[1], **options(models[1])),
    ]
    return Training(
        workload=workload,
        reference=reference,
        wrappers=wrappers,
        forwards=[wrappers[0], compile_if_asked(implementation, wrappers[1])],
        optimizers=[sgd(reference), *(sgd(each) for each in wrappers)],
        tolerance=tolerance or {"rtol": 1.3e-6, "atol": 1e-5},
        against_torch=against_torch or {"rtol": 1.3e-6, "atol": 1e-5},
    )
