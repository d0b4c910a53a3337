"""Small models to train on ranks, each with its batches, its loss and the modules that become units.

Every weight's first dim is chosen against the number of ranks: even, uneven, or smaller than the number of
ranks so that some ranks hold nothing. No parameter has a gradient that is zero but for rounding (no key bias,
no bias before a normalisation), since Adam turns such noise into full steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]
Forward = Callable[..., Tensor]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, causal."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 4 * dim)
        self.contract = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3 * self.num_heads, -1)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.contract(F.gelu(self.expand(self.feed_forward_norm(x))))


class Transformer(nn.Module):
    """A decoder whose output layer is tied to its token embedding."""

    def __init__(self, num_layers: int = 2, vocabulary: int = 11, dim: int = 16, max_length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList([Block(dim, num_heads=4) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class ConvNet(nn.Module):
    """Two convolutions with odd numbers of channels, group normalisation, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 9, kernel_size=3, padding=1)
        self.body = nn.Sequential(nn.GroupNorm(3, 9), nn.ReLU(), nn.Conv2d(9, 5, kernel_size=3, stride=2))
        self.head = nn.Linear(5, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(F.relu(self.body(self.stem(image))).mean(dim=(2, 3)))


def build_mlp(*layer_sizes: tuple[int, int]) -> nn.Sequential:
    """Linear layers of the given (in, out) sizes with a ReLU between each two."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in layer_sizes:
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and how to train it."""

    build: Callable[[], nn.Module]
    list_units: Callable[[nn.Module], list[nn.Module]]
    """The modules below the root that get a `fully_shard` call of their own."""
    draw_batch: Callable[[torch.Generator, int], Batch]
    """(generator, batch size) -> inputs."""
    loss: Callable[[Forward, Batch], Tensor]

    def batch_of(self, rank: int, step: int, batch_size: int = 4) -> Batch:
        """The batch of one rank in one step: the same on whichever rank asks."""
        return self.draw_batch(torch.Generator().manual_seed(1000 * step + rank), batch_size)


def mlp_workload(*layer_sizes: tuple[int, int], one_unit: bool = False) -> Workload:
    """Squared output of an MLP. Units: the first half of the linear layers, one each, and the root."""

    def list_units(model: nn.Module) -> list[nn.Module]:
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        return [] if one_unit else linears[: len(linears) // 2]

    return Workload(
        build=lambda: build_mlp(*layer_sizes),
        list_units=list_units,
        draw_batch=lambda generator, size: (torch.randn(size, layer_sizes[0][0], generator=generator),),
        loss=lambda forward, batch: (forward(*batch) - 1.0).square().mean(),
    )


def next_token_loss(forward: Forward, batch: Batch) -> Tensor:
    (tokens,) = batch
    logits = forward(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def classification_loss(forward: Forward, batch: Batch) -> Tensor:
    image, label = batch
    return F.cross_entropy(forward(image), label)


def draw_images(generator: torch.Generator, batch_size: int) -> Batch:
    return (
        torch.randn(batch_size, 3, 6, 6, generator=generator),
        torch.randint(3, (batch_size,), generator=generator),
    )


WORKLOADS: dict[str, Workload] = {
    "mlp_even": mlp_workload((8, 16), (16, 8), (8, 4)),
    "mlp_one_unit": mlp_workload((8, 16), (16, 8), (8, 4), one_unit=True),
    "mlp_7_15_3": mlp_workload((7, 15), (15, 3)),
    "mlp_16_17_8": mlp_workload((16, 17), (17, 8)),
    "mlp_16_15_8": mlp_workload((16, 15), (15, 8)),
    "mlp_5_rows": mlp_workload((4, 5), (5, 2)),
    "transformer": Workload(
        build=Transformer,
        list_units=lambda model: list(model.layers),
        draw_batch=lambda generator, size: (torch.randint(11, (size, 7), generator=generator),),
        loss=next_token_loss,
    ),
    "transformer_of_one_layer": Workload(
        build=lambda: Transformer(num_layers=1),
        list_units=lambda model: list(model.layers),
        draw_batch=lambda generator, size: (torch.randint(11, (size, 7), generator=generator),),
        loss=next_token_loss,
    ),
    "convnet": Workload(
        build=ConvNet,
        list_units=lambda model: [model.stem, model.body],
        draw_batch=draw_images,
        loss=classification_loss,
    ),
}
"""By name, so that a test can name one across processes."""
