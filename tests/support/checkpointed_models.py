"""Models with activation checkpointing, in each of the ways torch offers, on the blocks of `small_models`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_in_place
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Block(nn.Module):
    """A residual block of two layers; `region` says what of it is checkpointed from inside."""

    def __init__(self, width: int, hidden: int, region: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.region = region
        self.norm = nn.LayerNorm(width)
        drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), drop, nn.Linear(hidden, width))

    def body(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.region == "method":
            return checkpoint(self.body, x, use_reentrant=False)
        if self.region == "submodule":
            return x + checkpoint(self.feed_forward, self.norm(x), use_reentrant=False)
        return self.body(x)


class Blocks(nn.Module):
    """Blocks between two layers that belong to the root unit; the root may checkpoint the blocks' calls."""

    def __init__(
        self,
        call: Callable[[nn.Module, Tensor], Tensor],
        *,
        region: str = "none",
        num_blocks: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.call = call
        self.enter = nn.Linear(6, 5)
        self.blocks = nn.ModuleList([Block(5, 7, region, dropout) for _ in range(num_blocks)])
        self.leave = nn.Linear(5, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.leave(x)


def call_plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def call_checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def keep_matrix_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves what `addmm` computed, runs everything else again."""
    keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def call_selectively(block: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_matrix_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def wrap_blocks(model: nn.Module) -> None:
    """`checkpoint_wrapper` around each block, in place."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def unwrapped(block: nn.Module) -> nn.Module:
    """The block inside its `checkpoint_wrapper`, if it has one."""
    return getattr(block, "_checkpoint_wrapped_module", block)


def build_checkpointed(form: str, **sizes: Any) -> nn.Module:
    """The model whose blocks are checkpointed in this form; see `FORMS`."""
    calls = {"function": call_checkpointed, "selective": call_selectively}
    region = form if form in ("method", "submodule") else "none"
    model = Blocks(calls.get(form, call_plainly), region=region, **sizes)
    if form.startswith("wrapper"):
        wrap_blocks(model)
    if form == "composable":
        for block in model.blocks:
            checkpoint_in_place(block)
    return model


def units_of(form: str, model: nn.Module) -> list[nn.Module]:
    """The modules that become units: the blocks, or with "wrapper_unit" the wrappers around them."""
    return list(model.blocks) if form == "wrapper_unit" else [unwrapped(block) for block in model.blocks]


#: none: no checkpointing. function: the root checkpoints the call of each unit. method, submodule: the unit
#: checkpoints a method of its own, or a module below it that is no unit. selective: as function, with a policy.
#: wrapper, wrapper_unit: `checkpoint_wrapper` around the units, or as the units. composable: hooks on the units.
FORMS = ("none", "function", "method", "submodule", "selective", "wrapper", "wrapper_unit", "composable")

#: Those that Dynamo traces without a graph break.
TRACEABLE = tuple(form for form in FORMS if form != "composable")
