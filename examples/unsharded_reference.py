"""Training steps, written once for the sharded model and for the unsharded one it is compared with.

The only difference between the two is who holds the parameters: a rank of the sharded model sees its rows of
a batch, the unsharded model sees the whole batch on rank 0. Gradient norms are compared next to losses, as
Adam divides the gradient's scale out: a gradient summed where it should be averaged would leave the losses as
they were.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]
LossFunction = Callable[..., Tensor]

# float32 sums run in another order when a batch is split over ranks and Inductor fuses kernels: 1e-7 a step.
# Adam divides by the gradient's size, so that can grow wherever a gradient is near zero. Wrong data, a missed
# reduction or a stale parameter shows as 1e-2 or more within a few steps.
LOSS_TOLERANCE = 1e-3
# A norm moves more from step to step than a loss; a sum in place of a mean is off by the number of ranks.
GRAD_NORM_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and gradient norm (before clipping) of one step, over the whole batch of all ranks."""

    loss: float
    grad_norm: float


def backward_and_clip(
    model: nn.Module, loss_of: LossFunction, batch: Batch, max_norm: float
) -> tuple[Tensor, Tensor]:
    """Leave clipped gradients in `model`; return this rank's loss and the gradient norm over all ranks."""
    loss = loss_of(*batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm


def train_step(
    model: nn.Module, optimizer: Optimizer, loss_of: LossFunction, batch: Batch, max_norm: float
) -> tuple[Tensor, Tensor]:
    """One optimizer step on `batch`. `loss_of(*batch)` calls the (compiled) model and returns a mean loss."""
    loss, norm = backward_and_clip(model, loss_of, batch, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def train_steps(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: LossFunction,
    batches: Iterable[Batch],
    max_norm: float,
    mean_over_ranks: Callable[[float], float] = float,
) -> list[StepResult]:
    """One step per batch; without `mean_over_ranks` the loss is that of this process's batch alone."""
    results = []
    for batch in batches:
        loss, norm = train_step(model, optimizer, loss_of, batch, max_norm)
        results.append(StepResult(mean_over_ranks(loss.item()), norm.item()))
    return results


def compare_steps(sharded: list[StepResult], unsharded: list[StepResult]) -> tuple[bool, str]:
    """Whether the first sharded steps were the unsharded ones, and the largest differences as text."""
    pairs = list(zip(sharded[: len(unsharded)], unsharded, strict=True))
    loss = max(_relative(a.loss, b.loss) for a, b in pairs)
    grad_norm = max(_relative(a.grad_norm, b.grad_norm) for a, b in pairs)
    text = (
        f"largest relative difference to the unsharded model in {len(unsharded)} steps "
        f"{loss:.1e} (loss, must be under {LOSS_TOLERANCE:.0e}), "
        f"{grad_norm:.1e} (gradient norm, must be under {GRAD_NORM_TOLERANCE:.0e})"
    )
    return loss < LOSS_TOLERANCE and grad_norm < GRAD_NORM_TOLERANCE, text


def check_steps(sharded: list[StepResult], unsharded: list[StepResult], loss_below: float) -> bool:
    """Print one line; True if the last loss is low enough, and every step was that of the unsharded model."""
    agrees, differences = compare_steps(sharded, unsharded)
    passed = agrees and sharded[-1].loss < loss_below
    print(
        f"checked: loss {sharded[0].loss:.2f} -> {sharded[-1].loss:.2f}, "
        f"{differences}: {'ok' if passed else 'FAILED'}"
    )
    return passed


def _relative(value: float, expected: float) -> float:
    """Relative difference; infinite for NaN, so that max() cannot overlook it."""
    difference = abs(value - expected) / abs(expected)
    return math.inf if math.isnan(difference) else difference
