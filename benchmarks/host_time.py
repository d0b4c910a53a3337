"""Host time of a training step at many small parameters: graphshard against FSDP2 and no sharding.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --blocks 5 --rounds 20
    torchrun --nproc-per-node 2 benchmarks/host_time.py --contenders fsdp2,graphshard-uncompiled

One process stands for rank 0 of 8: a fake process group returns from collectives at once, and tensors of a
few elements make kernels cheap, so what is left is the work of the host. A step is a forward and a backward;
the optimizer, the same for all sharded contenders, is left out. Times are CPU seconds of the process, since
other work on the machine stretches the wall clock. Under torchrun the ranks communicate, over gloo, and rank 0 prints
what it takes itself.

"graphshard-naive" hands DTensors straight to AOTAutograd, which unwraps and wraps each of them in Python.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphshard
import graphshard.backend.entry
import many_parameters
from contenders import WEIGHT_SEED, copy_source
from graphshard.backend.dtensor_boundary import Boundary
from step_report import round_ratios
from step_time import choice_list, describe_machine, positive

NUM_RANKS = 8
NUM_WARM_STEPS = 5
REFERENCE = "fsdp2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    """A model and what runs its forward."""

    forward: Callable[[Tensor], Tensor]
    module: nn.Module

    def run_step(self, x: Tensor) -> None:
        """Forward and backward; gradients are dropped."""
        self.forward(x).backward()
        self.module.zero_grad(set_to_none=True)

    def time_step(self, x: Tensor) -> float:
        """CPU seconds of one step."""
        start = time.process_time()
        self.run_step(x)
        return time.process_time() - start


def _unsharded(model: nn.Module, mesh: DeviceMesh) -> Stepper:
    return Stepper(forward=torch.compile(model), module=model)


def _fsdp2(model: nn.Module, mesh: DeviceMesh, *, compiled: bool) -> Stepper:
    for block in model.blocks:
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Stepper(forward=model, module=model)


def _graphshard(model: nn.Module, mesh: DeviceMesh, *, compiled: bool = True) -> Stepper:
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)
    return Stepper(
        forward=torch.compile(model, backend="graphshard") if compiled else model, module=model
    )


def _stay_outside(gm: Any, inputs: Any) -> Boundary:
    """In the place of ``enter_boundary``: the compiled graph takes DTensors."""
    return Boundary(inputs=list(inputs))


CONTENDERS: dict[str, Callable[[nn.Module, DeviceMesh], Stepper]] = {
    "unsharded": _unsharded,
    "fsdp2": partial(_fsdp2, compiled=False),
    "fsdp2-compile": partial(_fsdp2, compiled=True),
    "graphshard-naive": _graphshard,
    "graphshard": _graphshard,
    "graphshard-uncompiled": partial(_graphshard, compiled=False),
}


def _model(source: ModuleType, options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    return source.ManyParameters(options.blocks, options.width)


def start_contender(
    name: str, options: argparse.Namespace, mesh: DeviceMesh, x: Tensor, folder: Path
) -> Stepper:
    """Build, compile and warm up one contender."""
    source = copy_source(name, folder, many_parameters.__file__)
    stepper = CONTENDERS[name](_model(source, options), mesh)
    boundary = _stay_outside if name == "graphshard-naive" else graphshard.backend.entry.enter_boundary
    start = time.perf_counter()
    with patch.object(graphshard.backend.entry, "enter_boundary", boundary):
        stepper.run_step(x)
    print(f"  {name}: first step {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    for _ in range(NUM_WARM_STEPS):
        stepper.run_step(x)
    return stepper


def take_turns(
    steppers: dict[str, Stepper], x: Tensor, rounds: int, steps: int
) -> dict[str, list[list[float]]]:
    """Seconds by contender, round and step; each round starts one further, an untimed step opens each turn."""
    names = list(steppers)
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            steppers[name].run_step(x)
            samples[name].append([steppers[name].time_step(x) for _ in range(steps)])
    return samples


def format_table(samples: dict[str, list[list[float]]], num_parameters: int) -> str:
    """A Markdown row per contender: median, per parameter, over the reference, quartiles of that ratio."""
    lines = [
        f"| contender | ms a step | us a parameter | ratio to {REFERENCE} | quartiles |",
        "|---|---|---|---|---|",
    ]
    for name, rounds in samples.items():
        median_s = statistics.median(step for turn in rounds for step in turn)
        low, middle, high = round_ratios(rounds, samples[REFERENCE])
        lines.append(
            f"| {name} | {median_s * 1e3:.2f} | {median_s / num_parameters * 1e6:.1f} "
            f"| {middle:.2f} | {low:.2f} - {high:.2f} |"
        )
    return "\n".join(lines)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; a bad option ends the program with a message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=positive, default=25, help="units, of 12 parameters each")
    parser.add_argument("--width", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--steps-per-round", type=positive, default=5)
    parser.add_argument("--contenders", type=choice_list(tuple(CONTENDERS)), default=tuple(CONTENDERS))
    options = parser.parse_args(argv)
    if REFERENCE not in options.contenders:
        parser.error(f"--contenders: needs {REFERENCE}, to which the others are compared")
    return options


def main(argv: Sequence[str]) -> None:
    """Run and print."""
    options = parse_options(argv)
    torch.set_num_threads(1)
    is_real = dist.is_torchelastic_launched()
    if is_real:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))
    x = many_parameters.random_input(options.width)
    with tempfile.TemporaryDirectory(prefix="host-time-") as folder:
        steppers = {
            name: start_contender(name, options, mesh, x, Path(folder)) for name in options.contenders
        }
    num_parameters = sum(1 for _ in next(iter(steppers.values())).module.parameters())
    samples = take_turns(steppers, x, options.rounds, options.steps_per_round)
    if dist.get_rank() == 0:
        print("  ".join(f"{name} {value}" for name, value in describe_machine().items()))
        kind = "gloo" if is_real else "fake"
        print(f"{num_parameters} parameters in {options.blocks} units, {kind} group of {num_ranks} ranks")
        print(format_table(samples, num_parameters), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
