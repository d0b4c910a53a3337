"""Train a small vision transformer, fully sharded, on the 8x8 digits that come with scikit-learn.

    torchrun --standalone --nproc-per-node 2 examples/train_vit.py

The position embedding's 17 rows do not split evenly over the ranks. The first steps run once more unsharded;
a failed check makes the exit code 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from distributed_setup import Ranks, UsageError, run_example, running_ranks
from graphshard import fully_shard
from unsharded_reference import Batch, StepResult, compare_steps, train_steps

WIDTH = 64
NUM_BLOCKS = 2
NUM_HEADS = 4
PATCH = 2
NUM_PATCHES = (8 // PATCH) ** 2
NUM_CLASSES = 10
NUM_STEPS = 100
NUM_COMPARED = 20
BATCH_SIZE = 120
NUM_TEST = 360
MAX_GRAD_NORM = 1.0
ACCURACY_ABOVE = 0.9


class VisionTransformer(nn.Module):
    """`model(images, labels)` -> (mean cross-entropy, logits [batch, 10]); images float [batch, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(PATCH * PATCH, WIDTH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position_embedding = nn.Parameter(torch.randn(NUM_PATCHES + 1, WIDTH) * 0.5)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        patches = (
            images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(-1, NUM_PATCHES, PATCH * PATCH)
        )
        x = self.patch_embedding(patches)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, 0]))
        return F.cross_entropy(logits, labels), logits


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of mean 0 and deviation 1, float32 [n, 8, 8], and labels int64 [n], in a fixed order."""

    train: Batch
    test: Batch


def read_digits() -> Digits:
    """The data set as tensors, split the same way everywhere."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order]
    labels = torch.tensor(data.target, dtype=torch.int64)[order]
    images = (images - images.mean()) / images.std()
    return Digits((images[:-NUM_TEST], labels[:-NUM_TEST]), (images[-NUM_TEST:], labels[-NUM_TEST:]))


def training_batches(train: Batch) -> Iterator[Batch]:
    """Batches of all ranks together, drawn from a seed; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    images, labels = train
    for _ in range(NUM_STEPS):
        rows = torch.randint(len(labels), (BATCH_SIZE,), generator=generator)
        yield images[rows], labels[rows]


def make_model() -> VisionTransformer:
    """The plain model, with the same weights on every rank."""
    torch.manual_seed(0)
    return VisionTransformer()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Made after sharding, so that its state is sharded too."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def train_sharded(ranks: Ranks, digits: Digits) -> tuple[list[StepResult], float]:
    """Shard, compile and train; return the steps and the accuracy on the test images."""
    model = make_model().to(ranks.device)
    for block in model.blocks:
        fully_shard(block, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh)
    compiled = torch.compile(model, backend="graphshard", fullgraph=True)
    results = train_steps(
        model,
        make_optimizer(model),
        lambda images, labels: compiled(images, labels)[0],
        (ranks.rows_of(batch) for batch in training_batches(digits.train)),
        MAX_GRAD_NORM,
        mean_over_ranks=ranks.mean_over_ranks,
    )
    return results, accuracy(model, ranks, digits.test)


def accuracy(model: nn.Module, ranks: Ranks, test: Batch) -> float:
    """Part of the test images that all ranks together get right.

    Runs the sharded model as it is: three batches are not worth compiling a forward without gradients.
    """
    num_right = 0
    with torch.no_grad():
        for images, labels in zip(*(part.split(BATCH_SIZE) for part in test), strict=True):
            images_here, labels_here = ranks.rows_of((images, labels))
            _, logits = model(images_here, labels_here)
            num_right += int((logits.argmax(dim=1) == labels_here).sum())
    return ranks.sum_over_ranks([num_right])[0] / NUM_TEST


def train_unsharded(ranks: Ranks, digits: Digits) -> list[StepResult]:
    """The first steps in this process alone, on the whole batches."""
    model = make_model().to(ranks.device)
    batches = (
        (images.to(ranks.device), labels.to(ranks.device))
        for images, labels in islice(training_batches(digits.train), NUM_COMPARED)
    )
    return train_steps(
        model, make_optimizer(model), lambda images, labels: model(images, labels)[0], batches, MAX_GRAD_NORM
    )


def check(sharded: list[StepResult], test_accuracy: float, unsharded: list[StepResult]) -> bool:
    """Print one line; True if the model learnt and its first steps were those of the unsharded model."""
    agrees, differences = compare_steps(sharded, unsharded)
    passed = agrees and test_accuracy > ACCURACY_ABOVE
    print(
        f"checked: test accuracy {test_accuracy:.3f}, loss {sharded[0].loss:.2f} -> {sharded[-1].loss:.2f}, "
        f"{differences}: {'ok' if passed else 'FAILED'}"
    )
    return passed


def main() -> bool:
    """Train sharded on all ranks, the first steps unsharded on rank 0; True if the checks hold."""
    with running_ranks() as ranks:
        if BATCH_SIZE % ranks.world_size:
            raise UsageError(f"{ranks.world_size} ranks: start a number that divides {BATCH_SIZE}")
        digits = read_digits()
        sharded, test_accuracy = train_sharded(ranks, digits)
        passed = check(sharded, test_accuracy, train_unsharded(ranks, digits)) if ranks.rank == 0 else True
        ranks.wait_for_all(timedelta(minutes=5))
        return passed


if __name__ == "__main__":
    run_example(main)
