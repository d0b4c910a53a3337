"""``graphshard sweep``: every point is what inspect says, with two captures for all batch sizes."""

import csv
import importlib
import json
import os
import re
import sys
from dataclasses import replace

import pytest
import torch
from support.cost_cards import ROUND_CARD, round_card
from support.factories import MODULE
from support.llama_example import llama_model
from support.small_models import MODELS
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.capture.capture_step import capture_step
from graphshard.capture.change_batch import numbers_of, step_between
from graphshard.capture.change_mesh import can_reshard, reshard_step
from graphshard.capture.rules import ShardingRules
from graphshard.cli.main import main
from graphshard.cli.sweep_command import parse_meshes, parse_numbers
from graphshard.errors import CaptureError, OptionError, ShardingError, UsageError
from graphshard.inspection import resized
from graphshard.ir.graph_text import graph_text
from graphshard.processes import process_context, start_early
from graphshard.report import CATEGORIES

pytestmark = pytest.mark.usefixtures("brief_plans")

#: The module; its package shows the function of the same name.
sweeping = importlib.import_module("graphshard.inspection.sweep")

CONFIG = llama_model.LlamaConfig(
    num_layers=2, width=72, hidden=100, num_heads=4, num_kv_heads=2, vocabulary=70
)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS = {"hardware": ROUND_CARD, "units": ["layers.*"], "mp_policy": POLICY, "micro_batches": 2}


def make(batch):
    return llama_model.on_meta(CONFIG, batch, 16)


def make_one_layer(batch):
    return llama_model.on_meta(replace(CONFIG, num_layers=1), batch, 16)


MESHES = [{"shard": 4}, {"shard": 1}, {"shard": 24}, {"replicate": 4, "shard": 8}]


@pytest.fixture(scope="module")
def swept():
    return sweeping.sweep(make_one_layer, meshes=MESHES, batches=[1, 3], **OPTIONS)


def test_every_point_is_what_inspect_says(swept):
    assert [(point.mesh, point.batch) for point in swept.points] == [
        (mesh, batch) for mesh in MESHES for batch in (1, 3)
    ]
    for point in swept.points:
        if (point.batch, point.num_ranks) not in {(1, 24), (3, 1), (3, 32)}:
            continue  # an inspection takes seconds
        report = graphshard.inspect(*make_one_layer(point.batch), mesh=point.mesh, **OPTIONS)
        assert point.step_seconds == report.step_seconds
        assert point.compute_seconds == report.compute_seconds
        assert point.exposed_seconds == report.exposed_seconds
        assert point.peak_bytes == report.memory.peak_bytes
        assert point.memory == report.memory.categories
        assert point.mfu == report.throughput.mfu
        assert point.tokens_per_second == report.throughput.tokens_per_second
        assert point.num_ranks == report.num_ranks
        assert point.samples_per_second == pytest.approx(point.tokens_per_second / 16)
        assert point.fits == report.memory.fits


def test_a_capture_for_each_batch_size(swept):
    """And one more where nothing is sharded: no gather is repeated there."""
    assert swept.num_captures == 4
    assert swept.model == "Llama" and swept.limit_bytes == ROUND_CARD.memory_bytes
    assert swept.settings["units"] == ["layers.*"]


def test_the_world_size_needs_no_capture(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["rules"].mesh)
        return capture_step(*args, **kwargs)

    monkeypatch.setattr(sweeping, "capture_step", counted)
    meshes = [{"shard": size} for size in (2, 8, 512)]
    small = {"hardware": ROUND_CARD, "loss": _mean_square}
    found = sweeping.sweep(_two_linears, meshes=meshes, batches=[2], **small)
    assert calls == [{"shard": 2}] and found.num_captures == 1
    assert [point.num_ranks for point in found.points] == [2, 8, 512]


def _mean_square(output):
    return output.square().mean()


def _two_linears(batch):
    return MODELS["two_linears"](), (torch.ones(batch, 4),), {}


def _capture(mesh):
    rules = ShardingRules(mesh=mesh, units=["layers.*"], mp_policy=POLICY)
    return capture_step(*make(2), rules=rules, device_type="cuda")


@pytest.fixture(scope="module")
def first():
    return _capture({"shard": 4})


