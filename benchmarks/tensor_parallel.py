"""Tensor parallelism on two ranks and a slow link: with compute that moves beside its collectives, and without.

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --rate 300mbit --layers 8

A small Llama, split over the ranks as torchtitan does it, in float32 with SGD, on gloo with one core a rank; both
ranks see one batch. A hardware card is measured on the link first. Contenders take turns, a few steps each:
"inductor", torch.compile of the split model, whose collectives stand where they are; "planned in order" and "planned",
this backend without and with compute that moves. Predicted milliseconds are the planner's, of forward and backward.
The exit status is 1 if losses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import graphshard
from llama_tensor_parallel import split
from shaped_link import LinkEnd, find_obstacle, shaped_link
from step_time import pick_cores, rank_environment
from step_worker import NUM_RANKS, join_group, measure_card

sys.path.append(str(Path(__file__).parents[1] / "examples"))
llama = importlib.import_module("llama_model")

CONTENDERS = ("inductor", "planned in order", "planned")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the link, each way; loopback for none")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="of the one sequence")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class Trainer:
    """One contender: a model of its own, and its steps."""

    def __init__(self, name: str, options: argparse.Namespace, card: Path) -> None:
        config = llama.LlamaConfig(
            num_layers=options.layers,
            width=options.width,
            hidden=3 * options.width,
            num_heads=8,
            num_kv_heads=4,
            vocabulary=512,
        )
        torch.manual_seed(0)
        model = llama.Llama(config)
        mesh = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("shard", "tp"))
        split(model, mesh["tp"])
        self.dump = options.folder / f"dump{options.rank}" / name.replace(" ", "_")
        if name != "inductor":
            for unit in (*model.layers, model):
                graphshard.fully_shard(unit, mesh=mesh["shard"])
        plan = {
            "hardware": str(card),
            "bucket": "auto",
            "memory_budget": "64GiB",
            "move_compute": name == "planned",
            "dump": str(self.dump),
        }
        chosen = {} if name == "inductor" else {"backend": "graphshard", "options": plan}
        torch.compiler.reset()
        self._forward = torch.compile(model, **chosen)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
        generator = torch.Generator().manual_seed(1)
        self._batch = torch.randint(512, (2, 1, options.tokens), generator=generator)

    def step(self) -> tuple[float, float]:
        """Seconds and loss."""
        start = time.perf_counter()
        with loss_parallel():
            loss = self._forward(*self._batch)
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start, float(loss.detach())

    def predicted_s(self) -> float | None:
        """Forward and backward, as planned."""
        plans = [path.read_text() for path in self.dump.glob("graph0.*.plan.txt")]
        found = [float(re.match(r"([\d.]+) ms predicted", plan)[1]) for plan in plans]  # type: ignore[index]
        return sum(found) / 1e3 if found else None


def run_rank(options: argparse.Namespace) -> None:
    """Measures everything on one rank; rank 0 writes what it found."""
    os.sched_setaffinity(0, {pick_cores()[options.rank]})
    torch.set_num_threads(1)
    join_group(options.folder, options.address, options.rank)
    card = options.folder / "card.json"
    measure_card(card, is_shaped=options.rate != "loopback")
    dist.barrier()
    trainers = {name: Trainer(name, options, card) for name in CONTENDERS}
    losses = {name: [trainer.step()[1] for _ in range(3)] for name, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(options.rounds):
        for place in range(len(CONTENDERS)):
            name = CONTENDERS[(turn + place) % len(CONTENDERS)]
            dist.barrier()
            trainers[name].step()
            seconds[name] += [trainers[name].step()[0] for _ in range(options.steps)]
    predicted = {name: trainer.predicted_s() for name, trainer in trainers.items()}
    dist.barrier()
    dist.destroy_process_group()
    if options.rank == 0:
        found = {"seconds": seconds, "losses": losses, "predicted": predicted}
        (options.folder / "found.json").write_text(json.dumps(found))


def start(
    rank: int, options: argparse.Namespace, folder: Path, end: LinkEnd | None, address: str
) -> subprocess.Popen:
    """One rank, inside its namespace when there is one."""
    given = [
        f"--{name}={getattr(options, name)}"
        for name in ("rate", "layers", "width", "tokens", "rounds", "steps")
    ]
    argv = [sys.executable, __file__, *given, f"--rank={rank}", f"--folder={folder}", f"--address={address}"]
    kernels = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled{rank}")}
    return subprocess.Popen(end.command(argv) if end else argv, env=rank_environment(end) | kernels)


def main() -> int:
    """Starts the ranks and prints the table."""
    options = parse()
    if options.rank is not None:
        run_rank(options)
        return 0
    is_shaped = options.rate != "loopback"
    if is_shaped and (obstacle := find_obstacle()):
        sys.exit(f"no link can be shaped: {obstacle}")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ends = stack.enter_context(shaped_link(options.rate)) if is_shaped else (None, None)
        address = ends[0].address if ends[0] else "127.0.0.1"
        ranks = [start(rank, options, folder, ends[rank], address) for rank in range(NUM_RANKS)]
        try:
            codes = [rank.wait(timeout=1200) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            return 1
        found = json.loads((folder / "found.json").read_text())
    medians = {name: statistics.median(each) for name, each in found["seconds"].items()}
    print(f"{'':18} step ms  of inductor's  predicted ms   (link {options.rate})")
    for name, median in medians.items():
        predicted = found["predicted"][name]
        shown = f"{1e3 * predicted:12.1f}" if predicted else f"{'':>12}"
        print(f"{name:18} {1e3 * median:7.1f} {median / medians['inductor']:14.2f} {shown}")
    first = found["losses"][CONTENDERS[0]]
    same = all(
        torch.allclose(torch.tensor(each), torch.tensor(first), rtol=1e-4)
        for each in found["losses"].values()
    )
    print("losses agree" if same else f"losses differ: {found['losses']}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
