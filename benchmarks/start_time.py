"""Host time until a model trains, by stage: graphshard against FSDP2 and FSDP1, uncompiled, each in fresh processes.

    python benchmarks/start_time.py
    python benchmarks/start_time.py --blocks 3 --rounds 10

A process stands for rank 0 of 8: a fake process group returns from collectives at once. It imports torch, then the
front end, shards a model of many small parameters, and trains it with Adam. Torch loads Dynamo when it first needs it:
FSDP2 in the first ``fully_shard``, FSDP1 in the optimizer, so compare sums of stages. Times are CPU time of the
process, since other work on the machine stretches the wall clock. Contenders take turns; the least of all rounds is
shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

CONTENDERS = ("fsdp2", "graphshard", "fsdp1", "graphshard-fsdp1")

#: What a ratio is taken to.
REFERENCES = {"graphshard": "fsdp2", "graphshard-fsdp1": "fsdp1"}

#: The last stage of a start; what follows is later work.
LAST_OF_START = "first step"


def _front_end(contender: str) -> Callable[..., Any]:
    """Imports the contender; the result shards a model over a mesh."""
    if contender == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    elif contender == "graphshard":
        from graphshard import fully_shard
    elif contender == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
    else:
        from graphshard import FullyShardedDataParallel as Wrapper
    if contender in ("fsdp2", "graphshard"):

        def shard(model: Any, mesh: Any) -> Any:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        return shard

    def wrap(model: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(model.blocks[0])})
        cpu = mesh.device_type
        return Wrapper(model, device_mesh=mesh, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True)

    return wrap


def stages(contender: str, num_blocks: int, width: int) -> Iterator[str]:
    """Does the work of a contender; yields the name of a stage at its end."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    yield "torch"
    shard = _front_end(contender)
    yield "import"
    import many_parameters

    x = many_parameters.random_input(width)
    model = shard(many_parameters.ManyParameters(num_blocks, width), mesh)
    yield "shard"
    optimizer = torch.optim.Adam(model.parameters())
    yield "optimizer"
    model(x).backward()
    yield LAST_OF_START
    optimizer.step()
    optimizer.zero_grad()
    yield "its optimizer step"
    for _ in range(10):
        model(x).backward()
        optimizer.zero_grad()
    yield "10 further steps"
    state = model.state_dict()
    yield "state dict"
    model.load_state_dict(state)
    yield "loading it"


def run_contender(contender: str, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of each stage, in this process."""
    found, before = {}, time.process_time()
    for stage in stages(contender, options.blocks, options.width):
        now = time.process_time()
        found[stage], before = 1e3 * (now - before), now
    return found


def in_fresh_process(contender: str, argv: Sequence[str]) -> dict[str, float]:
    """As :func:`run_contender`, in another process."""
    command = [sys.executable, __file__, *argv, "--worker", contender]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def least_of(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The least of each stage, and of the sum of those of a start after torch."""
    found = {stage: min(each[stage] for each in rounds) for stage in rounds[0]}
    names = list(found)
    start = names[1 : names.index(LAST_OF_START) + 1]
    return {**found, f"{start[0]} to {start[-1]}": min(sum(each[stage] for stage in start) for each in rounds)}


def format_table(results: dict[str, dict[str, float]]) -> str:
    """A Markdown row for each stage: milliseconds of each contender, with the ratio to its reference."""
    lines = ["| CPU ms | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for stage in next(iter(results.values())):
        cells = []
        for name, found in results.items():
            reference = results.get(REFERENCES.get(name, ""))
            ratio = f" ({found[stage] / reference[stage]:.2f})" if reference is not None else ""
            cells.append(f"{found[stage]:.1f}{ratio}")
        lines.append(f"| {stage} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; a bad option ends the program with a message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=10, help="units, of 12 parameters each")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if min(options.blocks, options.width, options.rounds) < 1:
        parser.error("--blocks, --width and --rounds must be at least 1")
    return options


def main(argv: Sequence[str]) -> None:
    """Run and print."""
    options = parse_options(argv)
    if options.worker is not None:
        print(json.dumps(run_contender(options.worker, options)))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for turn in range(options.rounds):
        first = turn % len(CONTENDERS)
        for name in CONTENDERS[first:] + CONTENDERS[:first]:
            rounds[name].append(in_fresh_process(name, argv))
    print(f"{options.blocks} units of 12 parameters, fake group of 8 ranks")
    print(format_table({name: least_of(found) for name, found in rounds.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
