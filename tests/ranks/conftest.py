"""The one fixture of the distributed tests: run a function on every rank of a persistent gloo group."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.gloo_pool import GlooPools


@pytest.fixture(scope="package")
def run_on_gloo_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """`run_on_gloo_ranks(world_size, function, *args)`: see `GlooPools.run`.

    The ranks of a test run share one Inductor cache folder: equal kernels are built by the C++ compiler once,
    and nothing is carried over from an earlier run. They end with the tests of this folder.
    """
    base = tmp_path_factory.getbasetemp()
    # Each worker of a run has a folder in that of the run.
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor_cache"
    cache.mkdir(exist_ok=True)
    pools = GlooPools(cache)
    yield pools.run
    pools.close()
