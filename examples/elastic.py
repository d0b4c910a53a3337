"""Hybrid sharding across machines that goes on when a machine is lost, and when one joins.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-id elastic --rdzv-endpoint FIRST-MACHINE:29400 \\
        examples/elastic.py --out /shared/elastic

Parameters are cut over the ranks of one machine and copied on each machine. torchrun restarts the ranks whenever the
set of machines changes. They load the last checkpoint, whatever the number of ranks that saved it. The batch of a step
belongs to all ranks together, so its loss does not depend on their number. At the end rank 0 compares all losses with
the unsharded model's, and the exit code is 1 if they differ.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from checkpoint_folder import CheckpointFolder
from distributed_setup import Ranks, run_example, running_ranks
from graphshard import fully_shard
from interruption import exit_with_launcher

ROWS, WIDTH = 24, 32  # 24 rows divide over 1, 2, 3, 4, 6 or 8 ranks
LEARNING_RATE = 0.05


def make_model() -> nn.Sequential:
    """Equal weights on all ranks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.square().mean(dim=1, keepdim=True)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return (output - target).square().mean()


def machines_by_ranks(ranks: Ranks) -> DeviceMesh:
    """A mesh (replicate, shard): the machines, and the ranks of one machine."""
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shape = (ranks.world_size // per_machine, per_machine)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def unsharded_losses(num_steps: int) -> list[float]:
    """What one process without sharding gets."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    for step in range(num_steps):
        x, y = batch_of(step)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> bool:
    """Trains from the last checkpoint to the last step; whether all losses are the unsharded ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/elastic"), help="on storage that all machines see")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step: time to lose a machine")
    options = parser.parse_args()
    exit_with_launcher()
    with running_ranks() as ranks:
        model = make_model().to(ranks.device)
        mesh = machines_by_ranks(ranks)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.compile(backend="graphshard")
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        checkpoints = CheckpointFolder(options.out / "checkpoints", ranks, {"steps": options.steps})
        log = options.out / "losses.jsonl"
        done = checkpoints.latest_step() or 0
        if done:
            checkpoints.load(done, model, optimizer)
        ranks.say(f"{ranks.world_size} ranks on {mesh['replicate'].size()} machines, from step {done}")
        for step in range(done, options.steps):
            x, y = ranks.rows_of(batch_of(step))
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = ranks.mean_over_ranks(loss.item())
            checkpoints.save(step + 1, model, optimizer)
            if ranks.rank == 0:
                with log.open("a") as file:
                    file.write(json.dumps({"step": step, "loss": mean, "ranks": ranks.world_size}) + "\n")
            time.sleep(options.pause)
        return bool(ranks.from_rank_0(lambda: check(log, options.steps)))


def check(log: Path, num_steps: int) -> bool:
    """Compares the losses in ``log``, of all runs, with the unsharded model's."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    expected = torch.tensor(unsharded_losses(num_steps))
    complete = {entry["step"] for entry in found} == set(range(num_steps))
    worst = max(abs(entry["loss"] - float(expected[entry["step"]])) for entry in found)
    passed = complete and worst < 1e-5
    worlds = sorted({entry["ranks"] for entry in found})
    print(f"{'ok' if passed else 'FAILED'}: {num_steps} steps on {worlds} ranks, losses differ by {worst:.1e} at most")
    return passed


if __name__ == "__main__":
    run_example(main)
