"""The ways of training one model on two ranks that the step benchmark compares.

Each contender gets its own copy of the model's source: Dynamo keeps compiled code per code object, so shared
classes would make each contender pay for the guards of the others.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gpt
import graphshard
from graphshard.cost import load_card
from graphshard.planner.search import choose_splits as splits

WEIGHT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A model ready to train: `forward` is what to call, `module` owns the parameters."""

    forward: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    module: nn.Module
    optimizer: torch.optim.Optimizer
    comm_bytes: int = 0
    """Bytes of communication buffers kept between steps."""
    micro_batches: int = 1
    """Forwards and backwards in a step; gradients are reduced in the last, where the model can wait."""

    def run_forward_backward(self, tokens: Tensor, targets: Tensor) -> float:
        """Leave gradients on the parameters; return the loss of this rank's batch."""
        loss = self.loss(self.forward(tokens), targets)
        loss.backward()
        return loss.item()

    def run_update(self) -> None:
        """Apply the gradients and free them."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run_step(self, tokens: Tensor, targets: Tensor) -> float:
        """One training step; return the loss before it."""
        loss, set_sync = 0.0, getattr(self.module, "set_requires_gradient_sync", None)
        for index in range(self.micro_batches):
            if set_sync is not None:
                set_sync(index == self.micro_batches - 1)
            loss = self.run_forward_backward(tokens, targets)
        self.run_update()
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a contender trains: `card` is the file of a hardware card that was measured there."""

    mesh: DeviceMesh
    card: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A named way to train.

    `averages_gradients` is false for the one that does not communicate; `same_kernels_as` names a contender
    earlier in the list whose compiled code is equal, so that it need not be compiled twice; `needs_card` is
    true for one that plans with the measured card.
    """

    summary: str
    build: Callable[[ModuleType, nn.Module, Site], Trainer]
    averages_gradients: bool = True
    is_compiled: bool = True
    same_kernels_as: str | None = None
    needs_card: bool = False


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def _build_unsharded(source: ModuleType, model: nn.Module, site: Site) -> Trainer:
    loss = torch.compile(source.next_token_loss)
    return Trainer(forward=torch.compile(model), loss=loss, module=model, optimizer=_adamw(model))


def _build_regions(source: ModuleType, model: nn.Module, site: Site) -> Trainer:
    """Blocks share one region, which Inductor compiles once."""
    block = type(model.blocks[0])
    block.forward = torch.compiler.nested_compile_region(block.forward)
    return _build_unsharded(source, model, site)


def _build_ddp_compile(source: ModuleType, model: nn.Module, site: Site) -> Trainer:
    replica = DistributedDataParallel(model, process_group=site.mesh.get_group(), gradient_as_bucket_view=True)
    loss = torch.compile(source.next_token_loss)
    bucket_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return Trainer(
        forward=torch.compile(replica),
        loss=loss,
        module=model,
        optimizer=_adamw(model),
        comm_bytes=bucket_bytes,
    )


def _build_fsdp2_eager(source: ModuleType, model: nn.Module, site: Site) -> Trainer:
    for block in model.blocks:
        fully_shard(block, mesh=site.mesh)
    fully_shard(model, mesh=site.mesh)
    return Trainer(forward=model, loss=source.next_token_loss, module=model, optimizer=_adamw(model))


def _build_fsdp2_compile(source: ModuleType, model: nn.Module, site: Site) -> Trainer:
    """Blocks compiled one by one, then sharded, and the loss compiled: torchtitan's order."""
    for block in model.blocks:
        block.compile(fullgraph=True)
        fully_shard(block, mesh=site.mesh)
    fully_shard(model, mesh=site.mesh)
    loss = torch.compile(source.next_token_loss)
    return Trainer(forward=model, loss=loss, module=model, optimizer=_adamw(model))


def _build_fsdp2_prefetch(source: ModuleType, model: nn.Module, site: Site) -> Trainer:
    """FSDP2 with compile, told to gather ahead.

    FSDP2 overlaps through CUDA streams; on the CPU its all-gathers block unless they are made asynchronous
    and the next units are named. Its reduce-scatters block in any case.
    """
    trainer = _build_fsdp2_compile(source, model, site)
    blocks = list(model.blocks)
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(blocks[:1])
    for before, after in itertools.pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return trainer


def _build_graphshard(source: ModuleType, model: nn.Module, site: Site, **options: Any) -> Trainer:
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=site.mesh)
    graphshard.fully_shard(model, mesh=site.mesh)
    loss = torch.compile(source.next_token_loss)
    forward = torch.compile(model, backend="graphshard", options=options)
    return Trainer(forward=forward, loss=loss, module=model, optimizer=_adamw(model))


