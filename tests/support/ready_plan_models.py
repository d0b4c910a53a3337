"""Models with the layer names of well-known code, for ready plans: nanoGPT's decoder and timm's vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.parallel_models import Llama, ParallelModel, draw_tokens


class FusedAttention(nn.Module):
    """One product for queries, keys and values; ``names`` are those of its two layers."""

    def __init__(self, dim: int, num_heads: int, names: tuple[str, str], is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.names, self.is_causal = num_heads, names, is_causal
        setattr(self, names[0], nn.Linear(dim, 3 * dim, bias=False))
        setattr(self, names[1], nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        fused, last = (getattr(self, name) for name in self.names)
        query, key, value = (
            each.view(batch, length, self.num_heads, -1).transpose(1, 2) for each in fused(x).split(dim, dim=2)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return last(found.transpose(1, 2).reshape(batch, length, dim))


class Mlp(nn.Module):
    def __init__(self, dim: int, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Linear(dim, 2 * dim))
        setattr(self, names[1], nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return second(F.gelu(first(x)))


class Block(nn.Module):
    def __init__(self, dim: int, attention: tuple[str, str], mlp: tuple[str, str], is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = FusedAttention(dim, 2, attention, is_causal)
        self.mlp = Mlp(dim, mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NanoGpt(nn.Module):
    def __init__(self, dim: int = 12, vocabulary: int = 9, num_layers: int = 1) -> None:
        super().__init__()
        blocks = [Block(dim, ("c_attn", "c_proj"), ("c_fc", "c_proj"), True) for _ in range(num_layers)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, dim),
                "wpe": nn.Embedding(8, dim),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        parts = self.transformer
        x = parts.wte(tokens) + parts.wpe(torch.arange(tokens.shape[1]))
        for block in parts.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(parts.ln_f(x)).flatten(0, 1), targets.flatten())


class TimmVit(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.blocks = nn.Sequential(Block(dim, ("qkv", "proj"), ("fc1", "fc2"), False))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patch_embed.proj(images).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1))
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), classes)


READY_PLAN_MODELS = {
    "llama": ParallelModel(build=lambda: Llama(num_layers=1), draw=draw_tokens(12), placements="llama"),
    "llama-sequence": ParallelModel(
        build=lambda: Llama(num_layers=1), draw=draw_tokens(12), placements="llama-sequence"
    ),
    "gpt": ParallelModel(
        build=NanoGpt, draw=draw_tokens(9), placements="gpt", units=lambda model: list(model.transformer.h)
    ),
    "gpt-sequence": ParallelModel(
        build=NanoGpt, draw=draw_tokens(9), placements="gpt-sequence", units=lambda model: list(model.transformer.h)
    ),
    "vit": ParallelModel(
        build=TimmVit,
        draw=lambda generator: (
            torch.randn(2, 3, 8, 8, generator=generator),
            torch.randint(5, (2,), generator=generator),
        ),
        placements="vit",
        units=lambda model: list(model.blocks),
    ),
}
