"""Memory of a training step: what `graphshard.inspect` predicts against what the allocator counts, for the examples.

    torchrun --standalone --nproc-per-node 2 benchmarks/memory.py
    torchrun --standalone --nproc-per-node 4 benchmarks/memory.py --models vit,llama
    python benchmarks/memory.py
    torchrun --standalone --nproc-per-node 2 benchmarks/memory.py --uncompiled

Measured are shards, optimizer state and the batch, and above them the peak of a step (step_memory.py; on a GPU what was
asked of CUDA's allocator), on the rank that holds most. The prediction sees the model on the meta device, the number of
ranks and nothing else. The exit status is 1 if one is off by more than --within.

With --uncompiled, graphshard and FSDP2 run without a compiler, with each setting of reshard_after_forward; nothing is
predicted. The exit status is 1 if graphshard's peak is above FSDP2's by more than --within.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from graphshard.cost import load_card
from graphshard.machine import Machine
from step_memory import local_bytes, measure_step_memory, optimizer_bytes

sys.path.append(str(Path(__file__).parents[1] / "examples"))
running_ranks = importlib.import_module("distributed_setup").running_ranks
train_step = importlib.import_module("unsharded_reference").train_step

NUM_WARM_STEPS = 2
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model as its example trains it: `units` are patterns for `inspect`, inputs those of all ranks."""

    make: Callable[[], nn.Module]
    units: str
    inputs: Mapping[str, Tensor]
    loss: Callable[[Any], Tensor]


def _gpt() -> Subject:
    """examples/train_gpt.py at its defaults."""
    example = importlib.import_module("gpt_model")
    config = example.GPTConfig(num_layers=4, width=256, num_heads=4, context=128)
    tokens = torch.zeros(16, config.context, dtype=torch.long)
    inputs = {"tokens": tokens, "targets": tokens.clone()}
    return Subject(make=lambda: example.GPT(config), units="blocks.*", inputs=inputs, loss=lambda loss: loss)


def _llama() -> Subject:
    """examples/finetune_llama.py."""
    example = importlib.import_module("finetune_llama")
    tokens = torch.zeros(example.BATCH_SIZE, example.LENGTH, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    return Subject(
        make=example.make_model, units="model.layers.*", inputs=inputs, loss=lambda output: output.loss
    )


def _vit() -> Subject:
    """examples/train_vit.py."""
    example = importlib.import_module("train_vit")
    inputs = {
        "images": torch.randn(example.BATCH_SIZE, 8, 8),
        "labels": torch.zeros(example.BATCH_SIZE, dtype=torch.long),
    }
    return Subject(make=example.make_model, units="blocks.*", inputs=inputs, loss=lambda output: output[0])


SUBJECTS = {"gpt": _gpt, "llama": _llama, "vit": _vit}


def inputs_of_rank(subject: Subject, rank: int, num_ranks: int, device: str) -> dict[str, Tensor]:
    """This rank's rows; a tensor that is given twice stays one tensor."""
    seen: dict[int, Tensor] = {}
    for whole in subject.inputs.values():
        seen.setdefault(id(whole), whole.chunk(num_ranks)[rank].clone().to(device))
    return {name: seen[id(whole)] for name, whole in subject.inputs.items()}


def measured_bytes(
    subject: Subject,
    mesh: dist.DeviceMesh,
    *,
    shard: Callable[..., nn.Module] = graphshard.fully_shard,
    compiles: bool = True,
    reshard: bool | None = None,
) -> int:
    """Of this rank, everything included."""
    inputs = inputs_of_rank(subject, mesh.get_rank(), mesh.size(), mesh.device_type)
    model = subject.make().to(mesh.device_type)
    blocks = subject.units.removesuffix(".*")
    for unit in [*model.get_submodule(blocks), model]:
        shard(unit, mesh=mesh, reshard_after_forward=reshard)
    compiled = torch.compile(model, backend="graphshard", fullgraph=True) if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        train_step(model, optimizer, lambda: subject.loss(compiled(**inputs)), (), MAX_GRAD_NORM)

    for _ in range(NUM_WARM_STEPS):
        step()
    held = local_bytes(model.parameters()) + optimizer_bytes(optimizer)
    batch = local_bytes({id(value): value for value in inputs.values()}.values())
    measure = cuda_peak_bytes if mesh.device_type == "cuda" else lambda step: measure_step_memory(step).peak_bytes
    return held + batch + measure(step)


def cuda_peak_bytes(step: Callable[[], None]) -> int:
    """What a step asks of the allocator above what is there at its start, without rounding to blocks."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def compare_uncompiled(subject: Subject, name: str, mesh: dist.DeviceMesh) -> float:
    """Prints a row for each setting; by how much graphshard's peak is above FSDP2's at most, as a share."""
    worst = 0.0
    for reshard in (True, None, False):
        peaks = []
        for shard in (graphshard.fully_shard, torch.distributed.fsdp.fully_shard):
            total = torch.tensor(
                measured_bytes(subject, mesh, shard=shard, compiles=False, reshard=reshard)
            )
            dist.all_reduce(total, dist.ReduceOp.MAX)
            peaks.append(int(total))
        worst = max(worst, peaks[0] / peaks[1] - 1)
        if mesh.get_rank() == 0:
            text = f"graphshard {peaks[0]:,} bytes, FSDP2 {peaks[1]:,} ({100 * (peaks[0] / peaks[1] - 1):+.1f} %)"
            print(f"{name}, {mesh.size()} ranks, uncompiled, reshard_after_forward={reshard}: {text}", flush=True)
    return worst


def predicted(subject: Subject, num_ranks: int, device: str) -> graphshard.Report:
    """What is said without running the model; on a CPU, its kernels are run once to measure what they allocate."""
    here = replace(load_card("cpu-loopback"), machine=Machine.here())
    with torch.device("meta"):
        model = subject.make()
    return graphshard.inspect(
        model,
        kwargs=inputs_of_rank(subject, 0, num_ranks, "meta"),
        mesh={"shard": num_ranks},
        hardware="h100-sxm" if device == "cuda" else here,
        units=[subject.units],
        loss=subject.loss,
    )


def choose(text: str) -> Sequence[str]:
    """Read names of SUBJECTS."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SUBJECTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(SUBJECTS)}")
    return names


def main() -> int:
    """Prints a row a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=choose, default=list(SUBJECTS), help="names, a comma apart")
    parser.add_argument("--within", type=float, default=0.02, help="largest relative error (default 0.02)")
    parser.add_argument("--uncompiled", action="store_true", help="compare uncompiled steps with FSDP2's")
    options = parser.parse_args()
    worst = 0.0
    with running_ranks() as ranks:
        for name in options.models:
            subject = SUBJECTS[name]()
            if options.uncompiled:
                worst = max(worst, compare_uncompiled(subject, name, ranks.mesh))
                continue
            total = torch.tensor(measured_bytes(subject, ranks.mesh))
            dist.all_reduce(total, dist.ReduceOp.MAX)
            report = predicted(subject, ranks.world_size, ranks.device.type)
            error = report.memory.peak_bytes / int(total) - 1
            worst = max(worst, abs(error))
            if ranks.rank == 0:
                categories = {name: size for name, size in report.memory.categories.items() if size}
                print(f"{name}, {ranks.world_size} ranks: {int(total)} bytes, predicted "
                      f"{report.memory.peak_bytes} ({100 * error:+.1f} %), {categories}", flush=True)  # fmt: skip
        dist.barrier()
    return int(worst > options.within)


if __name__ == "__main__":
    sys.exit(main())
