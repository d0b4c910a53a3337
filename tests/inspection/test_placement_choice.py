"""placements="auto": what is compared, what is chosen, and what is said of the others."""

import csv
import importlib
import io
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from rich.console import Console
from support.inspected import CARD, TINY, inspect_linears, mean_square
from support.llama_example import llama_model
from support.ready_plan_models import NanoGpt, TimmVit
from support.searched_models import OneMlp, misnamed_on_meta
from support.small_models import MODELS, example_batch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import graphshard
from graphshard.capture import ExportedModel, export_model, num_repeated_blocks, with_blocks
from graphshard.errors import BudgetError, CaptureError
from graphshard.inspection import choose_placements, settings_of
from graphshard.inspection.placement_choice import choose
from graphshard.inspection.placement_search import PlacementSearch
from graphshard.parallel import Stated, choice_of, parameters_of, parts_of, state_placements, weight_groups
from graphshard.report import print_summary, report_schema, sweep_table
from graphshard.report.html import html_page
from graphshard.report.text import report_text

GIB = 2**30


def settings(**options):
    given = {"hardware": CARD, "placements": "auto", "units": ()}
    return settings_of("the test", given | options, options.pop("mesh", {"shard": 2, "tp": 2}))


def report_of(seconds: float, peak_bytes: int) -> SimpleNamespace:
    half = SimpleNamespace(name="forward", peak=SimpleNamespace(total_bytes=peak_bytes))
    return SimpleNamespace(step_seconds=seconds, exposed_seconds=seconds / 4, halves=[half])


def compared(numbers: dict[str, tuple[float, int]], **options):
    """The choice for a GPT of known predictions: by plan, seconds and bytes."""
    model = NanoGpt()
    plans = {name: state_placements(model, name) for name in ("gpt", "gpt-sequence")} | {"replicated": Stated()}
    asked = []

    def predict(asked_settings, module):
        assert asked_settings.budget_bytes is None and asked_settings.plan == "unit"
        (name,) = [name for name, each in plans.items() if each == asked_settings.rules.placements]
        asked.append(name)
        if name not in numbers:
            raise CaptureError(f"no {name}\nmore")
        return report_of(*numbers[name])

    found = choose(settings(**options), model, predict)
    assert asked == ["gpt", "gpt-sequence", "replicated"]
    return found, {one.name: one for one in found.candidates}


def test_the_fastest_that_fits_is_chosen():
    numbers = {"gpt": (2.0, 3 * GIB), "gpt-sequence": (1.0, 9 * GIB), "replicated": (4.0, 2 * GIB)}
    found, rows = compared(numbers, memory_budget="4GiB")
    assert found.placements == "gpt" and found.stated == state_placements(NanoGpt(), "gpt")
    assert found.candidates[0] is rows["gpt"] and rows["gpt"].is_chosen and rows["gpt"].verdict == "chosen"
    assert rows["gpt-sequence"].verdict == "needs more memory than 4 GiB" and rows["gpt-sequence"].step_seconds == 1.0
    assert rows["replicated"].verdict == "2 times the step of gpt" and rows["replicated"].exposed_seconds == 1.0
    assert rows["llama"].verdict.startswith("does not fit the model: no projections of attention to heads, no ")
    assert rows["llama"].step_seconds is None and set(rows) >= {"vit", "llama-sequence"}
    assert compared(numbers, memory_budget="9GiB")[0].placements == "gpt-sequence"


def test_the_least_memory_where_none_fits():
    numbers = {"gpt": (2.0, 3 * GIB), "gpt-sequence": (1.0, 9 * GIB), "replicated": (4.0, 2 * GIB)}
    found, rows = compared(numbers, memory_budget="1GiB")
    assert found.placements == Stated() and rows["replicated"].verdict == "chosen: the least memory, and none fits"


def test_a_candidate_that_cannot_run_says_why():
    found, rows = compared({"gpt": (2.0, GIB), "replicated": (2.0, 2 * GIB)}, memory_budget="4GiB")
    assert found.placements == "gpt" and rows["gpt-sequence"].verdict == "cannot run: no gpt-sequence"
    assert rows["replicated"].verdict == "more memory than gpt"
    with pytest.raises(CaptureError, match="no replicated"):
        compared({})


