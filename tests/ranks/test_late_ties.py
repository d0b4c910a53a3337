"""Parameters that are tied after sharding, or between two calls of ``fully_shard``."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, world_mesh
from support.parity import check_sharded_parity
from torch import Tensor, nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.second = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.hidden(self.embed(tokens)))
        return self.head(hidden).square().mean() + self.second(hidden).abs().mean()


def tie(model: Tied, how: str) -> None:
    if how == "deleted first":
        del model.head.weight
    if how == "written":  # what nn.Module does not see
        model.head._parameters["weight"] = model.embed._parameters["weight"]
    elif how == "loaded":
        state = dict(model.state_dict(keep_vars=True))
        model.load_state_dict(state | {"head.weight": state["embed.weight"]}, assign=True)
    else:
        model.head.weight = model.embed.weight
    if how == "three":
        model.second.weight = model.head.weight


def train(implementation: str, how: str, units: tuple[str, ...]) -> None:
    torch.manual_seed(42)
    reference = Tied()
    model = copy.deepcopy(reference)
    tie(reference, how)
    fully_shard, mesh = pick_fully_shard(implementation), world_mesh()
    for name in units:
        fully_shard(getattr(model, name), mesh=mesh)
    if how == "before the root":
        tie(model, how)
    fully_shard(model, mesh=mesh)
    if how == "while gathered":
        model.unshard()
    if how != "before the root":
        tie(model, how)
    model.reshard()
    assert model.head.weight is model.embed.weight and len(list(model.parameters())) == len(
        list(reference.parameters())
    )
    forward = compile_if_asked(implementation, model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (reference, model)]
    for step in range(2):
        for rank in range(dist.get_world_size()):
            tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * step + rank))
            (reference(tokens) / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                forward(tokens).backward()
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_sharded_parity(reference, model)


HOW = ["one unit", "three", "deleted first", "while gathered"]


@pytest.mark.compiles("three", "while gathered")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_ties_within_a_unit(run_on_gloo_ranks, implementation, how):
    run_on_gloo_ranks(2, train, implementation, how, ())


@pytest.mark.compiles("three", "written")
@pytest.mark.parametrize("how", ["three", "before the root", "written", "loaded"])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_ties_across_units(run_on_gloo_ranks, implementation, how):
    units = ("embed",) if how == "before the root" else ("embed", "head")
    run_on_gloo_ranks(2, train, implementation, how, units)


def tie_a_compiled_model() -> None:
    torch.manual_seed(42)
    reference = Tied()
    model = copy.deepcopy(reference)
    pick_fully_shard("compiled")(model, mesh=world_mesh())
    forward = torch.compile(model, backend="graphshard", fullgraph=True)
    tokens = torch.tensor([1, 5, 3, 1])
    forward(tokens)
    for one in (reference, model):
        one.head._parameters["weight"] = one.embed.weight
    for run in (reference, forward):
        run(tokens).backward()
    check_sharded_parity(reference, model)


def test_a_tie_after_the_first_compile(run_on_gloo_ranks):
    run_on_gloo_ranks(2, tie_a_compiled_model)
