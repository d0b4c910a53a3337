"""Parameters with gather extensions in reports: the bytes that travel, and what cannot be captured."""

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from support.cost_cards import round_card
from support.inspected import mean_square
from support.low_precision import HeldFlat, Scaled
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.errors import ExtensionError, FormulaError, UnsupportedShardingError
from graphshard.report import CATEGORIES


def model(kind: type = Scaled, rows: int = 64) -> nn.Module:
    found = nn.Sequential(nn.Linear(32, rows, bias=False), nn.Tanh(), nn.Linear(rows, 32, bias=False))
    for layer in (found[0], found[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))
    return found


def report_of(module: nn.Module, **options: Any) -> Any:
    given = {"mesh": {"shard": 8}, "units": ["0", "2"], "hardware": round_card(), "loss": mean_square}
    return graphshard.inspect(module, [torch.ones(4, 32)], **(given | options))


def gathers(report: Any) -> list[tuple[str, str, int]]:
    return [
        (half.name, one.unit, one.num_bytes)
        for half in report.halves
        for one in half.collectives
        if one.kind == "all_gather"
    ]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_gathers_are_those_that_travel(dtype):
    report = report_of(model(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    codes, scales = 64 * 32, 2
    of_first, of_last = ("0", codes + 64 * scales), ("2", codes + 32 * scales)
    assert gathers(report) == [
        *(("forward", *one) for one in (of_first, of_last)),
        ("backward", *of_last),  # the first layer needs no gradient of its input
    ]
    plain = report_of(nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False)))
    reduced = [[(one.unit, one.num_bytes) for one in each.halves[1].collectives if one.kind == "reduce_scatter"]
               for each in (report, plain)]  # fmt: skip
    assert reduced[0] == reduced[1] == [("2", 4 * codes), ("0", 4 * codes)]
    assert report.model == plain.model
    # Two carriers of a gradient have one element each.
    assert report.memory.categories["parameters"] == plain.memory.categories["parameters"] + 8
    assert report.memory.categories["optimizer"] == plain.memory.categories["optimizer"]
    itemsize = 4 if dtype is None else 2
    most = max(point.num_bytes[CATEGORIES.index("gathered")] for point in report.halves[0].memory)
    assert codes * itemsize <= most < 2 * codes * itemsize, "the full weight, and the codes it is made of"


class WithTheMesh(Scaled):
    """The largest value of all ranks is the scale of all codes; takes all five arguments."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any) -> Any:
        assert mesh.size() == 8 and size == (64, 32) and stride == (32, 1) and type(module) is nn.Linear
        assert policy.param_dtype is None
        largest = funcol.all_reduce(self._data.abs().amax(), "max", mesh)
        return ((self._data / largest * 127).round().to(torch.int8),), largest

    def fsdp_post_all_gather(self, gathered: Any, largest: Any, dtype: Any, *, out: Any = None) -> Any:
        return gathered[0].to(dtype) * (largest / 127), gathered


def test_collectives_of_the_extension_are_priced():
    found = nn.Sequential(nn.Linear(32, 64, bias=False))
    found[0].weight = nn.Parameter(WithTheMesh(found[0].weight.detach().clone()))
    report = report_of(found, units=["0"])
    kinds = [(one.kind, one.group, one.num_bytes) for one in report.halves[0].collectives]
    assert kinds == [("all_reduce", "shard", 4), ("all_gather", "shard", 64 * 32)]
    assert all(one.seconds > 0 for one in report.halves[0].collectives)


def test_a_tied_weight_is_gathered_once_and_uneven_rows_are_padded():
    found = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))
    found[0].weight = found[2].weight = nn.Parameter(Scaled(torch.ones(32, 32)))
    forward = [one for one in gathers(report_of(found, units=[])) if one[0] == "forward"]
    assert forward == [("forward", "root", 32 * 32 + 2 * 32)]
    uneven = gathers(report_of(model(rows=60)))
    assert uneven[0] == ("forward", "0", 64 * 32 + 2 * 64)
    assert report_of(model(), mesh={"shard": 1}).memory.categories["parameters"] == 2 * 64 * 32 * 4 + 8


def test_a_sweep_captures_each_mesh():
    meshes = [{"shard": 2}, {"replicate": 2, "shard": 4}]
    found = graphshard.sweep(
        lambda batch: (model(), [torch.ones(batch, 32)], None), meshes=meshes, batches=[2, 4], units=["0", "2"],
        hardware=round_card(), loss=mean_square,
    )  # fmt: skip
    for point in found.points:
        if point.batch == 4:
            assert point.step_seconds == pytest.approx(report_of(model(), mesh=point.mesh).step_seconds)


class OnlyOneMethod(Scaled):
    fsdp_post_all_gather = property(doc="raises AttributeError")


class NoMethods(OnlyOneMethod):
    fsdp_pre_all_gather = property(doc="raises AttributeError")


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (HeldFlat, UnsupportedShardingError, "parameter 0.weight has an all-gather extension .* cannot be captured: "
         r"shape \(60, 32\) is cut unevenly"),
        (OnlyOneMethod, ExtensionError, "parameter 0.weight: OnlyOneMethod has fsdp_pre_all_gather only"),
        (NoMethods, UnsupportedShardingError, "parameter 0.weight is a NoMethods, which holds its data in other"),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused_by_name(kind, error, text):
    with pytest.raises(error, match=text):
        report_of(model(kind, rows=60))


def test_formulas_and_placements_are_refused():
    with pytest.raises(FormulaError, match=r"gather extensions .* inspect or sweep"):
        graphshard.formulas(model(), [torch.ones(4, 32)], dynamic={"batch": 0}, loss=mean_square)
    with pytest.raises(UnsupportedShardingError, match=r"placements: parameter.* 0.weight, 2.weight have a gather"):
        report_of(model(), mesh={"shard": 4, "tp": 2}, placements={"0.weight": torch.distributed.tensor.Shard(0)})
