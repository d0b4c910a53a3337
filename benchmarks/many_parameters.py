"""A model of many small parameters: its kernels take next to no time, so a step is what the host does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_LAYERS = 6


class Block(nn.Module):
    """Six linear layers around which the input is added: 12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(NUM_LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ManyParameters(nn.Module):
    """`num_blocks` blocks of 12 parameters; (batch, width) to a scalar loss."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def random_input(width: int, batch: int = 2) -> Tensor:
    """A batch, the same in every run."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