def test_equal_placements_are_predicted_once():
    asked = []
    found = choose(settings(), TimmVit(), lambda one, module: asked.append(one.rules.placements) or report_of(1.0, 1))
    rows = {one.name: one for one in found.candidates}
    assert len(asked) == 3 and rows["vit"].verdict == "the placements of gpt" and rows["gpt"].is_chosen


def test_blocks_are_left_out_of_a_copy():
    model, _, _ = llama_model.on_meta(replace(TINY, num_layers=5), 1, 8)
    assert num_repeated_blocks(model) == 5
    short = with_blocks(model, 2)
    assert [name for name, _ in short.layers.named_children()] == ["0", "1"] and len(model.layers) == 5
    assert short.layers[1].attention.query.weight is model.layers[1].attention.query.weight
    assert num_repeated_blocks(NanoGpt()) == 0
    experts = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2) for _ in range(8)]) for _ in range(4)])
    assert num_repeated_blocks(experts) == 4 and len(with_blocks(experts, 1)[0]) == 8
    two_stacks = nn.ModuleDict({"a": nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), "b": experts})
    assert num_repeated_blocks(two_stacks) == 4
    two_stacks["a"].append(nn.Linear(2, 2))
    assert num_repeated_blocks(two_stacks) == 0
    assert num_repeated_blocks(nn.Sequential(*[nn.Linear(2, width) for width in (2, 3, 4, 5)])) == 0


def inspect_auto(**config):
    model, args, kwargs = llama_model.on_meta(replace(TINY, **config), 2, 16)
    given = {"mesh": {"shard": 2, "tp": 2}, "hardware": CARD, "units": ["layers.*"]}
    report = graphshard.inspect(model, args, kwargs, placements="auto", **given)
    rows = {one.name: one for one in report.candidates}
    return report, rows, report.candidates[0]


@pytest.mark.slow
def test_a_search_is_never_worse_than_the_ready_plans_of_llama():
    _, rows, chosen = inspect_auto(num_layers=1)
    assert chosen.step_seconds <= min(rows["llama"].step_seconds, rows["llama-sequence"].step_seconds)


def test_a_search_finds_what_no_ready_plan_has():
    """Never worse than a ready plan; the report is that of what was found, and every rendering lists the others."""
    model, x = misnamed_on_meta()
    report = graphshard.inspect(model, [x], mesh={"shard": 2, "tp": 4}, placements="auto")
    rows = {one.name: one for one in report.candidates}
    predicted = {name: one.step_seconds for name, one in rows.items() if one.step_seconds is not None}
    assert predicted.keys() >= {"gpt", "gpt-sequence", "replicated"} and rows["vit"].verdict == "the placements of gpt"
    best = report.candidates[0]
    assert best.is_chosen and best.name.startswith("searched") and best.step_seconds == min(predicted.values())
    assert best.step_seconds < 0.95 * min(predicted["gpt"], predicted["gpt-sequence"])
    assert best.step_seconds == report.step_seconds and best.exposed_seconds == report.exposed_seconds
    assert best.peak_bytes == report.memory.peak_bytes and report.reshards
    cut = [line for line in report.settings["placements"] if "Shard" in line and line.startswith("blocks")]
    assert cut == [
        "blocks.*.attn.proj.weight: Shard(dim=0)", "blocks.*.attn.proj.bias: Shard(dim=0)",
        "blocks.*.attn.qkv.weight: Shard(dim=1)", "blocks.*.mlp.fc1.weight: Shard(dim=0)",
        "blocks.*.mlp.fc1.bias: Shard(dim=0)", "blocks.*.mlp.fc2.weight: Shard(dim=1)",
    ]  # fmt: skip
    assert "Searches priced" in report.notes[-1]
    jsonschema.validate(json.loads(json.dumps(report.to_dict())), report_schema())
    assert f"# candidate: {best.name}: step {1e3 * best.step_seconds:.3f} ms" in report_text(report)
    assert "# candidate: llama: does not fit the model" in report_text(report)
    assert f"<strong>{best.name}</strong>" in html_page(report) and "does not fit the model" in html_page(report)
    console = Console(width=200, file=io.StringIO())
    print_summary(report, console)
    assert "Placements that were compared" in console.file.getvalue()


