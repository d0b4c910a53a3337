"""Train a small Llama in pipeline stages on one mesh axis, each stage fully sharded over the other.

    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py

The layers of llama_model.py are cut into two stages, which torch's Schedule1F1B runs on micro-batches; two ranks
hold each stage, and each stage is compiled and planned on its own. The task: each token follows from the one before.
All steps run once more in one piece and unsharded; a failed check makes the exit code 1.
"""

import math
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import graphshard
from distributed_setup import Ranks, UsageError, run_example, running_ranks
from llama_model import Llama, LlamaConfig
from next_token_task import LENGTH, LOSS_BELOW, VOCABULARY, make_optimizer, training_batches
from unsharded_reference import StepResult, check_steps, train_steps

CONFIG = LlamaConfig(num_layers=4, width=64, hidden=128, num_heads=4, num_kv_heads=2, vocabulary=VOCABULARY)
STAGES = 2
MICRO_BATCHES = 4


def make_model() -> Llama:
    """The model in one piece, with the same weights on every rank."""
    torch.manual_seed(0)
    return Llama(CONFIG)


class Stage(nn.Module):
    """Some of the layers, behind the embedding in the first stage and in front of the output in the last."""

    def __init__(self, model: Llama, index: int) -> None:
        super().__init__()
        per_stage = CONFIG.num_layers // STAGES
        self.tokens = model.tokens if index == 0 else nn.Identity()
        self.layers = model.layers[index * per_stage : (index + 1) * per_stage]
        self.head = nn.Sequential(model.norm, model.output) if index == STAGES - 1 else nn.Identity()
        half = CONFIG.width // CONFIG.num_heads // 2
        frequencies = CONFIG.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(LENGTH)[:, None] * frequencies
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of a micro-batch; the schedule divides by the number of micro-batches."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_stage(mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """This rank's stage, sharded over "dp"."""
    stage = Stage(make_model(), mesh["pp"].get_local_rank()).to(device)
    for layer in stage.layers:
        graphshard.fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    graphshard.fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    stage.compile(backend="graphshard")
    return stage


def train_stages(ranks: Ranks) -> list[StepResult]:
    """Each step runs all micro-batches through all stages; ranks without a part of a result give 0 to its sum."""
    num_batches = ranks.world_size // STAGES
    mesh = init_device_mesh(ranks.device.type, (STAGES, num_batches), mesh_dim_names=("pp", "dp"))
    index, own = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = make_stage(mesh, ranks.device)
    optimizer = make_optimizer(model)
    stage = PipelineStage(model, index, STAGES, ranks.device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    results = []
    for batch in training_batches():
        tokens, targets = (part.chunk(num_batches)[own].to(ranks.device) for part in batch)
        losses: list[Tensor] = []
        inputs = [tokens] if index == 0 else []
        ends = {"target": targets, "losses": losses} if index == STAGES - 1 else {}
        schedule.step(*inputs, **ends)
        loss = torch.stack(losses).mean().item() if losses else 0.0
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
        loss, squares = ranks.sum_over_ranks([loss, norm.item() ** 2])
        results.append(StepResult(loss / num_batches, math.sqrt(squares / num_batches)))
        optimizer.step()
        optimizer.zero_grad()
    return results


def train_unsharded(ranks: Ranks) -> list[StepResult]:
    """The same steps in this process alone, on the whole batches and without clipping."""
    model = make_model().to(ranks.device)
    batches = ((tokens.to(ranks.device), targets.to(ranks.device)) for tokens, targets in training_batches())
    return train_steps(model, make_optimizer(model), model, batches, math.inf)


def main() -> bool:
    """Train on all ranks, and unsharded on rank 0; True if the checks hold."""
    with running_ranks() as ranks:
        if ranks.world_size not in (2, 4, 8):  # with more, some have no row for each micro-batch
            raise UsageError(f"{ranks.world_size} ranks: start 2, 4 or 8")
        staged = train_stages(ranks)
        passed = check_steps(staged, train_unsharded(ranks), LOSS_BELOW) if ranks.rank == 0 else True
        ranks.wait_for_all(timedelta(minutes=5))
        return passed


if __name__ == "__main__":
    run_example(main)