@pytest.mark.parametrize("mesh", [{"shard": 3}, {"replicate": 2, "shard": 8}], ids=str)
def test_a_resharded_step_is_the_captured_one(mesh, first):
    texts = [graph_text(gm) for gm in (first.forward, first.backward)]
    ours, theirs = reshard_step(first, mesh), _capture(mesh)
    assert ours.context == theirs.context
    for half in ("forward", "backward"):
        assert graph_text(getattr(ours, half)) == graph_text(getattr(theirs, half))
    assert [graph_text(gm) for gm in (first.forward, first.backward)] == texts


def test_only_meshes_with_shards_are_alike():
    assert can_reshard({"shard": 2}, {"replicate": 2, "shard": 8})
    assert not can_reshard({"shard": 2}, {"shard": 1})
    assert not can_reshard({"shard": 1}, {"shard": 2})


def test_batches_between_the_ends_are_not_captured():
    meshes = [{"shard": 8}, {"shard": 1}]
    told = []
    found = sweeping.sweep(
        make_one_layer, meshes=meshes, batches=[2, 1, 4], progress=lambda *what: told.append(what), **OPTIONS
    )
    assert found.num_captures == 4 and found.between == (2,)  # two batch sizes, with and without shards
    assert [(point.batch, point.mesh) for point in found.points] == [
        (batch, mesh) for mesh in meshes for batch in (2, 1, 4)
    ]
    assert told[-1][1:] == (6, 6)
    for point in found.points[::3]:
        report = graphshard.inspect(*make_one_layer(2), mesh=point.mesh, **OPTIONS)
        assert (point.step_seconds, point.peak_bytes) == (report.step_seconds, report.memory.peak_bytes)
        assert point.memory == report.memory.categories
        assert point.mfu == report.throughput.mfu


class _Branches(torch.nn.Module):
    """Another graph from ``size`` samples on."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).square().mean() if x.shape[0] < self.size else self.linear(x).sin().mean()


def test_a_batch_between_ends_that_differ_is_captured():
    def make(batch):
        return _Branches(3), (torch.ones(batch, 4),), {}

    found = sweeping.sweep(make, meshes=[{"shard": 2}], batches=[1, 2, 4], hardware=ROUND_CARD)
    assert found.num_captures == 3 and found.between == ()
    report = graphshard.inspect(*make(2), mesh={"shard": 2}, hardware=ROUND_CARD)
    assert found.points[1].step_seconds == report.step_seconds


def _numbered(batch, make=make):
    model, args, kwargs = make(batch)
    step = capture_step(
        model, args, kwargs, rules=ShardingRules(mesh={"shard": 4}, units=["layers.*"], mp_policy=POLICY)
    )
    return step, numbers_of(step, model, (args, kwargs))


@pytest.fixture(scope="module")
def ends():
    return _numbered(1), _numbered(4)


@pytest.fixture(scope="module")
def middle():
    return _numbered(2)[0]


@pytest.mark.parametrize("end", [0, 1])
def test_a_step_between_two_is_the_captured_one(end, ends, middle):
    (_, low), (_, high) = ends
    model, *inputs = make(2)
    before = [graph_text(gm) for gm in (ends[end][0].joint, ends[end][0].forward, ends[end][0].backward)]
    between = step_between(ends[end][0], ends[end][1], model, inputs, low, high)
    for half in ("joint", "forward", "backward"):
        assert graph_text(getattr(between, half)) == graph_text(getattr(middle, half))
    assert between.context == middle.context
    assert [graph_text(gm) for gm in (ends[end][0].joint, ends[end][0].forward, ends[end][0].backward)] == before


@pytest.mark.parametrize("batch", [0, 5])
def test_a_step_outside_of_the_two_is_none(batch, ends):
    (step, low), (_, high) = ends
    model, *inputs = make(batch)
    assert step_between(step, low, model, inputs, low, high) is None


def test_numbers_that_are_not_whole_are_none(ends):
    (step, low), (_, high) = ends
    model, *inputs = make(2)
    odd = replace(high, numbers=tuple(number + 1 for number in high.numbers))
    assert step_between(step, low, model, inputs, low, odd) is None


def test_another_model_is_none(ends):
    (step, low), (_, high) = ends
    wider = replace(CONFIG, hidden=101)
    model, *inputs = llama_model.on_meta(wider, 2, 16)
    assert step_between(step, low, model, inputs, low, high) is None
    model, *_ = make(2)
    _, *others = llama_model.on_meta(CONFIG, 2, 17)
    assert step_between(step, low, model, others, low, high) is None


def test_other_structures_are_none(ends):
    (step, low), (_, high) = ends
    model, *inputs = make(2)
    assert step_between(step, low, model, inputs, low, replace(high, structure="another")) is None
    own = replace(low, structure="another")
    assert step_between(step, own, model, inputs, low, high) is None


def test_other_kinds_of_inputs_are_none(ends):
    (step, low), (_, high) = ends
    model, args, kwargs = make(2)
    longer = [value.int() for value in args]
    assert step_between(step, low, model, (longer, kwargs), low, high) is None


class _Squares(torch.nn.Module):
    """Samples against samples, the first score left out: numbers that are no linear function of the batch."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        n, features = x.shape[0], self.linear(x)
        scores = (features @ features.T).flatten()[1:].view(n - 1, n + 1)
        return scores[:, :-1].square().mean()


