"""What gpu_parts.py measures, and how: where a part runs, the models, and the timing in turns."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from gpt import Gpt, GptConfig, next_token_loss
from graphshard.cost import HardwareCard, load_card

sys.path.append(str(Path(__file__).parents[1] / "examples"))
llama = importlib.import_module("llama_model")

ROUNDS, STEPS = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part runs: ``lock`` is held while it times, ``card`` is a file that the part "card" writes."""

    device: torch.device
    lock: Path
    card: Path

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other part times meanwhile."""
        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
            self.synchronize()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def measured_card(self) -> HardwareCard:
        """The card of this device, once it is measured."""
        while not self.card.exists():
            time.sleep(0.2)
        return load_card(self.card)


# --------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model that returns its loss for tokens and targets; ``units`` lists the modules that are units."""

    make: Callable[[], nn.Module]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    pattern: str
    batch: tuple[Tensor, Tensor]


class _GptLoss(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.gpt = Gpt(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.gpt(tokens).float(), targets)


def _tokens(vocabulary: int, batch: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(vocabulary, (batch, context + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def gpt_subject(place: Place) -> Subject:
    """GPT of 8 layers of 1,024; tiny on a CPU."""
    sizes = dict(num_layers=8, width=1024, num_heads=16, context=1024, vocab=32_768)
    config = GptConfig(**sizes) if place.is_gpu else GptConfig(num_layers=2, width=64, context=32)
    return Subject(
        make=lambda: _GptLoss(config),
        units=lambda model: list(model.gpt.blocks),
        pattern="gpt.blocks.*",
        batch=_tokens(config.vocab, 8 if place.is_gpu else 2, config.context, place.device),
    )


def llama_subject(place: Place, *, layers: int = 3, batch: int = 1) -> Subject:
    """Layers of Llama-3-8B with a vocabulary of 32,000, sequences of 4,096 tokens; tiny on a CPU."""
    config = replace(llama.LLAMA_3_8B, num_layers=layers, vocabulary=32_000)
    if not place.is_gpu:
        config = llama.LlamaConfig(
            num_layers=2, width=64, hidden=128, num_heads=8, num_kv_heads=4, vocabulary=256
        )
    return Subject(
        make=lambda: llama.Llama(config),
        units=lambda model: list(model.layers),
        pattern="layers.*",
        batch=_tokens(config.vocabulary, batch, 4096 if place.is_gpu else 32, place.device),
    )


def make(subject: Subject, place: Place) -> nn.Module:
    """The same weights at each call."""
    torch.manual_seed(0)
    with place.device:
        model = subject.make()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def shard(model: nn.Module, subject: Subject, mesh: Any, **settings: Any) -> nn.Module:
    """``fully_shard`` of graphshard, by units."""
    for unit in (*subject.units(model), model):
        graphshard.fully_shard(unit, mesh=mesh, **settings)
    torch.cuda.empty_cache()  # nothing where there is no GPU; other parts need the memory
    return model


def policy() -> graphshard.MixedPrecisionPolicy:
    return graphshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def runner(model: nn.Module, call: Callable[..., Tensor], batch: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A forward and a backward that leave fresh gradients."""
    parameters = list(model.parameters())

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = call(*batch)
        loss.backward()
        return loss

    return step


def time_in_turns(
    steps: Mapping[str, Callable[[], object]], place: Place, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Seconds of a step of each contender in each round, in turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name, step in steps.items():
            step()
            place.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            place.synchronize()
            if index:
                found[name].append((time.perf_counter() - start) / STEPS)
    return found


def ratio(found: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """The median over rounds."""
    return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))


def timed_first(name: str, steps: Mapping[str, Callable[[], Tensor]], firsts: dict[str, float]) -> float:
    """The loss of a first step, which compiles; its seconds are kept."""
    start = time.perf_counter()
    loss = steps[name]().item()
    firsts[name] = time.perf_counter() - start
    torch.cuda.empty_cache()
    return loss