def _build_graphshard_blocks(source: ModuleType, model: nn.Module, site: Site) -> Trainer:
    """As fsdp2-compile, sharded by graphshard."""
    for block in model.blocks:
        block.compile(fullgraph=True)
        graphshard.fully_shard(block, mesh=site.mesh)
    graphshard.fully_shard(model, mesh=site.mesh)
    loss = torch.compile(source.next_token_loss)
    return Trainer(forward=model, loss=loss, module=model, optimizer=_adamw(model))


def _build_graphshard_planned(source: ModuleType, model: nn.Module, site: Site, **options: Any) -> Trainer:
    return _build_graphshard(source, model, site, bucket="auto", hardware=site.card, **options)


def _build_graphshard_whole(source: ModuleType, model: nn.Module, site: Site, **options: Any) -> Trainer:
    """Nothing counts as over-large while it is planned, in the first call; another card's name makes plans its own."""
    card = replace(load_card(site.card), name="nothing split")
    trainer = _build_graphshard(source, model, site, bucket="auto", hardware=card, **options)
    forward = trainer.forward

    def run_whole(*inputs: Tensor) -> Tensor:
        with mock.patch.object(splits, "OVER_LARGE", sys.maxsize):
            return forward(*inputs)

    return replace(trainer, forward=run_whole)


CONTENDERS: dict[str, Contender] = {
    "unsharded": Contender(
        summary="whole model compiled, no communication", build=_build_unsharded, averages_gradients=False
    ),
    "unsharded-regions": Contender(
        summary="as unsharded, blocks under torch.compiler.nested_compile_region",
        build=_build_regions,
        averages_gradients=False,
    ),
    "fsdp2": Contender(summary="FSDP2, eager", build=_build_fsdp2_eager, is_compiled=False),
    "fsdp2-compile": Contender(summary="FSDP2, each block compiled", build=_build_fsdp2_compile),
    "fsdp2-prefetch": Contender(
        summary="as fsdp2-compile, asynchronous gathers one unit ahead",
        build=_build_fsdp2_prefetch,
        same_kernels_as="fsdp2-compile",
    ),
    "ddp-compile": Contender(summary="DDP, compiled", build=_build_ddp_compile),
    "graphshard": Contender(summary="graphshard, nothing set: planned on a card of its own", build=_build_graphshard),
    "graphshard-rules": Contender(
        summary="as graphshard, collectives placed by rules, without a plan",
        build=partial(_build_graphshard, hardware=None),
        same_kernels_as="graphshard",
    ),
    "graphshard-blocks": Contender(
        summary="graphshard, each block compiled, no plan", build=_build_graphshard_blocks
    ),
    "graphshard-always": Contender(
        summary="as graphshard, every collective overlapped whatever it holds",
        build=partial(_build_graphshard, overlap="always"),
        same_kernels_as="graphshard",
    ),
    "graphshard-whole-code": Contender(
        summary="as graphshard, equal blocks compiled again and again",
        build=partial(_build_graphshard, share_code=False),
        same_kernels_as="graphshard",
    ),
    "graphshard-shared-code": Contender(
        summary="as graphshard, all equal parts compiled once",
        build=partial(_build_graphshard, share_code="always"),
        same_kernels_as="graphshard",
    ),
    "graphshard-planned": Contender(
        summary="as graphshard, merged and placed by cost on a card measured here",
        build=_build_graphshard_planned,
        same_kernels_as="graphshard",
        needs_card=True,
    ),
    "graphshard-whole": Contender(
        summary="as graphshard-planned, over-large collectives not split",
        build=_build_graphshard_whole,
        same_kernels_as="graphshard",
        needs_card=True,
    ),
    "graphshard-kept": Contender(
        summary="as graphshard-planned, with memory for units to stay gathered",
        build=partial(_build_graphshard_planned, memory_budget="1TiB"),
        same_kernels_as="graphshard",
        needs_card=True,
    ),
    "graphshard-in-place": Contender(
        summary="as graphshard, every collective waited for where it starts",
        build=partial(_build_graphshard, overlap=False),
        same_kernels_as="graphshard",
    ),
}


def copy_source(name: str, folder: Path, original: str = gpt.__file__) -> ModuleType:
    """Import a private copy of the file `original`, written to `folder`, for the contender `name`."""
    module_name = f"{Path(original).stem}_{name.replace('-', '_')}"
    path = Path(shutil.copy(original, folder / f"{module_name}.py"))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses looks its annotations up here
    spec.loader.exec_module(module)
    return module


def build_trainer(
    name: str, config: gpt.GptConfig, site: Site, folder: Path, micro_batches: int = 1
) -> Trainer:
    """The contender `name` with the same initial weights as every other one."""
    source = copy_source(name, folder)
    torch.manual_seed(WEIGHT_SEED)
    trainer = CONTENDERS[name].build(source, source.Gpt(config), site)
    return replace(trainer, micro_batches=micro_batches)