def test_numbers_that_shapes_contradict_are_captured():
    def make(batch):
        return _Squares(), (torch.ones(2 * batch, 4),), {}

    found = sweeping.sweep(make, meshes=[{"shard": 2}], batches=[2, 3, 4, 5], hardware=ROUND_CARD)
    assert found.between == () and found.num_captures == 4
    report = graphshard.inspect(*make(3), mesh={"shard": 2}, hardware=ROUND_CARD)
    assert found.points[1].peak_bytes == report.memory.peak_bytes


def test_all_batches_are_captured_if_asked_for():
    meshes = [{"shard": 2}]
    small = {"hardware": ROUND_CARD, "loss": _mean_square}
    found = sweeping.sweep(_two_linears, meshes=meshes, batches=[2, 3, 4], captures="all", **small)
    assert found.num_captures == 3 and found.between == ()


def test_batches_are_shared_out():
    assert sweeping._shared_out([1], 4) == ([1], [()])
    assert sweeping._shared_out([1, 2], 1) == ([1, 2], [(), ()])
    assert sweeping._shared_out([1, 2, 3, 4, 5], 1) == ([1, 5], [(2, 4), (3,)])
    assert sweeping._shared_out([1, 2, 3, 4, 5], 3) == ([1, 4, 5], [(2,), (3,), ()])


def test_a_budget_says_what_fits():
    card = round_card(memory_bytes=1)
    meshes = [{"shard": 2}]
    found = sweeping.sweep(_two_linears, meshes=meshes, batches=[2], hardware=card, loss=_mean_square)
    assert not found.points[0].fits
    needed = found.points[0].peak_bytes
    for budget, fits in ((needed, True), (needed - 1, False)):
        found = sweeping.sweep(
            _two_linears, meshes=meshes, batches=[2], hardware=card, loss=_mean_square, memory_budget=budget
        )
        assert found.limit_bytes == budget and found.points[0].fits == fits


def test_a_plan_by_cost_is_planned_for_each_mesh():
    small = {"hardware": ROUND_CARD, "loss": _mean_square, "units": ["first", "second"], "plan": "auto"}
    found = sweeping.sweep(_two_linears, meshes=[{"shard": 2}, {"shard": 8}], batches=[2], **small)
    for point in found.points:
        report = graphshard.inspect(*_two_linears(2), mesh=point.mesh, **small)
        assert (point.step_seconds, point.peak_bytes) == (report.step_seconds, report.memory.peak_bytes)


def test_points_are_planned_within_a_budget():
    """As by inspect, where a plan keeps it; else they are planned without it, and do not fit."""
    small = {"hardware": ROUND_CARD, "loss": _mean_square, "units": ["0", "2", "4", "6"], "plan": "auto"}

    def make(batch):
        with torch.device("meta"):
            layers = [layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Sigmoid())]
            return torch.nn.Sequential(*layers), (torch.ones(batch, 8),), {}

    free = graphshard.inspect(*make(512), mesh={"shard": 2}, **small)
    for share in (0.9, 0.01):
        budget = int(share * free.memory.peak_bytes)
        swept = sweeping.sweep(make, meshes=[{"shard": 2}], batches=[512], memory_budget=budget, **small)
        (point,) = swept.points
        expected = free
        if share > 0.5:
            expected = graphshard.inspect(*make(512), mesh={"shard": 2}, memory_budget=budget, **small)
        assert point.fits == (share > 0.5) and point.memory == expected.memory.categories
        assert point.step_seconds == expected.step_seconds


