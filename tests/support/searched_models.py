"""Small models for searches of placements."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Named(nn.Module):
    """Two layers, the first of which expands, under any names."""

    def __init__(self, dim: int, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Linear(dim, 4 * dim))
        setattr(self, names[1], nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return second(F.gelu(first(x)))


class Block(nn.Module):
    """Parts with names of a GPT. The first has them the wrong way round, so the ready plan cuts it badly."""

    def __init__(self, dim: int, names: tuple[str, str] = ("fc1", "fc2")) -> None:
        super().__init__()
        self.attn, self.mlp = Named(dim, ("proj", "qkv")), Named(dim, names)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Misnamed(nn.Module):
    """Blocks without attention, and a loss."""

    def __init__(self, dim: int = 8, num_blocks: int = 1, names: tuple[str, str] = ("fc1", "fc2")) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, names) for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class OneMlp(nn.Module):
    """Two layers that no ready plan knows, and a loss."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = Named(dim, ("one", "two"))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mlp(x)).square().mean()


def misnamed_on_meta(num_blocks: int = 1) -> tuple[nn.Module, Tensor]:
    """A wide model, whose products take longer than its collectives, and its input."""
    with torch.device("meta"):
        return Misnamed(1024, num_blocks), torch.empty(4, 2048, 1024)
