"""What the tests of trainers share: is the package there, and the environment that a launcher would set."""

import contextlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.gloo_pool import set_environment

#: The versions that the extra `trainers` of pyproject.toml pins; docs/use/trainers.md names them. Any triton will do.
PINNED = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
    "triton": "",
}


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
        if pinned and found != pinned:
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


Trained = tuple[list[float], dict[str, Tensor]]
"""The losses and the whole parameters of a training."""


def check_same_training(expected: Trained, found: Trained, name: str, tolerance: float | None) -> None:
    """The same up to rounding, or up to `tolerance`."""
    bounds = {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}

    def compare(what: str, expected: Tensor, found: Tensor) -> None:
        torch.testing.assert_close(found, expected, msg=lambda text: f"{name}, {what}: {text}", **bounds)

    compare("losses", torch.tensor(expected[0]), torch.tensor(found[0]))
    assert list(found[1]) == list(expected[1])
    for parameter, value in expected[1].items():
        compare(parameter, value, found[1][parameter])
    assert len(set(expected[0])) == len(expected[0]), "the losses do not change: nothing is trained"


def compare_with_fsdp2(
    train: Callable[[str, str], Trained], folder: str, tolerance: float | None = None
) -> None:
    """`train(implementation, a folder of its own)`: graphshard trains as FSDP2, and compiles if asked.

    Uncompiled it trains as FSDP2 up to the rounding of float32, whatever the dtypes.
    """
    with as_launched():
        expected = train("fsdp2", f"{folder}/fsdp2")
        for implementation in ("sharded", "compiled"):
            torch._dynamo.utils.counters.clear()
            found = train(implementation, f"{folder}/{implementation}")
            allowed = tolerance if implementation == "compiled" else None
            check_same_training(expected, found, implementation, allowed)
            is_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
            assert is_compiled == (implementation == "compiled"), implementation
