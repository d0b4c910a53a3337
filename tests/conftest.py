"""Fixtures of the unit tests: the fake process group, captured graphs, goldens."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from support.brief_search import briefly
from support.interpreted_halves import interpreted_halves
from support.run_order import order_items
from support.sampling import mark_unsampled
from support.small_models import MODELS, example_batch, shard_units
from support.thorough import is_thorough, note_run
from support.unmeasured_guards import leave_guards_unmeasured
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphshard.ir.rewrite import copy_graph
from graphshard.testing import CapturedGraphs, capture_graphs, check_golden

# Collectives are placed by rules unless a test asks for a card: to measure this machine takes seconds. And what one run
# of the tests has planned is nothing that the next one uses.
os.environ["GRAPHSHARD_CACHE"] = ""

# As torchrun starts ranks: what kernels allocate depends on it.
torch.set_num_threads(1)
leave_guards_unmeasured()

# The same examples in every run and nothing written to disk; captures and fake tensors are slow at first.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    note_run(config)


@pytest.hookimpl(tryfirst=True)  # before the tests marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unsampled(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        order_items(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadfile":
        return None
    # Not at the top: a machine that only runs `make gpu-check` may have no xdist.
    from support.ranks_on_one_worker import RanksOnOneWorker

    return RanksOnOneWorker(config, log)


@pytest.fixture
def interpreted() -> Iterator[None]:
    """In `make test`, what the test compiles runs node by node: see `support/interpreted_halves.py`."""
    with nullcontext() if is_thorough() else interpreted_halves():
        yield


@pytest.fixture(scope="module")
def brief_plans() -> Iterator[None]:
    """In `make test`, what the tests of a module plan is searched for briefly: see `support/brief_search.py`."""
    with briefly():
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of torch's kernels for one test."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(num_ranks: int, rank: int = 0) -> DeviceMesh:
    _stop()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    return init_device_mesh("cpu", (num_ranks,))


@pytest.fixture
def fake_group() -> Iterator[Callable[..., DeviceMesh]]:
    """`fake_group(num_ranks, rank=0)` (re)starts the fake process group; returns a 1-D mesh over it."""
    yield _start
    _stop()


@pytest.fixture(scope="session")
def captured() -> Callable[..., CapturedGraphs]:
    """`captured(model, num_ranks, rank=0, ...)`: the graphs of one of `small_models.MODELS`, captured once.

    In float64, as `all_ranks` runs them. Each call returns copies, because passes edit graphs in place.
    """
    cache: dict[object, CapturedGraphs] = {}

    def capture(
        name: str, num_ranks: int, rank: int = 0, *, reshard: bool | int | None = None, grad: bool = True
    ) -> CapturedGraphs:
        key = (name, num_ranks, rank, reshard, grad)
        if key not in cache:
            mesh = _start(num_ranks, rank)
            try:
                model = shard_units(MODELS[name]().double(), mesh, reshard_after_forward=reshard)
                with torch.set_grad_enabled(grad):
                    cache[key] = capture_graphs(model, example_batch(name, dtype=torch.float64))
            finally:
                _stop()
        return _copied(cache[key])

    return capture


def _copied(graphs: CapturedGraphs) -> CapturedGraphs:
    def twin(gm: fx.GraphModule | None) -> fx.GraphModule | None:
        return None if gm is None else copy_graph(gm)

    return CapturedGraphs(
        captured=copy_graph(graphs.captured),
        joint=copy_graph(graphs.joint),
        forward=twin(graphs.forward),
        backward=twin(graphs.backward),
        context=copy.copy(graphs.context),
    )


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden(text, name)` compares with `tests/passes/goldens/name.txt`."""
    folder = Path(__file__).parent / "passes" / "goldens"
    return lambda text, name: check_golden(text, folder / f"{name}.txt")
