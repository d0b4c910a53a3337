"""The task of the examples with a small Llama: each token follows from the one before."""

from collections.abc import Iterator

import torch
from torch import nn

from unsharded_reference import Batch

VOCABULARY = 96
NUM_STEPS = 40
BATCH_SIZE = 16
LENGTH = 32
LOSS_BELOW = 1.0


def training_batches() -> Iterator[Batch]:
    """Batches of all ranks together, drawn from a seed; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH), generator=generator)
        yield tokens, (5 * tokens + 7) % VOCABULARY


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Made after sharding, so that its state is sharded too."""
    return torch.optim.AdamW(model.parameters(), lr=5e-3)
