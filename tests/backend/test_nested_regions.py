"""Regions that torch.compile compiles once (``nested_compile_region``) are parts of the one graph that is planned."""

import pytest
import torch
from support.torch_versions import NEEDS_REGIONS, NEEDS_SHARDED_REGIONS
from torch import nn

import graphshard

pytestmark = [
    NEEDS_REGIONS,
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@torch.compiler.nested_compile_region
def bend(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    @torch.compiler.nested_compile_region
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + bend(self.inner(bend(x)))


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def gradients(run, model) -> list[torch.Tensor]:
    run(torch.linspace(-1, 1, 24).view(4, 6)).square().sum().backward()
    return [getattr(p.grad, "to_local", lambda p=p: p.grad)().clone() for p in model.parameters()]


def shard(model, mesh) -> None:
    for block in model:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)


@NEEDS_SHARDED_REGIONS
def test_at_one_rank_where_bodies_are_shared_gradients_are_those_of_the_model(fake_group):
    plain = stack()
    expected = gradients(plain, plain)
    model = stack()
    shard(model, fake_group(1))
    compiled = torch.compile(model, backend="graphshard", options={"hardware": None}, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, model), expected)


@NEEDS_SHARDED_REGIONS
def test_a_region_without_parameters_is_inlined_for_all_its_calls(fake_group, tmp_path):
    model = stack()
    shard(model, fake_group(2))
    options = {"hardware": None, "dump": str(tmp_path)}
    gradients(torch.compile(model, backend="graphshard", options=options, fullgraph=True), model)
    text = (tmp_path / "graph0.joint.0-captured.txt").read_text()
    assert text.count(" = sin(") == 6 and text.count(" = unshard(") == 12 and "invoke_subgraph" not in text


def test_inspect_sees_the_ops_of_regions():
    report = graphshard.inspect(
        stack(), [torch.zeros(4, 6)], mesh={"shard": 2}, units=["*"], hardware="cpu-loopback", loss=torch.sum
    )
    assert [half.name for half in report.halves] == ["forward", "backward", "optimizer"]
    gathered = [each for each in report.halves[0].collectives if each.kind == "all_gather"]
    assert sum(each.parameters for each in gathered) == 12 and {each.unit for each in gathered} == {"0", "1", "2"}
