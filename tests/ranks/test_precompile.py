"""A folder that was filled on one machine: every rank of a later run finds its plan and its kernels there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.gloo_pool import GlooPools
from support.implementations import compile_if_asked
from support.parity import start_lockstep
from support.torch_versions import NEEDS_KEPT_DTENSORS
from support.toy_models import WORKLOADS, Workload
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh

from graphshard.backend import compilation
from graphshard.passes import plan_collectives
from graphshard.precompile import INDUCTOR_FOLDER, Precompiled, ShardedAs, precompile

#: 15 and 3 rows on two ranks: the shards of the ranks differ, their graphs do not.
WORKLOAD = WORKLOADS["mlp_7_15_3"]
OPTIONS = {"hardware": "cpu-ethernet-1g"}

#: A folder is new in each run of the test, and headers take longer to compile than the kernels.
NO_HEADERS = {"cpp_cache_precompile_headers": False}


def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same model, on a device without memory."""
    with torch.device("meta"):
        return WORKLOAD.build(), (torch.empty(4, 7),), {}


def fill(folder: Path) -> tuple[list[Precompiled], list[str]]:
    """What precompile says, and the graphs that it has handed to Inductor."""
    with graphs_for_inductor() as graphs:
        done = precompile(
            make, folder, ShardedAs(mesh={"shard": 2}, is_unit=lambda path: path == "0"), options=OPTIONS
        )
    return done, graphs


