"""Train a small Hugging Face Llama, fully sharded, without a change to the model.

    torchrun --standalone --nproc-per-node 2 examples/finetune_llama.py

The configuration is tiny and the weights random, so nothing is downloaded. It keeps what makes sharding
awkward: input and output embeddings are one tied parameter, and its 99 rows do not split evenly over the
ranks. The task is to continue x -> 5x + 7 (mod 99). The same steps then run unsharded; a failed check makes
the exit code 1.
"""

from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from distributed_setup import Ranks, UsageError, run_example, running_ranks
from graphshard import fully_shard
from unsharded_reference import Batch, LossFunction, StepResult, check_steps, train_steps

VOCABULARY = 99
NUM_STEPS = 40
BATCH_SIZE = 32
LENGTH = 32
MAX_GRAD_NORM = 1.0
LAST_LOSS_BELOW = 1.0


def make_model() -> LlamaForCausalLM:
    """The plain model, with the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Made after sharding, so that its state is sharded too."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_function(model: nn.Module) -> LossFunction:
    """Mean next-token loss of [batch, time] tokens under `model`, compiled or not."""

    def loss_of(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    return loss_of


def batches_of_all_ranks() -> Iterator[Batch]:
    """int64 [BATCH_SIZE, LENGTH] a step, the same on every rank: sequences of x -> 5x + 7 (mod 99)."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        columns = [torch.randint(VOCABULARY, (BATCH_SIZE,), generator=generator)]
        while len(columns) < LENGTH:
            columns.append((5 * columns[-1] + 7) % VOCABULARY)
        yield (torch.stack(columns, dim=1),)


def train_sharded(ranks: Ranks) -> list[StepResult]:
    """One unit per decoder layer, the rest in the root; then torch.compile."""
    model = make_model().to(ranks.device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    loss_of = loss_function(torch.compile(model, backend="graphshard", fullgraph=True))
    batches = (ranks.rows_of(batch) for batch in batches_of_all_ranks())
    return train_steps(
        model, make_optimizer(model), loss_of, batches, MAX_GRAD_NORM, mean_over_ranks=ranks.mean_over_ranks
    )


def train_unsharded(ranks: Ranks) -> list[StepResult]:
    """The same steps in this process alone, on the whole batches."""
    model = make_model().to(ranks.device)
    batches = ((tokens.to(ranks.device),) for (tokens,) in batches_of_all_ranks())
    return train_steps(model, make_optimizer(model), loss_function(model), batches, MAX_GRAD_NORM)


def main() -> bool:
    """Train sharded on all ranks, unsharded on rank 0; True if they agree."""
    with running_ranks() as ranks:
        if BATCH_SIZE % ranks.world_size:
            raise UsageError(f"{ranks.world_size} ranks: start a number that divides {BATCH_SIZE}")
        sharded = train_sharded(ranks)
        passed = check_steps(sharded, train_unsharded(ranks), LAST_LOSS_BELOW) if ranks.rank == 0 else True
        ranks.wait_for_all(timedelta(minutes=5))
        return passed


if __name__ == "__main__":
    run_example(main)
