"""Models whose collectives Inductor moves when it fuses kernels, unless the order is pinned."""

import torch


class LateScale(torch.nn.Module):
    """Its first kernel and the scale in front of its tail read the same input: fused, they need the last gather."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.head, self.tail = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        hidden = x.sin()
        for block in self.blocks:
            hidden = block(hidden).relu()
        return self.head(hidden) * self.tail(x * self.scale)


class LateNorm(torch.nn.Module):
    """Waits for two gathers in a row, in front of a start."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
            for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x
