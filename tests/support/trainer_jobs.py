"""What the tests of trainers share: is the package there, and the environment that a launcher would set."""

import contextlib
import importlib.metadata
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.gloo_pool import set_environment

#: The versions that the extra `trainers` of pyproject.toml pins; docs/use/trainers.md names them.
PINNED = {"accelerate": "1.15.0", "lightning": "2.6.6", "torchtitan": "0.3.0", "transformers": "5.23.0"}


def need(*packages: str) -> pytest.MarkDecorator:
    """Skips a module's tests where a package is missing or has another version than the pinned one."""
    for package in packages:
        pinned = PINNED[package]
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return pytest.mark.skipif(
                True, reason=f"{package} is not installed: pip install -e '.[trainers]'"
            )
        if found != pinned:
            return pytest.mark.skipif(True, reason=f"{package} is {found}, these tests are for {pinned}")
    return pytest.mark.skipif(False, reason="")


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """The variables that torchrun sets, for one job on this rank. Warnings of the trainers are not ours."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    launched = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "a_test",
    }
    before = dict(os.environ)
    with set_environment(launched), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for name in set(os.environ) - set(before) - set(launched):
                del os.environ[name]  # trainers leave settings there


class Block(nn.Module):
    """A block of the models that trainers train."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def make_model() -> nn.Sequential:
    """The same weights on every rank and in every run."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), Block(), Block(), nn.Linear(6, 2))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """This rank's batch."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch_of(step)
    return nn.functional.mse_loss(model(x), y)


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters, under the names of the model that was not compiled."""
    return {name.replace("_orig_mod.", ""): value.full_tensor() for name, value in model.named_parameters()}


def check_same_training(
    expected: tuple[list[float], dict[str, Tensor]], found: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Two trainings, as losses and parameters: the same up to rounding."""
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]))
    assert list(found[1]) == list(expected[1])
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert len(set(expected[0])) == len(expected[0]), "the losses do not change: nothing is trained"
