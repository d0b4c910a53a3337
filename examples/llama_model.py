"""Llama 3 as a plain model: RMS norms, rotary embedding, grouped-query attention, SwiGLU.

Sizes are those of the paper (The Llama 3 Herd of Models, table 3). Built on the meta device it holds no
data, so the largest one can be inspected on a laptop: `llama_3_8b` and `llama_3_405b` return what
`graphshard.capture.capture_step.capture_step` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes; `hidden` is the width between the two halves of the feed-forward layer."""

    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int = 8
    vocabulary: int = 128_256
    rope_theta: float = 500_000.0
    checkpointed: bool = False


LLAMA_3_8B = LlamaConfig(num_layers=32, width=4096, hidden=14_336, num_heads=32)
LLAMA_3_70B = LlamaConfig(num_layers=80, width=8192, hidden=28_672, num_heads=64)
LLAMA_3_405B = LlamaConfig(num_layers=126, width=16_384, hidden=53_248, num_heads=128)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding: the two halves of each head are the parts of complex numbers."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.num_groups = config.num_heads // config.num_kv_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.num_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, config.num_kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        query, key = (rotate(each, cosine, sine) for each in heads[:2])
        key, value = (each.repeat_interleave(self.num_groups, dim=1) for each in (key, heads[2]))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Returns the mean cross entropy of the next tokens."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        half = self.config.width // self.config.num_heads // 2
        frequencies = self.config.rope_theta ** (-torch.arange(half, device=tokens.device) / half)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies
        cosine, sine = angles.cos(), angles.sin()
        x = self.tokens(tokens)
        for layer in self.layers:
            x = self.run_layer(layer, x, cosine, sine)
        logits = self.output(self.norm(x))
        return self.loss(logits.flatten(0, 1), targets.flatten())

    def run_layer(self, layer: nn.Module, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """One layer, checkpointed if the config says so."""
        if self.config.checkpointed:
            return checkpoint(layer, x, cosine, sine, use_reentrant=False)
        return layer(x, cosine, sine)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of logits (tokens, vocabulary) and targets (tokens,)."""
        return F.cross_entropy(logits.float(), targets)


def on_meta(
    config: LlamaConfig, batch: int, sequence: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Model, positional and keyword inputs, without data."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        return Llama(config), (tokens, tokens), {}


def llama_3_8b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """8B, batch 2, sequence 8192."""
    return on_meta(LLAMA_3_8B, 2, 8192)


def llama_3_405b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """405B, batch 2, sequence 8192."""
    return on_meta(LLAMA_3_405B, 2, 8192)