def test_a_choice_that_the_passes_refuse_is_never_found(monkeypatch):
    def refuse(*_):
        raise CaptureError("no")

    model, x = misnamed_on_meta()
    settings = settings_of("the test", {"placements": "auto"}, {"shard": 2, "tp": 4})
    search = PlacementSearch(settings=settings, module=model, args=[x], kwargs={}, loss=None)
    monkeypatch.setattr("graphshard.capture.ExportedModel.on_one_rank", refuse)
    assert search.best(Stated()) == (Stated(), 17)


def test_a_search_on_one_of_many_blocks():
    model, x = misnamed_on_meta(num_blocks=5)
    settings = settings_of("the test", {"placements": "auto"}, {"shard": 2, "tp": 4})
    search = PlacementSearch(settings=settings, module=model, args=[x], kwargs={}, loss=None)
    found, num_trials = search.best(Stated())
    named = [{}, {}, {}, {}, {}]
    for name, cut in found.parameters.items():
        _, index, rest = name.split(".", 2)
        named[int(index)][rest] = cut
    assert named[0]["mlp.fc1.weight"] == Shard(0) and all(each == named[0] for each in named)
    assert 17 <= num_trials <= 81 and not found.inputs
    over = replace(search, most_trials=1)
    assert over.best(Stated()) == (Stated(), 1)


def test_weights_that_read_one_value_are_chosen_together():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.out = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
            self.other = nn.Linear(8, 2)

        def forward(self, x):
            return (self.out(self.gate(x).sigmoid() * self.up(x)).sum() + self.other(x).sum()).square()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Gated()])

        def forward(self, x):
            return self.layers[0](x)

    model = Model()
    settings = settings_of("the test", {"placements": "auto"}, {"shard": 2, "tp": 4})
    with ExitStack() as stack:
        exported = export_model(
            stack, model, [torch.empty(4, 8)], {}, rules=settings.rules, placed=None, loss=None, checkpoint=(),
            needs_loss=True, device_type="cpu",
        )  # fmt: skip
        inputs = {node.name: node for node in exported.outputs.primals}
        weights = {each.call.name: inputs[each.placeholder] for each in exported.plain_parameters(None)}
        groups = weight_groups(model, weights, 4)
    names = [[name.removeprefix("layers.*.") for name in group.names] for group in groups]
    assert names == [["gate.weight", "up.weight"], ["out.weight"], ["other.weight"]]
    assert groups[2].options == (Replicate(), Shard(1)), "two rows are not cut over four ranks"
    assert parts_of(groups) == [[0, 1, 2]]
    choice = (Shard(0), Shard(1), Replicate())
    assert parameters_of(model, groups, choice) == {
        "layers.0.gate.weight": Shard(0), "layers.0.gate.bias": Shard(0), "layers.0.up.weight": Shard(0),
        "layers.0.out.weight": Shard(1),
    }  # fmt: skip
    assert choice_of(groups, Stated(parameters={"layers.0.gate.weight": Shard(0)})) == (Shard(0), *2 * [Replicate()])


@pytest.mark.slow
def test_five_blocks_are_predicted_from_a_few():
    report, _, chosen = inspect_auto(num_layers=5)
    assert chosen.step_seconds == pytest.approx(report.step_seconds, rel=1e-6)
    assert chosen.peak_bytes == report.memory.peak_bytes
    assert "from one and from two of 5 equal blocks; the chosen ones from three and from four" in report.notes[-1]


