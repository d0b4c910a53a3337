"""Seconds of the first call of a model, forward and backward, on two ranks of gloo: cold, and in a second process.

    python benchmarks/first_call.py
    python benchmarks/first_call.py --layers 4,8,16 --contenders unsharded,fsdp2-compile,graphshard --repeats 1

"cold" starts with empty caches of Inductor and of graphshard. "card" is the first call of "graphshard" on a machine
whose card is kept and whose plans are not: without the one measuring of a new machine. "warm" is the same in a second
process, which finds all caches. Medians of all repeats. Seconds of the processor of rank 0, compilers included, tell
the work apart from other load of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from contenders import Site, build_trainer
from gpt import GptConfig, random_batch

CONTENDERS = ("unsharded", "fsdp2-compile", "graphshard-blocks", "graphshard-rules", "graphshard")
NUM_RANKS = 2


def run_rank(rank: int, folder: str, name: str, layers: int) -> None:
    """The first call of one contender; rank 0 writes its seconds."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor{rank}"
    os.environ["GRAPHSHARD_CACHE"] = f"{folder}/graphshard{rank}"
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    config = GptConfig(num_layers=layers)
    with tempfile.TemporaryDirectory() as sources:
        site = Site(mesh=init_device_mesh("cpu", (NUM_RANKS,)), card=Path(folder, "none"))
        trainer = build_trainer(name, config, site, Path(sources))
        batch = random_batch(config, batch=4, seed=rank)
        dist.barrier()
        began, spent = time.perf_counter(), _cpu_seconds()
        trainer.run_forward_backward(*batch)
        seconds, spent = time.perf_counter() - began, _cpu_seconds() - spent
    if rank == 0:
        Path(folder, "seconds").write_text(f"{seconds} {spent}")
    dist.barrier()
    dist.destroy_process_group()


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def first_call(folder: Path, name: str, layers: int) -> tuple[float, float]:
    """Seconds, and seconds of rank 0's processor, of the first call in new processes."""
    (folder / "store").unlink(missing_ok=True)
    mp.spawn(run_rank, (str(folder), name, layers), NUM_RANKS)
    seconds, spent = (folder / "seconds").read_text().split()
    return float(seconds), float(spent)


def measure(name: str, layers: int) -> dict[str, tuple[float, float]]:
    """Cold, with a kept card, and warm."""
    folder = Path(tempfile.mkdtemp())
    try:
        found = {"cold": first_call(folder, name, layers)}
        if name == "graphshard":
            for rank in range(NUM_RANKS):
                shutil.rmtree(folder / f"inductor{rank}", ignore_errors=True)
                shutil.rmtree(folder / f"graphshard{rank}" / "plans", ignore_errors=True)
            found["card"] = first_call(folder, name, layers)
        found["warm"] = first_call(folder, name, layers)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,8")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; seconds (seconds of rank 0's processor)")
    print("| layers | contender | cold | card kept | warm |\n|---|---|---|---|---|")
    for layers in map(int, options.layers.split(",")):
        for name in options.contenders.split(","):
            runs = [measure(name, layers) for _ in range(options.repeats)]
            cells = [
                f"{statistics.median(run[kind][0] for run in runs):.1f} "
                f"({statistics.median(run[kind][1] for run in runs):.1f})"
                if kind in runs[0]
                else ""
                for kind in ("cold", "card", "warm")
            ]
            print(f"| {layers} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
