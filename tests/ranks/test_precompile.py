"""A folder that was filled on one machine: every rank of a later run finds its plan and its kernels there."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.implementations import compile_if_asked
from support.parity import start_lockstep
from support.toy_models import WORKLOADS, Workload
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh

from graphshard.backend import INDUCTOR_FOLDER, Precompiled, ShardedAs, precompile
from graphshard.passes import plan_collectives

pytestmark = pytest.mark.inductor

#: 15 and 3 rows on two ranks: the shards of the ranks differ, their graphs do not.
WORKLOAD = WORKLOADS["mlp_7_15_3"]
OPTIONS = {"hardware": "cpu-ethernet-1g"}

#: A folder is new in each run of the test, and headers take longer to compile than the kernels.
NO_HEADERS = {"cpp_cache_precompile_headers": False}


def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same model, on a device without memory."""
    with torch.device("meta"):
        return WORKLOAD.build(), (torch.empty(4, 7),), {}


def fill(folder: Path) -> list[Precompiled]:
    return precompile(
        make, folder, ShardedAs(mesh={"shard": 2}, is_unit=lambda path: path == "0"), options=OPTIONS
    )


def train(folder: str, workload: Workload, **options: Any) -> tuple[int, int, int]:
    """A step like that of the unsharded model; returns graphs found, graphs compiled and plans made."""
    torch._dynamo.reset()
    counters.clear()
    planned = []
    real = plan_collectives.plan_graph

    def plan_graph(*arguments: Any, **named: Any) -> Any:
        planned.append(named["known"] is None)
        return real(*arguments, **named)

    caches = {"GRAPHSHARD_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{INDUCTOR_FOLDER}"}
    # Torch numbers groups as they are made; that of precompile was the first one.
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    with (
        config.patch(NO_HEADERS),
        mock.patch.dict(os.environ, caches),
        mock.patch.object(plan_collectives, "plan_graph", plan_graph),
    ):
        lockstep = start_lockstep(workload, "sharded", mesh=mesh)
        lockstep.forward = compile_if_asked("compiled", lockstep.model, **{**OPTIONS, **options})
        lockstep.train(1)
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], sum(planned)


def later_runs(folder: str) -> list[tuple[int, int, int]]:
    """The model and the options of precompile, another option, and a model that differs in one op."""
    other = replace(WORKLOAD, build=lambda: nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3)))
    return [train(folder, WORKLOAD), train(folder, WORKLOAD, move_compute=False), train(folder, other)]


def test_every_rank_finds_its_plan_and_its_kernels(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    with config.patch({"compile_threads": 1, **NO_HEADERS}):
        first, last = fill(tmp_path)
    assert (first.rank, first.found, first.compiled, first.not_kept) == (0, 0, 2, 0) and first.planned > 0
    assert (last.rank, last.found, last.compiled, last.planned) == (1, 2, 0, 0)
    same, option, model = zip(*run_on_gloo_ranks(2, later_runs, str(tmp_path)), strict=True)
    assert same == ((2, 0, 0), (2, 0, 0))
    assert option[0][2] > 0 == option[1][2]  # rank 0 plans anew, and the other follows
    assert model[0][:2] == model[1][:2] == (0, 2) and model[0][2] > 0
