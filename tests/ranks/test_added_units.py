"""Units that are added below the outermost one after it was sharded: adapters, further layers, another head."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, shard_units
from support.parity import make_adam
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.testing import assert_close


class Counting(nn.Sequential):
    """Its forward counts the parameters below it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (len(list(self.parameters())) / 10)


class Adapted(nn.Module):
    """A frozen linear with a trained path beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def build(kind: type[nn.Module]) -> nn.Module:
    return kind(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def adapt(model: nn.Module) -> list[nn.Module]:
    """Puts adapters around two layers; returns the modules of which each becomes a unit."""
    torch.manual_seed(7)
    for index in (0, 2):
        model[index] = Adapted(model[index])
    return [part for index in (0, 2) for part in (model[index].down, model[index].up)]


def train_adapters(implementation: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(42)
    reference = build(kind)
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model[0], model[2]])
    adapt(reference)
    for part in adapt(model):
        pick_fully_shard(implementation)(part)
    expected = dict(reference.named_parameters())
    assert list(dict(model.named_parameters())) == list(expected)
    forward = compile_if_asked(implementation, model)
    optimizers = [
        make_adam(param for param in each.parameters() if param.requires_grad) for each in (reference, model)
    ]
    for step in range(3):
        losses = [(reference(batch_of(rank, step)) - 1).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        loss = (forward(batch_of(dist.get_rank(), step)) - 1).square().mean()
        loss.backward()
        assert_close(loss.detach(), losses[dist.get_rank()].detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for each in (model, copy.deepcopy(model)):
        for name, param in each.named_parameters():
            assert_close(param.full_tensor(), expected[name], msg=lambda text, name=name: f"{name}: {text}")
    _, state = get_state_dict(model, optimizers[1])
    assert len(state["state"]) == len([param for param in model.parameters() if param.requires_grad]) == 6


@pytest.mark.parametrize("kind", [nn.Sequential, Counting])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_adapters_with_equal_names(run_on_gloo_ranks, implementation, kind):
    """Seen from their own units, all adapters are called alike."""
    run_on_gloo_ranks(2, train_adapters, implementation, kind)


def train_unsharded_parts(implementation: str) -> None:
    """A new head, and a layer that replaces one in a unit, without ``fully_shard``."""
    torch.manual_seed(42)
    model = build(nn.Sequential)
    ignored = model[2].bias
    shard_units(implementation, model, [model[0]], ignored_params={ignored})
    run = compile_if_asked(implementation, model)
    for step, (added, expected) in enumerate([(None, []), (nn.Linear(8, 3), ["4.weight", "4.bias"])]):
        if added is not None:
            model[4] = added
        optimizer = make_adam(model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for again in range(2):
                run(batch_of(dist.get_rank(), 2 * step + again)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        texts = [str(each.message) for each in caught if "call fully_shard on the modules" in str(each.message)]
        assert len(texts) == bool(expected), texts
        assert all(f"graphshard: {', '.join(expected)} came into the model" in text for text in texts)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_added_parameters_that_nobody_shards_are_told(run_on_gloo_ranks, implementation):
    """Once an optimizer; those of ``ignored_params`` are not."""
    run_on_gloo_ranks(2, train_unsharded_parts, implementation)
