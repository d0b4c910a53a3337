"""A compiled function that reads shards of parameters beside a forward that gathers them."""

import copy

import pytest
import torch
from support.implementations import shard_units
from support.parity import check_same_shards
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointing(nn.Module):
    """Its last parameters, which two ranks share unevenly, are read in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.last, torch.tanh(self.first(x)), use_reentrant=False)


def local_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + 0.1 * sum(p.to_local().square().sum() for p in model.parameters())


def whole_penalty(model: nn.Module, x: Tensor) -> Tensor:
    penalty = 0.1 * sum(p.square().sum().full_tensor() for p in model.parameters())
    return penalty + model(x).square().mean()


def measured_only(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        norm = sum(p.to_local().square().sum() for p in model.parameters())
    return model(x).square().mean() / (1 + norm)


def train_both(loss: str) -> None:
    step = {"local": local_penalty, "whole": whole_penalty, "measured": measured_only}[loss]
    torch.manual_seed(0)
    reference = Checkpointing()
    model = copy.deepcopy(reference)
    for one in (reference, model):
        # Uncompiled, a root that keeps its parameters would show them whole after the forward, as FSDP2 does.
        shard_units("sharded", one, [one.first], reshard_after_forward=True)
    compiled = torch.compile(step, backend="graphshard", fullgraph=True)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (reference, model)]
    for batch in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(batch))
        for one, run in ((reference, step), (model, compiled)):
            run(one, x).backward()
        check_same_shards(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_same_shards(reference, model)


@pytest.mark.parametrize("loss", ["local", "whole", "measured"])
def test_a_loss_that_reads_shards_compiles(run_on_gloo_ranks, loss):
    run_on_gloo_ranks(2, train_both, loss)
