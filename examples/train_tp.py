"""Train a small Llama with tensor parallelism on one mesh axis and fully sharded over the other.

    torchrun --standalone --nproc-per-node 4 examples/train_tp.py

The model is the plain one of llama_model.py. Placements by name turn it into one of two ranks of tensor
parallelism; the two groups of two ranks share the batch. The task: each token follows from the one before.
All steps run once more unsharded; a failed check makes the exit code 1.
"""

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import graphshard
from distributed_setup import Ranks, UsageError, run_example, running_ranks
from llama_model import Llama, LlamaConfig
from next_token_task import BATCH_SIZE, LOSS_BELOW, VOCABULARY, make_optimizer, training_batches
from unsharded_reference import Batch, StepResult, check_steps, train_steps

CONFIG = LlamaConfig(num_layers=2, width=64, hidden=128, num_heads=4, num_kv_heads=2, vocabulary=VOCABULARY)
TENSOR_RANKS = 2
MAX_GRAD_NORM = 1.0

#: Columns of what expands, rows of what contracts; the vocabulary of embedding and output.
PLACEMENTS = {
    "tokens.weight": Shard(0),
    "layers.*.attention.query.weight": Shard(0),
    "layers.*.attention.key.weight": Shard(0),
    "layers.*.attention.value.weight": Shard(0),
    "layers.*.attention.output.weight": Shard(1),
    "layers.*.feed_forward.gate.weight": Shard(0),
    "layers.*.feed_forward.up.weight": Shard(0),
    "layers.*.feed_forward.down.weight": Shard(1),
    "output.weight": Shard(0),
}


def make_model() -> Llama:
    """The plain model, with the same weights on every rank."""
    torch.manual_seed(0)
    return Llama(CONFIG)


def train_parallel(ranks: Ranks) -> list[StepResult]:
    """Place, shard, compile and train on a mesh of two axes."""
    num_batches = ranks.world_size // TENSOR_RANKS
    mesh = init_device_mesh(ranks.device.type, (num_batches, TENSOR_RANKS), mesh_dim_names=("dp", "tp"))
    model = graphshard.parallelize(make_model().to(ranks.device), mesh["tp"], PLACEMENTS)
    for layer in model.layers:
        graphshard.fully_shard(layer, mesh=mesh["dp"])
    graphshard.fully_shard(model, mesh=mesh["dp"])
    compiled = torch.compile(model, backend="graphshard", fullgraph=True)
    own = mesh["dp"].get_local_rank()

    def rows_of(batch: Batch) -> tuple[Tensor, ...]:
        return tuple(part.chunk(num_batches)[own].to(ranks.device) for part in batch)

    return train_steps(
        model,
        make_optimizer(model),
        compiled,
        map(rows_of, training_batches()),
        MAX_GRAD_NORM,
        mean_over_ranks=ranks.mean_over_ranks,
    )


def train_unsharded(ranks: Ranks) -> list[StepResult]:
    """The same steps in this process alone, on the whole batches."""
    model = make_model().to(ranks.device)
    batches = ((tokens.to(ranks.device), targets.to(ranks.device)) for tokens, targets in training_batches())
    return train_steps(model, make_optimizer(model), model, batches, MAX_GRAD_NORM)


def main() -> bool:
    """Train on all ranks, and unsharded on rank 0; True if the checks hold."""
    with running_ranks() as ranks:
        if ranks.world_size % TENSOR_RANKS or BATCH_SIZE % (ranks.world_size // TENSOR_RANKS):
            raise UsageError(f"{ranks.world_size} ranks: start 2, 4, 8 or 16")
        parallel = train_parallel(ranks)
        passed = check_steps(parallel, train_unsharded(ranks), LOSS_BELOW) if ranks.rank == 0 else True
        ranks.wait_for_all(timedelta(minutes=5))
        return passed


if __name__ == "__main__":
    run_example(main)
