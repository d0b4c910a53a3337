"""The model every benchmark trains: a plain GPT, written with no thought of sharding.

Pre-norm blocks, learned positions, untied output layer, float32. Nothing here is specific to a contender, so
the same file serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Sizes of the model; `context` is the sequence length, in tokens."""

    num_layers: int = 4
    width: int = 256
    num_heads: int = 4
    context: int = 128
    vocab: int = 512

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")


class CausalSelfAttention(nn.Module):
    """[batch, context, width] to the same shape."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.qkv(x).view(batch, context, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """One transformer layer, and one `fully_shard` unit."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Gpt(nn.Module):
    """Tokens [batch, context] to logits [batch, context, vocab]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, context, vocab] against targets [batch, context]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_batch(config: GptConfig, *, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, both int64 [batch, context], drawn uniformly."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (batch, config.context + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