def test_inputs_are_resized_along_dim_0():
    def example():
        return MODELS["two_linears"](), [torch.ones(2, 4), 3.0], {"mask": torch.zeros(2, dtype=torch.bool)}

    _, args, kwargs = resized(example)(5)
    assert args[0].shape == (5, 4) and args[0].is_meta and args[1] == 3.0
    assert kwargs["mask"].shape == (5,) and kwargs["mask"].dtype == torch.bool


def test_inputs_inside_of_containers_are_resized():
    def example():
        return MODELS["two_linears"](), ({"x": torch.ones(2, 4)},), {"others": [torch.zeros(2)]}

    _, args, kwargs = resized(example)(5)
    assert args[0]["x"].shape == (5, 4) and kwargs["others"][0].shape == (5,)


@pytest.mark.parametrize(
    ("args", "shapes"),
    [
        ([torch.ones(2, 4), torch.ones(3, 4)], r"args\[0\] \[2, 4\], args\[1\] \[3, 4\]"),
        ([3.0], "no tensors"),
        ([torch.tensor(1.0)], r"args\[0\] \[\]"),
    ],
)
def test_inputs_that_cannot_be_resized(args, shapes):
    with pytest.raises(
        CaptureError, match=rf"dim 0 of the inputs \({shapes}\) is not one size; .* def factory\(batch\)"
    ):
        resized(lambda: (MODELS["two_linears"](), args, {}))(4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batches": []}, OptionError, "batches: nothing must be"),
        ({"batches": [0, 2, 1.5]}, OptionError, "batches: 0, 1.5 must be a whole number"),
        ({"meshes": []}, OptionError, "meshes: there must be one at least"),
        ({"captures": "some"}, OptionError, "captures='some': write 'ends' or 'all'"),
        ({"num_processes": 0}, OptionError, "num_processes: 0 must be"),
        ({"progres": None}, OptionError, "sweep has no option progres; known: hardware, tables"),
        ({"meshes": [{"shard": 8}, {"shard": 12}]}, ShardingError, "12 ranks do not divide into nodes of 8"),
    ],
    ids=str,
)
def test_options_that_cannot_be(changes, error, message):
    given = {"meshes": [{"shard": 8}], "batches": [2], "hardware": ROUND_CARD}
    with pytest.raises(error, match=message):
        sweeping.sweep(_two_linears, **(given | changes))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8..64", [8, 16, 32, 64]),
        ("1..8", [1, 2, 4, 8]),
        ("24..100", [24, 48, 96]),
        ("8..32:8", [8, 16, 24, 32]),
        ("1,2, 6", [1, 2, 6]),
        ("1..4,3,4", [1, 2, 4, 3]),
        ("5", [5]),
    ],
)
def test_numbers(text, numbers):
    assert parse_numbers("--batch", text) == numbers


@pytest.mark.parametrize("text", ["", "0", "8..4", "0..4", "8..", "a", "1..8:0", "-1", "1,,2"])
def test_numbers_that_cannot_be_read(text):
    with pytest.raises(UsageError, match=r"is none of 8, 8\.\.64 \(doubling\)"):
        parse_numbers("--batch", text)


def test_a_range_of_too_many_numbers_is_refused():
    assert len(parse_numbers("--batch", "1..10000:1")) == 10_000
    with pytest.raises(UsageError, match=r"--batch 1,1\.\.10001:1: '1\.\.10001:1' is more than 10000 numbers"):
        parse_numbers("--batch", "1,1..10001:1")
    with pytest.raises(UsageError, match="take larger steps"):
        parse_numbers("--batch", "1..99999999999999999999:1")


def test_meshes_are_all_combinations():
    assert parse_meshes(["shard=8..16"]) == [{"shard": 8}, {"shard": 16}]
    expected = [{"replicate": r, "shard": s} for r in (1, 2) for s in (8, 24)]
    assert parse_meshes(["replicate=1,2,shard=8,24"]) == expected
    assert parse_meshes(["replicate=1,2", "shard=8,24"]) == expected


HERE = (
    MODULE
    + """
def sized(batch):
    return Model(), (torch.ones(batch, 4),)

def fails_at_2(batch):
    if batch == 2:
        raise ValueError("no batch of 2")
    return Model(), (torch.ones(batch, 4),)

def unlike():
    return Model(), (torch.ones(2, 4), torch.ones(()))

def other(width):
    return Model(), (torch.ones(2, 4),)
"""
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "swept_factories.py").write_text(HERE)
    ROUND_CARD.save(tmp_path / "round.json")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("swept_factories", None)


