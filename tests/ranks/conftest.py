"""The one fixture of the distributed tests: run a function on every rank of a persistent gloo group.

`make test` leaves out what proves nothing of graphshard, interprets most halves and plans briefly; `make test-all`
does none of these.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.gloo_pool import GlooPools
from support.thorough import is_thorough

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the tests marked slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A case of torch's own FSDP2 is slow: it shows that a test asks for what torch does, and changes with torch only.

    Tests that compare graphshard with FSDP2 run both and are no such cases. Of a test marked `compiles`, the compiled
    cases that the marker does not name are slow.
    """
    unused: dict[tuple[Path, str], set[str]] = {}
    for item in items:
        if HERE not in item.path.parents or not hasattr(item, "callspec"):
            continue
        implementation = item.callspec.params.get("implementation", "compiled")
        named = item.get_closest_marker("compiles")
        is_left_out = named is not None and not any(name in item.callspec.id for name in named.args)
        if named is not None:
            left = unused.setdefault((item.path, item.originalname), set(named.args))
            left -= {name for name in named.args if name in item.callspec.id}
        if implementation == "fsdp2" or (implementation == "compiled" and is_left_out):
            item.add_marker(pytest.mark.slow)
    wrong = [f"{path.name}::{test}: {', '.join(left)}" for (path, test), left in unused.items() if left]
    if wrong and not any("::" in each for each in config.args):
        raise pytest.UsageError(f"words of the marker `compiles` that are in the name of no case: {'; '.join(wrong)}")


@pytest.fixture(scope="package")
def gloo_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPools]:
    """The ranks of a test run share one Inductor cache folder: equal kernels are built by the C++ compiler once.

    Nothing is carried over from an earlier run. The ranks end with the tests of this folder.
    """
    base = tmp_path_factory.getbasetemp()
    # Each worker of a run has a folder in that of the run.
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor_cache"
    cache.mkdir(exist_ok=True)
    pools = GlooPools(cache)
    yield pools
    pools.close()


@pytest.fixture
def run_on_gloo_ranks(gloo_pools: GlooPools, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`run_on_gloo_ranks(world_size, function, *args)`: see `GlooPools.run`.

    In a run without the slow tests, plans are searched for briefly, and halves are interpreted unless the test is
    marked `inductor`.
    """
    through_inductor = is_thorough() or request.node.get_closest_marker("inductor") is not None
    return partial(gloo_pools.run, interprets=not through_inductor, is_thorough=is_thorough())
