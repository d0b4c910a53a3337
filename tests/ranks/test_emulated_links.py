"""The process group of benchmarks/emulated_links.py, and the benchmark of one GPU on a CPU with tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))


@pytest.mark.usefixtures("interpreted")
def test_fsdp2_and_graphshard_issue_the_same_collectives_on_it():
    from emulated_links import emulated_ranks

    asked = []
    with emulated_ranks(4, torch.device("cpu"), lambda kind, num_bytes: asked.append((kind, num_bytes)) or 0.0):
        mesh = init_device_mesh("cpu", (4,))
        assert dist.get_world_size() == 4
        seen, gradients = [], []
        for library in (fsdp, graphshard):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
            for unit in (model[0], model):
                library.fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            is_ours = library is graphshard
            call = torch.compile(model, backend="graphshard", fullgraph=True) if is_ours else model
            asked.clear()
            call(torch.ones(4, 16)).square().mean().backward()
            seen.append(sorted(asked))
            gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert seen[0] == seen[1] and [kind for kind, _ in seen[0]] == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    sizes = [num_bytes for _, num_bytes in seen[0]]
    assert sizes[:2] == sizes[2:] == [4 * (32 * 8 + 8), 4 * (16 * 32 + 32)], "of the larger of input and output"
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.slow
def test_the_benchmark_of_one_gpu_runs_on_a_cpu(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--json", str(out), "--limit", "500"]
    done = subprocess.run([*command, "--parts", "memory unit,compute"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(out.read_text())["parts"]) == {"card", "memory unit", "compute"}


@pytest.mark.slow
def test_a_part_that_fails_fails_the_benchmark():
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--limit", "0.1", "--parts", "card"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "failed" in json.loads(done.stdout)["parts"]["card"], done.stdout
