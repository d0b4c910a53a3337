"""Published architectures from the transformers library, tiny and random, train like the unsharded model.

Nothing is downloaded: the configurations are written out here. Losses of three AdamW steps agree within 2e-4.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, compile_if_asked, shard_units
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

pytestmark = pytest.mark.slow

VOCABULARY = 99
NUM_STEPS = 3
LOSS_TOLERANCE = 2e-4
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class BasicBlock(nn.Module):
    """Two convolutions around a residual connection, with batch normalisation (ResNet's basic block)."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_channels)
        self.second = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_channels)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(hidden)))


class SmallResNet(nn.Module):
    """Returns its cross-entropy loss, as the language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList([BasicBlock(10) for _ in range(2)])
        self.head = nn.Linear(10, 7)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


class LossOf(nn.Module):
    """A language model that is given its labels, reduced to its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs, use_cache=False).loss if self.has_cache() else self.model(**inputs).loss

    def has_cache(self) -> bool:
        return hasattr(self.model.config, "use_cache")


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LossOf(LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2)))


def build_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4)
    return LossOf(MixtralForCausalLM(config))


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return LossOf(BertForMaskedLM(BertConfig(**SMALL, intermediate_size=48, **dropouts)))


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **dropouts)
    return LossOf(GPT2LMHeadModel(config))


def build_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return LossOf(T5ForConditionalGeneration(config))


BUILDERS = {
    "llama": (build_llama, "LlamaDecoderLayer"),
    "mixtral": (build_mixtral, "MixtralDecoderLayer"),
    "bert": (build_bert, "BertLayer"),
    "gpt2": (build_gpt2, "GPT2Block"),
    "t5": (build_t5, "T5Block"),
    "resnet": (SmallResNet, "BasicBlock"),
}
"""How to build each model, and the class of its units."""


def draw_inputs(name: str, rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "resnet":
        images = torch.randn(4, 3, 8, 8, generator=generator)
        return {"images": images, "labels": torch.randint(7, (4,), generator=generator)}
    tokens = torch.randint(1, VOCABULARY, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def train_beside_unsharded(name: str, implementation: str) -> list[tuple[float, float]]:
    """(loss of the sharded model, loss of the unsharded model) on this rank's batch, step by step."""
    warnings.simplefilter("default")  # what the library's code makes torch warn about is not ours to mend
    build, unit_class = BUILDERS[name]
    torch.manual_seed(42)
    reference = build()
    model = copy.deepcopy(reference)
    units = [module for module in model.modules() if type(module).__name__ == unit_class]
    assert len(units) >= 2, f"no {unit_class} in {name}"
    shard_units(implementation, model, units)
    forward = compile_if_asked(implementation, model, fullgraph=False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (reference, model)]
    world_size, rank = dist.get_world_size(), dist.get_rank()
    losses = []
    for step in range(NUM_STEPS):
        expected = [reference(**draw_inputs(name, other, step)) for other in range(world_size)]
        (torch.stack(expected).sum() / world_size).backward()
        loss = forward(**draw_inputs(name, rank, step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.item(), expected[rank].item()))
    return losses


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("implementation", EVERY)
def test_architecture_trains_like_unsharded(run_on_gloo_ranks, implementation, name):
    for losses in run_on_gloo_ranks(2, train_beside_unsharded, name, implementation):
        sharded, unsharded = torch.tensor(losses).unbind(dim=1)
        assert_close(sharded, unsharded, rtol=0, atol=LOSS_TOLERANCE)
        assert unsharded.unique().numel() == NUM_STEPS, "training changed nothing"