@contextmanager
def graphs_for_inductor() -> Iterator[list[str]]:
    """The code of each graph that Inductor, or what stands for it, gets inside.

    A group is numbered among those of its label; earlier tests of the process have used others.
    """
    real, graphs = compilation.compile_fx_inner, []

    def compile_fx_inner(gm: fx.GraphModule, *arguments: Any, **named: Any) -> Any:
        graphs.append(re.sub(r"(graphshard\.\w+)\.\d+", r"\1.0", gm.code))
        return real(gm, *arguments, **named)

    with mock.patch.object(compilation, "compile_fx_inner", compile_fx_inner):
        yield graphs


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank did in a step: plans that it made, its graphs, and what Inductor found and compiled."""

    planned: int
    graphs: list[str]
    found: int
    compiled: int


def train(folder: str, workload: Workload, keeps_code: bool, **options: Any) -> Trained:
    """A step like that of the unsharded model; unless it ``keeps_code``, each graph is handed to Inductor."""
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
        functorch_config.patch(enable_autograd_cache=keeps_code),
        mock.patch.dict(os.environ, caches),
        mock.patch.object(plan_collectives, "plan_graph", plan_graph),
        graphs_for_inductor() as graphs,
    ):
        lockstep = start_lockstep(workload, "sharded", mesh=mesh)
        lockstep.forward = compile_if_asked("compiled", lockstep.model, **{**OPTIONS, **options})
        lockstep.train(1)
    found = counters["inductor"]
    return Trained(
        planned=sum(planned),
        graphs=graphs,
        found=found["fxgraph_cache_hit"],
        compiled=found["fxgraph_cache_miss"],
    )


def later_runs(folder: str, keeps_code: bool) -> list[Trained]:
    """The model and the options of precompile, another option, and a model that differs in one op."""
    other = replace(WORKLOAD, build=lambda: nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3)))
    return [
        train(folder, WORKLOAD, keeps_code),
        train(folder, WORKLOAD, keeps_code, move_compute=False),
        train(folder, other, keeps_code),
    ]


def test_every_rank_has_the_plan_and_the_graphs_of_precompile(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path, interpreted: None
) -> None:
    with functorch_config.patch(enable_autograd_cache=False):
        (first, last), graphs = fill(tmp_path)
    assert (first.rank, last.rank) == (0, 1) and first.planned > 0 == last.planned
    assert len(graphs) == 4 and graphs[:2] == graphs[2:]
    same, option, model = zip(*run_on_gloo_ranks(2, later_runs, str(tmp_path), False), strict=True)
    assert [each.planned for each in same] == [0, 0]
    assert [each.graphs for each in same] == [graphs[:2]] * 2
    assert option[0].planned > 0 == option[1].planned  # rank 0 plans anew, and the other follows
    assert model[0].planned > 0 == model[1].planned
    assert all(each.graphs[0] != graphs[0] and each.graphs[1] != graphs[1] for each in model)


def test_micro_batches_have_code_of_their_own(tmp_path: Path, interpreted: None) -> None:
    """Gradients of the first wait, and those of the second are reduced with them: two variants of the backward."""
    sharded = ShardedAs(mesh={"shard": 2}, is_unit=lambda path: path == "0")
    with graphs_for_inductor() as graphs:
        precompile(make, tmp_path, sharded, options=OPTIONS, ranks=[0], micro_batches=2)
    reductions = [len(re.findall(r"= torch\.ops\.\S*reduce\w*", graph)) for graph in graphs]
    assert len(graphs) == 3 and reductions[:2] == [0, 0] and reductions[2]


@pytest.mark.slow
@pytest.mark.inductor
def test_every_rank_finds_its_kernels(
    run_on_gloo_ranks: Callable[..., list[Any]], gloo_pools: GlooPools, tmp_path: Path
) -> None:
    gloo_pools.close()  # in a new process the first group over an axis is the first of its name, as in precompile
    with config.patch({"compile_threads": 1, **NO_HEADERS}):
        (first, last), _ = fill(tmp_path)
    assert (first.found, first.compiled, first.not_kept) == (0, 2, 0)
    assert (last.found, last.compiled, last.not_kept) == (2, 0, 0)
    same, _option, model = zip(*run_on_gloo_ranks(2, later_runs, str(tmp_path), True), strict=True)
    assert [(each.planned, each.found, each.compiled) for each in same] == [(0, 2, 0)] * 2
    # Of two ranks that compile one graph at the same time, the later one may find it.
    assert model[0].compiled + model[1].compiled >= 2 and all(each.found + each.compiled == 2 for each in model)


SCRIPT = """
import sys, torch, torch.distributed as dist, graphshard
from pathlib import Path
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), (torch.empty(4, 8),)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = build()[0].to_empty(device="cpu")
    graphshard.fully_shard(model[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    graphshard.fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    step = torch.compile(model, backend="graphshard", options={"hardware": sys.argv[1]})
    step(torch.ones(4, 8)).sum().backward()
    found = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    Path(f"rank{dist.get_rank()}").write_text(f"{found}")
    dist.destroy_process_group()
"""


def run_python(cwd: Path, cache: str, *arguments: str) -> None:
    """Runs a module of Python with the caches of a folder, as a shell would."""
    caches = {"GRAPHSHARD_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"made/{INDUCTOR_FOLDER}"}
    environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(cwd)}
    subprocess.run([sys.executable, "-m", *arguments], cwd=cwd, env=environment, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["cpu-ethernet-1g", "auto"])
def test_a_training_of_torchrun_finds_the_whole_step(tmp_path: Path, hardware: str) -> None:
    """Each rank, also the one that precompile did not compile for: nothing is compiled."""
    (tmp_path / "script.py").write_text(SCRIPT)
    python = partial(run_python, tmp_path)
    training = ["torch.distributed.run", "--nproc-per-node", "2", "script.py", hardware]
    if hardware == "auto":
        python("first", *training)  # measures this machine
    options = ["--mesh", "shard=2", "--unit", "0", "--hardware", hardware, "--out", "made"]
    python("first", "graphshard", "precompile", "script:build", *options)
    python("made", *training)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["(1, 0)", "(1, 0)"]


TENSOR_PARALLEL = """
import torch, torch.distributed as dist, graphshard
from pathlib import Path
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def build():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return graphshard.fully_shard(model, mesh=mesh["dp"]), (torch.ones(4, 8),)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, args = build()
    step = torch.compile(model, backend="graphshard", options={"hardware": None})
    step(*args).sum().backward()
    found = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    Path(f"rank{dist.get_rank()}").write_text(f"{found}")
    dist.destroy_process_group()
"""


@NEEDS_KEPT_DTENSORS
@pytest.mark.slow
def test_tensor_parallelism_is_compiled_for_each_rank(tmp_path: Path) -> None:
    """The model is sharded by the function that makes it, over a mesh that only it makes."""
    (tmp_path / "script.py").write_text(TENSOR_PARALLEL)
    options = ["--mesh", "dp=2,tp=2", "--hardware", "none", "--out", "made"]
    run_python(tmp_path, "made", "graphshard", "precompile", "script:build", *options)
    run_python(tmp_path, "made", "torch.distributed.run", "--nproc-per-node", "4", "script.py")
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(4)] == ["(1, 0)"] * 4
