"""Models whose forward writes to buffers or inputs, or has effects: captured as they train, inspected, swept."""

import pytest
import torch
from support.cost_cards import round_card
from torch import Tensor, nn

import graphshard
from graphshard.capture import ShardingRules, capture_step
from graphshard.capture import export_blocks as blocks_module
from graphshard.errors import CaptureError
from graphshard.ir import REDUCE_GRAD, ReduceGradCall, graph_text, output_values, writes_of
from graphshard.pipeline import joint_outputs
from graphshard.report import CATEGORIES, Report

pytestmark = pytest.mark.usefixtures("brief_plans")

CARD = round_card()


class Normalised(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu().sum()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.linear(x).sum()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x).sum()


class Remembers(nn.Module):
    """Autograd follows the write: the new value of the buffer leaves the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("memory", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.copy_(self.linear(x))
        return self.memory.square().sum()


class Quantised(nn.Module):
    """A codebook with counts, as vector-quantised models update them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("codes", torch.randn(5, 8))
        self.register_buffer("counts", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        nearest = torch.cdist(found, self.codes).argmin(1)
        with torch.no_grad():
            self.counts.index_add_(0, nearest, torch.ones(len(nearest)))
            self.codes[nearest] = found
        return (found - self.codes[nearest]).square().sum()


class Prints(nn.Module):
    """An ordered effect: a token is the first input of the graph, and the first output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.aten._print("step")
        return self.linear(x).sum()


class Inverts(nn.Module):
    """The check of the inverse is an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() + torch.linalg.inv(self.linear.weight).sum()


WRITTEN = {
    Normalised: ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"],
    Counted: ["num_calls"],
    Spectral: ["linear.parametrizations.weight.0._u", "linear.parametrizations.weight.0._v"],
    ChangesItsInput: ["x"],
    Quantised: ["codes", "counts"],
    Remembers: [],
    Prints: [],
    Inverts: [],
}


def _batch() -> Tensor:
    return torch.randn(4, 6)


def _inspect(model: nn.Module, **options) -> Report:
    given = {"mesh": {"shard": 4}, "hardware": CARD, "units": ["linear"]} | options
    return graphshard.inspect(model, [_batch()], **given)


@pytest.mark.parametrize("kind", list(WRITTEN))
def test_the_loss_is_what_the_model_returns_and_each_gradient_is_that_of_its_parameter(kind):
    captured = capture_step(kind(), [_batch()], rules=ShardingRules(mesh={"shard": 4}), needs_loss=True)
    outputs, values = joint_outputs(captured.joint.graph), output_values(captured.joint.graph)
    assert [values[index].meta["val"].shape for index in outputs.own_results] == [()]
    assert captured.num_results == outputs.num_results
    names = []
    for binding in captured.context.parameters:
        gradient = captured.context.gradient_of(binding, values)
        assert gradient.target is REDUCE_GRAD and ReduceGradCall(*gradient.args).name == binding.name
        names.append(binding.name)
    assert sorted(names) == sorted(name for name, _ in kind().named_parameters())
    written = {node.name for node in writes_of(captured.forward.graph).known if node.op == "placeholder"}
    assert len(written) == len(WRITTEN[kind])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", list(WRITTEN))
@pytest.mark.parametrize("plan", ["unit", "auto"])
def test_steps_are_inspected(kind, plan):
    report = _inspect(kind(), plan=plan)
    assert [half.name for half in report.halves] == ["forward", "backward", "optimizer"]
    served = {unit for half in report.halves for event in half.collectives for unit in event.unit.split(", ")}
    assert served == ({"linear", "root"} if kind is Normalised else {"linear"})


def test_buffers_that_are_written_add_their_bytes_and_no_communication():
    written, plain = _inspect(Normalised()), _inspect(Normalised(track_running_stats=False))
    for one, other in zip(written.halves, plain.halves, strict=True):
        assert [event.num_bytes for event in one.collectives] == [
            event.num_bytes for event in other.collectives
        ]
    index = CATEGORIES.index("inputs")
    bytes_of_buffers = sum(buffer.nbytes for buffer in Normalised().buffers())
    found, expected = (report.halves[-1].peak.num_bytes[index] for report in (written, plain))
    assert found == expected + bytes_of_buffers
    assert written.halves[0].seconds > plain.halves[0].seconds


@pytest.mark.parametrize("kind", [Normalised, pytest.param(Quantised, marks=pytest.mark.slow), Prints])
def test_models_are_swept(kind):
    swept = graphshard.sweep(
        lambda batch: (kind(), [torch.randn(batch, 6)], {}),
        meshes=[{"shard": 4}, {"shard": 8}], batches=[4, 8, 16], hardware=CARD,
    )  # fmt: skip
    assert len(swept.points) == 6 and all(point.fits for point in swept.points)


def test_formulas_of_a_model_that_is_normalised():
    found = graphshard.formulas(
        Normalised(), [torch.randn(64, 6)], dynamic={"batch": 0}, mesh={"shard": 4}, hardware=CARD
    )
    assert found.checked


@pytest.mark.parametrize("kind", [Normalised, pytest.param(Spectral, marks=pytest.mark.slow), Prints])
def test_sharded_models_and_exported_programs_cost_the_same(kind, fake_group):
    expected = _inspect(kind(), mesh={"shard": 2}, units=[])
    sharded = graphshard.fully_shard(kind(), mesh=fake_group(2))
    assert graphshard.inspect(sharded, [_batch()], hardware=CARD).halves == expected.halves
    exported = torch.export.export(kind(), (_batch(),))
    found = graphshard.inspect(exported, mesh={"shard": 2}, hardware=CARD)
    assert [half.num_nodes for half in found.halves] == [half.num_nodes for half in expected.halves]
    assert found.memory.peak_bytes == expected.memory.peak_bytes


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normalised() for _ in range(3))
        self.enter = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.enter(layer.norm(layer.linear(x)))
        return x.sum()


def test_repeated_blocks_that_write_are_those_of_a_plain_export(monkeypatch):
    rules = ShardingRules(mesh={"shard": 2}, units=["layers.*"])
    found = capture_step(_Repeated(), [_batch()], rules=rules)
    monkeypatch.setattr(blocks_module, "find_blocks", lambda traced: [])
    expected = capture_step(_Repeated(), [_batch()], rules=rules)
    for half in ("joint", "forward", "backward"):
        assert graph_text(getattr(found, half)) == graph_text(getattr(expected, half))


class _ReturnsItsBuffer(Counted):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.num_calls


class _ReturnsTwoLosses(Counted):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = super().forward(x)
        return loss, 2 * loss


def test_what_is_no_loss_is_told_without_the_buffers():
    with pytest.raises(CaptureError, match=r"what the model returns is no loss: f32\[\], f32\[\]; give"):
        _inspect(_ReturnsTwoLosses(), units=[])
    assert _inspect(_ReturnsTwoLosses(), loss=lambda results: results[0]).halves


def test_the_only_scalar_of_floats_is_the_loss():
    found = _inspect(_ReturnsItsBuffer(), units=[])
    assert found.halves and found.memory == _inspect(_ReturnsItsBuffer(), loss=lambda results: results[0]).memory
