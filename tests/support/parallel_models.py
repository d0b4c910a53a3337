"""Plain models for one device, each with placements on an axis of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from support.toy_models import Transformer


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, is_causal: bool, bias: bool = False) -> None:
        super().__init__()
        self.head_dim, self.is_causal = dim // num_heads, is_causal
        self.repeats = num_heads // num_kv_heads
        self.wq = nn.Linear(dim, dim, bias=bias)
        self.wk = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.wo = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, angles: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (layer(x).view(batch, length, -1, self.head_dim) for layer in (self.wq, self.wk, self.wv))
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        key, value = (each.repeat_interleave(self.repeats, dim=2) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.wo(found.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GatedFeedForward(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads, num_kv_heads, is_causal=True)
        self.feed_forward = GatedFeedForward(dim, inner)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A decoder that returns its loss."""

    def __init__(
        self,
        num_kv_heads: int = 2,
        vocabulary: int = 12,
        dim: int = 16,
        inner: int = 24,
        num_layers: int = 2,
        num_heads: int = 4,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([LlamaBlock(dim, num_heads, num_kv_heads, inner) for _ in range(num_layers)])
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        positions = torch.arange(8.0)[:, None] / 10.0 ** torch.linspace(0, 1, dim // num_heads // 2)
        self.register_buffer("angles", positions, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


class TiedGpt(nn.Module):
    """A decoder whose output layer is tied to its token embedding; fused projections; dropout if asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = Transformer(vocabulary=10, num_layers=1)
        self.dropout = dropout

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        body = self.body
        x = body.tokens(tokens) + body.positions(torch.arange(tokens.shape[1]))
        for layer in body.layers:
            x = F.dropout(layer(x), self.dropout)
        return F.cross_entropy(body.output(body.norm(x)).flatten(0, 1), targets.flatten())


class VitBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, 4, 4, is_causal=False, bias=True)
        self.expand, self.contract = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class Vit(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.layers = nn.ModuleList([VitBlock(dim) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), classes)


class Mlp(nn.Module):
    """Widths that four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 5)])

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        first, second, last = self.layers
        return F.mse_loss(last(x + second(torch.tanh(first(x)))), targets)


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model that returns its loss, and where its parameters and values lie."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    placements: Mapping[str, Placement] | str
    units: Callable[[nn.Module], list[nn.Module]] = lambda model: list(model.layers)
    held: Mapping[str, Any] = field(default_factory=dict)


def draw_tokens(vocabulary: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda generator: (
        torch.randint(vocabulary, (2, 8), generator=generator),
        torch.randint(vocabulary, (2, 8), generator=generator),
    )


ATTENTION = {
    "layers.*.attention.wq.weight": Shard(0),
    "layers.*.attention.wk.weight": Shard(0),
    "layers.*.attention.wv.weight": Shard(0),
    "layers.*.attention.wo.weight": Shard(1),
}
LLAMA = {
    **ATTENTION,
    "layers.*.feed_forward.w1.weight": Shard(0),
    "layers.*.feed_forward.w3.weight": Shard(0),
    "layers.*.feed_forward.w2.weight": Shard(1),
    "tok_embeddings.weight": Shard(0),
    "output.weight": Shard(0),
}
_ALONG_SEQUENCE = {
    "inputs": {"layers.*.attention": Replicate(), "layers.*.feed_forward": Replicate(), "output": Replicate()},
    "outputs": {
        "tok_embeddings": Shard(1),
        "layers.*.attention": Shard(1),
        "layers.*.feed_forward": Shard(1),
        "norm": Shard(1),
    },
}
VIT = {
    **ATTENTION,
    "layers.*.attention.wq.bias": Shard(0),
    "layers.*.attention.wv.bias": Shard(0),
    "layers.*.expand.weight": Shard(0),
    "layers.*.expand.bias": Shard(0),
    "layers.*.contract.weight": Shard(1),
    "head.weight": Shard(0),
    "head.bias": Shard(0),
}
GPT = {
    "body.tokens.weight": Shard(0),
    "body.layers.*.query_key_value.weight": Shard(0),
    "body.layers.*.projection.weight": Shard(1),
    "body.layers.*.expand.weight": Shard(0),
    "body.layers.*.expand.bias": Shard(0),
    "body.layers.*.contract.weight": Shard(1),
}

PARALLEL_MODELS = {
    "mlp": ParallelModel(
        build=Mlp,
        draw=lambda generator: (torch.randn(3, 6, generator=generator), torch.randn(3, 5, generator=generator)),
        placements={"layers.0.*": Shard(0), "layers.1.weight": Shard(1), "layers.2.weight": Shard(1)},
        units=lambda model: [],
    ),
    "llama": ParallelModel(build=Llama, draw=draw_tokens(12), placements=LLAMA),
    "llama along the sequence": ParallelModel(
        build=lambda: Llama(num_layers=1), draw=draw_tokens(12), placements=LLAMA, held=_ALONG_SEQUENCE
    ),
    "llama with one key head": ParallelModel(
        build=lambda: Llama(num_kv_heads=1, num_layers=1), draw=draw_tokens(12), placements=LLAMA
    ),
    "llama with three heads": ParallelModel(
        build=lambda: Llama(num_kv_heads=1, num_layers=1, num_heads=3, dim=12),
        draw=draw_tokens(12),
        placements={**LLAMA, "tok_embeddings.weight": Shard(1)},
    ),
    "gpt": ParallelModel(
        build=TiedGpt, draw=draw_tokens(10), placements=GPT, units=lambda model: list(model.body.layers)
    ),
    "gpt with dropout": ParallelModel(
        build=lambda: TiedGpt(0.2), draw=draw_tokens(10), placements=GPT, units=lambda model: list(model.body.layers)
    ),
    "vit": ParallelModel(
        build=Vit,
        draw=lambda generator: (
            torch.randn(2, 3, 8, 8, generator=generator),
            torch.randint(5, (2,), generator=generator),
        ),
        placements=VIT,
    ),
}

#: The plan of torchtitan for a Llama, with sequence parallelism.
ALONG_SEQUENCE_BY_HAND = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    ),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
