"""Models small enough to read as graphs, plain and as `fully_shard` units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphshard


class TwoLinears(nn.Module):
    """5 rows in the first layer, 3 in the second: uneven over 2 to 4 ranks, empty on the last of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class TiedEmbedding(nn.Module):
    """An embedding whose table is also the output projection; 5 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class CalledThrice(nn.Module):
    """One layer, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks between two layers that belong to the root unit."""

    def __init__(self, num_blocks: int, width: int = 5, hidden: int = 7) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(num_blocks)])
        self.leave = nn.Linear(width, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class FrozenFirst(TwoLinears):
    """The first layer does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two_linears": TwoLinears,
    "tied_embedding": TiedEmbedding,
    "called_thrice": CalledThrice,
    "frozen_first": FrozenFirst,
    "blocks_2": lambda: Blocks(2),
    "blocks_3": lambda: Blocks(3),
}

#: Width of the inputs of each model; None for token ids below 5.
_INPUT_WIDTH = {
    "two_linears": 4,
    "tied_embedding": None,
    "called_thrice": 5,
    "frozen_first": 4,
    "blocks_2": 6,
    "blocks_3": 6,
}


def example_batch(name: str, generator: torch.Generator | None = None, dtype: Any = torch.float32) -> Tensor:
    """A batch of two for the model of this name."""
    width = _INPUT_WIDTH[name]
    if width is None:
        return torch.randint(0, 5, (2, 3), generator=generator)
    return torch.randn(2, width, generator=generator, dtype=dtype)


class WithHead(nn.Module):
    """The root has parameters in front of the blocks and behind them."""

    def __init__(self, num_blocks: int = 3, width: int = 64, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.embedding = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(x).square().mean()


def shard_units(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Each child (each block of a list) becomes a unit, then the rest with the root.

    A tied model and a `Blocks` model keep their outer layers in the root unit.
    """
    if isinstance(model, Blocks):
        inner = list(model.blocks)
    else:
        inner = [] if isinstance(model, TiedEmbedding) else list(model.children())
    for child in inner:
        graphshard.fully_shard(child, mesh=mesh, **options)
    return graphshard.fully_shard(model, mesh=mesh, **options)