GOOD = [
    "--hardware",
    "round.json",
    "--loss",
    "swept_factories:loss",
    "--mesh",
    "shard=2..8",
    "--batch",
    "2,3",
]


def test_everything_is_written(here, capsys):
    outputs = ["--csv", "out.csv", "--json", "out.json", "--plot", "out.png", "--processes", "1"]
    assert main(["sweep", "swept_factories:sized", *GOOD, *outputs]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # progress is for terminals
    assert printed.out.startswith("Model on round\n") and "6 points, 2 captures in " in printed.out
    assert printed.out.endswith("wrote out.csv\nwrote out.json\nwrote out.png\n")
    data = json.loads((here / "out.json").read_text())
    assert data["sweep_version"] == 1
    sizes = [(point["mesh"]["shard"], point["batch"]) for point in data["points"]]
    assert sizes == [(shard, batch) for shard in (2, 4, 8) for batch in (2, 3)]
    assert all(0 < point["exposed_share"] < 1 for point in data["points"])
    with (here / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["shard"]), int(row["batch"])) for row in rows] == sizes
    for row, point in zip(rows, data["points"], strict=True):
        assert float(row["step_seconds"]) == point["step_seconds"]
        assert sum(int(row[f"{name}_bytes"]) for name in CATEGORIES) == int(row["peak_bytes"])
    assert (here / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_shows_what_is_done_and_how_much_is_left(here, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--hardware", "round.json", "--loss", "swept_factories:loss", "--processes", "1"]
    assert main(["sweep", "swept_factories:sized", *words, "--mesh", "shard=2,4", "--batch", "2"]) == 0
    printed = capsys.readouterr().err
    assert "2/2" in printed and re.search(r"\d:\d\d:\d\d.*left.*done", printed)


@pytest.mark.slow
def test_processes_give_the_same(here, capsys):
    tables = []
    for factory, processes in (("sized", "2"), ("short", "1")):  # the second is resized
        arguments = [*GOOD, "--batch", "2,3,4", "--processes", processes, "--json", "out.json"]
        assert main(["sweep", f"swept_factories:{factory}", *arguments]) == 0
        tables.append(json.loads((here / "out.json").read_text())["points"])
    assert capsys.readouterr().err == ""
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_processes_choose_the_same_placements(here, capsys):
    found = []
    for processes in ("2", "1"):
        arguments = [*GOOD[:-4], "--mesh", "shard=2,4", "--mesh", "tp=2", "--batch", "2,3", "--placements", "auto"]
        arguments += ["--processes", processes, "--json", "out.json"]
        assert main(["sweep", "swept_factories:sized", *arguments]) == 0
        found.append(json.loads((here / "out.json").read_text())["points"])
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.count("placements chosen for each point: ") == 2
    assert found[0] == found[1] and len(found[0]) == 4
    assert all(point["placements"] and point["mesh"]["tp"] == 2 for point in found[0])


def test_a_ready_plan_by_name(here, capsys):
    """The points of `inspect` with the plan."""
    (here / "named_factories.py").write_text(
        "import torch\nfrom support.searched_models import Misnamed\n\n"
        "def sized(batch):\n    with torch.device('meta'):\n        return Misnamed(), (torch.empty(batch, 3, 8),)\n"
    )
    words = ["--hardware", "round.json", "--mesh", "shard=2", "--mesh", "tp=2", "--placements", "gpt"]
    outputs = ["--batch", "2", "--processes", "1", "--json", "out.json"]
    assert main(["sweep", "named_factories:sized", *words, *outputs]) == 0
    (point,) = json.loads((here / "out.json").read_text())["points"]
    model, args = importlib.import_module("named_factories").sized(2)
    sys.modules.pop("named_factories")
    options = {"mesh": {"shard": 2, "tp": 2}, "hardware": ROUND_CARD, "placements": "gpt"}
    report = graphshard.inspect(model, args, **options)
    assert report.reshards and point["step_seconds"] == report.step_seconds
    assert point["peak_bytes"] == report.memory.peak_bytes and "Misnamed on round" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["unlike"],
            "the batch cannot be resized: dim 0 of the inputs (args[0] [2, 4], args[1] []) is not one size",
        ),
        (["other"], "swept_factories:other needs width: a factory takes batch=N, or nothing"),
        (["sized", "--batch", "8..2"], "--batch 8..2: '8..2' is none of 8, 8..64"),
        (["sized", "--mesh", "8..16"], "--mesh 8..16: write AXIS=NUMBERS"),
        (["sized", "--mesh", "shard=2", "--mesh", "shard=4"], "--mesh names the axis 'shard' twice"),
        (["sized", "--mesh", "shard=x"], "--mesh shard x: 'x' is none of"),
        (["sized", "--loss", "swept_factories:missing"], "has no function 'missing'"),
        (["sized", "--plot", "nowhere/out.png"], "--plot nowhere/out.png: its folder does not exist"),
        (["sized", "--processes", "0"], "num_processes: 0 must be"),
        (["fails"], "swept_factories:fails raised KeyError"),
        (["breaks"], "the model cannot be captured as one graph"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(here, capsys, arguments, complaint):
    factory, *rest = arguments
    given = ["--hardware", "round.json", "--processes", "1", *rest]
    assert main(["sweep", f"swept_factories:{factory}", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = [line for line in printed.err.splitlines() if line.startswith("graphshard sweep: ")]
    assert len(last) == 1 and complaint in last[0] and "Traceback" not in printed.err


@pytest.mark.slow
def test_a_mistake_in_another_process(here, capsys):
    """The error comes back as it was."""
    assert (
        main(
            [
                "sweep",
                "swept_factories:breaks",
                "--hardware",
                "round.json",
                "--processes",
                "2",
                "--batch",
                "2,3",
            ]
        )
        == 2
    )
    assert "the model cannot be captured as one graph" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["2", "3"])
def test_a_mistake_in_one_process_ends_the_others(here, capsys, processes):
    """They wait for its capture, and its error is the one that is shown."""
    arguments = ["sweep", "swept_factories:fails_at_2", *GOOD, "--batch", "2..7:1", "--processes", processes]
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "no batch of 2" in printed and "another process" not in printed


def test_a_kind_of_picture_that_matplotlib_does_not_know(swept, tmp_path):
    from graphshard.report.sweep_views import sweep_plot

    with pytest.raises(UsageError, match=r"a plot cannot be written to .*out\.xyz"):
        sweep_plot(swept, tmp_path / "out.xyz")


def test_each_size_of_another_axis_has_a_line(swept, monkeypatch):
    from graphshard.report.sweep_views import sweep_plot

    pytest.importorskip("matplotlib")
    points = [
        replace(swept.points[0], mesh={"shard": size, "tp": tp}, num_ranks=size * tp)
        for size in (2, 4)
        for tp in (1, 2)
    ]
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    sweep_plot(replace(swept, points=tuple(points)), "out.png")
    lines = [line.get_label() for line in drawn[0].axes[0].get_lines()]
    assert [label for label in lines if not label.startswith("_")] == ["batch 1", "batch 1, tp=2"]


def test_a_plot_without_matplotlib(swept, tmp_path, monkeypatch):
    from graphshard.report.sweep_views import sweep_plot

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="a plot needs matplotlib: pip install"):
        sweep_plot(swept, tmp_path / "out.png")


def test_points_without_tokens_count_samples(tmp_path):
    from graphshard.report.sweep_views import rate_of, sweep_plot, sweep_table

    found = sweeping.sweep(
        _two_linears, meshes=[{"shard": 2}], batches=[2], hardware=ROUND_CARD, loss=_mean_square
    )
    (point,) = found.points
    assert rate_of(point) == point.samples_per_second == 4 / point.step_seconds
    assert [column.header for column in sweep_table(found).columns][6] == "samples/s"
    sweep_plot(replace(found, points=(point, replace(point, fits=False))), tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_processes_get_the_environment_of_now(here, monkeypatch):
    """A fork server has that of its own start."""
    kept = dict(os.environ)
    monkeypatch.setenv("SWEPT_SIZE", "3")
    job = sweeping._Job(make=_fails, loss=None, batch=1, others=(), has_others=False, ends=(1, 1), settings=[])
    numbers = {}
    try:
        with pytest.raises(KeyError, match="large"):
            sweeping._work_elsewhere(job, {**kept, "SWEPT_SIZE": "large"}, None, numbers)
    finally:
        os.environ.update(kept)
    assert numbers == {sweeping._FAILED: None}


def _fails(batch):
    raise KeyError(os.environ["SWEPT_SIZE"])


def test_processes_start_from_one_that_has_imported(monkeypatch):
    started = []
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: started.append(True))
    assert process_context().get_start_method() == "forkserver"
    start_early()
    assert started == [True]
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    assert process_context().get_start_method() == "spawn"
    start_early()
    assert started == [True]
