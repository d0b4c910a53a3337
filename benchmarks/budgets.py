"""What a step holds under `memory_budget`, counted by the allocator, and what it then takes.

    torchrun --standalone --nproc-per-node 2 benchmarks/budgets.py
    torchrun --standalone --nproc-per-node 2 benchmarks/budgets.py --layers 2 --width 128 --shares 0,0.5

The GPT of the step time benchmark with its loss in the same graph, compiled once for each budget: the smallest that is
kept (as the error about a budget of one byte names it), shares of the way from there to what a plan without a limit
takes, and that. Held are this rank's shards, its batch and, above them, the peak of forward and backward
(step_memory.py), on the rank that holds most, in the step that holds most and in the one that holds least; timed steps
take turns. The exit status is 1 if one holds more than its budget.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from contenders import copy_source
from gpt import GptConfig
from step_memory import NUM_COUNTED_STEPS, count_steps, local_bytes

CARD = "cpu-loopback"
BATCH = 4
NUM_WARM_STEPS = 2
LOSS_BYTES = 4  # the caller holds it while the backward runs; a budget is that of the two halves
MIB = 2**20


@dataclass(slots=True)
class Budgeted:
    """One compiled model: its budget in bytes, what is live in its plans, how many ops it computes again, its steps."""

    budget_bytes: int
    model: nn.Module
    forward: object
    dump: Path
    seconds: list[float] = field(default_factory=list)

    def step(self, tokens: Tensor) -> None:
        """A forward and a backward; no gradient is left."""
        self.forward(tokens).backward()
        self.model.zero_grad(set_to_none=True)

    def planned_bytes(self) -> int:
        """The larger peak of the two halves, and what of the budget is held beside that half."""
        found = []
        for path in self.dump.glob("graph*.plan.txt"):
            line = r"^peak .*?(\d+) bytes\)?, budget .*?(\d+) bytes"
            peak, budget = re.search(line, path.read_text(), re.MULTILINE).groups()
            found.append(int(peak) + self.budget_bytes - int(budget))
        return max(found)

    def num_recomputed(self) -> int:
        """Ops of the forward that the backward computes again."""
        (chosen,) = self.dump.glob("graph*.joint.choice.txt")
        found = re.search(r"^(\d+) ops of the forward", chosen.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0


class WithLoss(nn.Module):
    """The model and its loss, so that both are in one graph."""

    def __init__(self, model: nn.Module, loss: object) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.model(tokens), tokens)


def build(name: str, budget: int, config: GptConfig, mesh: dist.DeviceMesh, folder: Path) -> Budgeted:
    """A model sharded by blocks, to be compiled within a budget."""
    source = copy_source(name, folder)
    torch.manual_seed(0)
    model = source.Gpt(config)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh)
    whole = graphshard.fully_shard(WithLoss(model, source.next_token_loss), mesh=mesh)
    dump = folder / name
    dump.mkdir()
    options = {"hardware": CARD, "bucket": "auto", "memory_budget": budget, "dump": dump}
    forward = torch.compile(whole, backend="graphshard", fullgraph=True, options=options)
    return Budgeted(budget, whole, forward, dump)


def smallest_budget(config: GptConfig, mesh: dist.DeviceMesh, folder: Path, tokens: Tensor) -> int:
    """The budget that the error about one of a byte names."""
    try:
        build("refused", 1, config, mesh, folder).step(tokens)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        smallest = re.search(r"is [^(]*\(?(\d+) bytes", str(error))[1]
        return most_of_all_ranks(int(smallest))  # on the rank that plans, and others
    raise RuntimeError("a budget of one byte was kept")


def most_of_all_ranks(num_bytes: int) -> int:
    """The largest of what the ranks say."""
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, num_bytes)
    return max(found)


def run(options: argparse.Namespace, folder: Path) -> bool:
    """Prints the table on rank 0; whether all budgets were kept."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    config = GptConfig(num_layers=options.layers, width=options.width)
    tokens = torch.randint(config.vocab, (BATCH, config.context), generator=torch.Generator().manual_seed(0))
    smallest = smallest_budget(config, mesh, folder, tokens)
    free = build("free", 2**50, config, mesh, folder)
    free.step(tokens)
    most = most_of_all_ranks(free.planned_bytes())
    budgets = [smallest + round(share * (most - smallest)) for share in options.shares]
    subjects = [build(f"budget_{index}", budget, config, mesh, folder) for index, budget in enumerate(budgets)]
    subjects.append(free)
    for subject in subjects:
        for _ in range(NUM_WARM_STEPS):
            subject.step(tokens)
    for _ in range(options.rounds):
        for subject in subjects:
            dist.barrier()
            begin = time.perf_counter()
            subject.step(tokens)
            subject.seconds.append(time.perf_counter() - begin)
    lines, is_kept = [], True
    for subject in subjects:
        inputs = local_bytes(subject.model.parameters()) + local_bytes([tokens])
        peaks = [one.peak_bytes for one in count_steps(lambda each=subject: each.step(tokens), options.steps)]
        low, held = (most_of_all_ranks(inputs + one(peaks) - LOSS_BYTES) for one in (min, max))
        planned = most_of_all_ranks(subject.planned_bytes())
        is_kept &= held <= subject.budget_bytes
        ratio = statistics.median(one / other for one, other in zip(subject.seconds, free.seconds, strict=True))
        budget = "none" if subject is free else f"{subject.budget_bytes / MIB:.2f}"
        lines.append(
            f"{budget:>10} {planned / MIB:>12.2f} {low / MIB:>8.2f} {held / MIB:>9.2f} "
            f"{held / subject.budget_bytes:>10.3f} {1e3 * statistics.median(subject.seconds):>8.1f} {ratio:>8.2f} "
            f"{subject.num_recomputed():>10}"
        )
    if dist.get_rank() == 0:
        print(f"{options.layers} layers of width {options.width}, {dist.get_world_size()} ranks, card {CARD}")
        print("budget MiB  planned MiB   lowest  held MiB  of budget       ms  of free  recomputed")
        print(*lines, sep="\n", flush=True)
    dist.barrier()  # or a launcher, told by the exit status of another rank, stops this one first
    return is_kept


def main() -> None:
    """Parse, run, exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--shares", type=lambda text: [float(one) for one in text.split(",")], default=[0.0, 0.25, 0.5, 0.75],
        help="of the way from the smallest budget to what a plan without a limit takes, a comma apart",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=NUM_COUNTED_STEPS, help="to be counted, of each budget")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        with tempfile.TemporaryDirectory() as folder:
            is_kept = run(options, Path(folder))
    finally:
        dist.destroy_process_group()
    sys.exit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