def test_each_further_block_counts_the_same():
    """Where the model without its other blocks cannot be predicted, the whole model is."""
    model, _, _ = llama_model.on_meta(replace(TINY, num_layers=5), 1, 8)
    asked = []

    def predict(_, module):
        asked.append(len(module.layers))
        return report_of(1.0 + 0.5 * len(module.layers), 100 + 10 * len(module.layers))

    found = choose(settings(), model, predict)
    assert set(asked) == {1, 2, 3, 4} and asked.count(3) == 1
    assert found.candidates[0].step_seconds == 3.5 and found.candidates[0].peak_bytes == 150
    assert "one and from two of 5 equal blocks" in found.note

    def refuse_short(asked_settings, module):
        if len(module.layers) < 5:
            raise CaptureError("layers.3 is missing")
        return predict(asked_settings, module)

    found = choose(settings(), model, refuse_short)
    assert found.candidates[0].step_seconds == 3.5 and "blocks" not in found.note


def test_an_axis_of_one_rank_and_models_without_a_plan():
    one_rank = inspect_linears(mesh={"shard": 2, "tp": 1}, placements="auto")
    assert [one.name for one in one_rank.candidates] == ["replicated"] and not one_rank.placements
    report = inspect_linears(mesh={"shard": 2, "tp": 2}, placements="auto")
    assert report.candidates[0].name == "replicated" and report.candidates[0].is_chosen
    assert not report.reshards and {one.placement for one in report.placements} == {"Replicate"}


def test_a_budget_that_nothing_keeps_is_an_error():
    with pytest.raises(BudgetError, match=r"the leanest of the placements \(replicated\) needs"):
        choose_placements(
            MODELS["two_linears"](), [example_batch("two_linears")], mesh={"shard": 2, "tp": 2}, hardware=CARD,
            loss=mean_square, memory_budget="200B",
        )  # fmt: skip


def test_a_sweep_chooses_for_each_point(monkeypatch, tmp_path):
    """What inspect chooses there. Meshes with one size of the axis share captures and trials."""
    calls = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    def make(batch):
        with torch.device("meta"):
            return OneMlp(256), (torch.empty(batch, 1024, 256),), {}

    module = importlib.import_module("graphshard.inspection.placement_choice")
    monkeypatch.setattr(module, "capture_step", counted("captures", module.capture_step))
    monkeypatch.setattr(ExportedModel, "on_one_rank", counted("trials", ExportedModel.on_one_rank))
    meshes = [{"shard": 2, "tp": 1}, {"shard": 2, "tp": 4}, {"shard": 4, "tp": 4}]
    report = graphshard.inspect(*make(2), mesh=meshes[2], placements="auto", hardware=CARD)
    alone = calls.copy()
    calls.clear()
    stages = []
    found = graphshard.sweep(
        make, meshes=meshes, batches=[2], placements="auto", hardware=CARD,
        progress=lambda what, done, total: stages.append((what, done, total)),
    )  # fmt: skip
    assert alone["captures"] < calls["captures"] <= alone["captures"] + 3, "one of tp=1, and what a search finds"
    assert 0 < alone["trials"] <= calls["trials"] < 1.5 * alone["trials"]
    point = found.points[2]
    assert point.placements == report.candidates[0].name and point.step_seconds == report.step_seconds
    assert point.peak_bytes == report.memory.peak_bytes and point.mesh == report.mesh
    assert list(point.stated) == report.settings["placements"], "what a search found"
    assert found.points[0].placements == "replicated" and not found.points[0].stated and found.num_captures == 2
    assert stages[0] == ("choose placements for batch 2 on shard=2 x tp=1", 0, 3) and stages[-1][1] == 3
    assert found.settings["placements"] == "auto" and found.choice_seconds > 0
    found.to_csv(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        assert [row["placements"] for row in csv.DictReader(file)] == [one.placements for one in found.points]
    data = found.to_dict()["points"]
    assert [one["stated"] for one in data] == [list(one.stated) for one in found.points]
    console = Console(width=200, file=io.StringIO())
    console.print(sweep_table(found))
    assert "batch  placements" in console.file.getvalue() and point.placements in console.file.getvalue()
