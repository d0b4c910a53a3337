"""Models with complex parameters: captured as they train, inspected, swept."""

import pytest
import torch
from support.cost_cards import round_card
from torch import Tensor, nn

import graphshard
from graphshard.capture import ShardingRules, capture_step
from graphshard.ir import UNSHARD, UnshardCall
from graphshard.report import CATEGORIES, Report

CARD = round_card()

pytestmark = pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.linear(x)) @ self.weight.conj()
        return (spectrum[:, :5] * self.scale).abs().sum() + self.weight.imag.sum()


def _inspect(mesh: dict[str, int], batch: int = 4) -> Report:
    return graphshard.inspect(Filter(), [torch.randn(batch, 6)], mesh=mesh, hardware=CARD, units=["linear"])


def test_complex_parameters_are_gathered_as_reals():
    rules = ShardingRules(mesh={"shard": 4}, units=["linear"])
    captured = capture_step(Filter(), [torch.randn(4, 6)], rules=rules)
    calls = [UnshardCall(*node.args) for node in captured.joint.graph.find_nodes(op="call_function", target=UNSHARD)]
    shapes = {call.name: tuple(call.shape) for call in calls}
    assert shapes == {"linear.weight": (8, 6), "linear.bias": (8,), "weight": (8, 8, 2), "scale": (5, 2)}
    values = {call.name: call.shard.meta["val"] for call in calls}
    assert (values["weight"].dtype, tuple(values["weight"].shape)) == (torch.float32, (2, 8, 2))


def test_a_sharded_model_costs_what_the_plain_one_costs(fake_group):
    sharded = Filter()
    for module in (sharded.linear, sharded):
        graphshard.fully_shard(module, mesh=fake_group(2))
    found = graphshard.inspect(sharded, [torch.randn(4, 6)], hardware=CARD)
    expected = _inspect({"shard": 2})
    assert found.halves == expected.halves and found.memory == expected.memory


def test_parameters_count_with_both_parts():
    report = _inspect({"shard": 1})
    found = report.halves[-1].peak.num_bytes[CATEGORIES.index("parameters")]
    assert found == sum(param.nbytes for param in Filter().parameters())


def test_every_point_of_a_sweep_is_what_inspect_says():
    swept = graphshard.sweep(
        lambda batch: (Filter(), [torch.randn(batch, 6)], {}),
        meshes=[{"shard": 2}, {"shard": 4}], batches=[4, 8], hardware=CARD, units=["linear"],
    )  # fmt: skip
    for point in swept.points:
        report = _inspect(dict(point.mesh), point.batch)
        assert point.step_seconds == report.step_seconds
        assert point.peak_bytes == report.memory.peak_bytes
