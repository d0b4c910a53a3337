"""``graphshard inspect``: what it prints and writes, and one line with exit status 2 for every mistake."""

import importlib
import json
import re
import sys

import jsonschema
import pytest
import torch
from support.cost_cards import ROUND_CARD
from support.factories import MODULE

import graphshard
from graphshard.cli.inspect_command import parse_mesh
from graphshard.cli.main import main
from graphshard.errors import UsageError
from graphshard.report import report_schema
from graphshard.report.formulas import formulas_text


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of factories and a card with round numbers."""
    (tmp_path / "factories.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\ndef make(): pass\n")
    ROUND_CARD.save(tmp_path / "round.json")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("factories", "broken"):
        sys.modules.pop(name, None)


PLACED = ["factories:make", "--mesh", "shard=2,tp=2", "--placements"]
GOOD = ["inspect", "factories:make", "--hardware", "round.json", "--loss", "factories:loss", "--mesh", "shard=4"]


def test_everything_is_written(here, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    outputs = ["--html", "report.html", "--text", "out.txt", "--trace", "trace.json", "--json", "report.json"]
    assert main([*GOOD, "--unit", "first", "--unit", "second", "--micro-batches", "2", *outputs]) == 0
    printed = capsys.readouterr()
    assert "Model, 76 parameters, shard=4, round" in printed.out
    for title in ("Time", "Memory of a rank at its peak", "Collectives of a step", "Costliest exposures"):
        assert f"\n{title}" in printed.out
    assert printed.out.endswith("wrote report.html\nwrote out.txt\nwrote trace.json\nwrote report.json\n")
    stages = re.findall(r"^ +\d+\.\d s  (.+)$", printed.err, re.MULTILINE)
    assert stages[:2] == ["import the model, then capture", "capture, then forward: passes"]
    assert stages[-2:] == ["write, then done", "done"] and all(", then " in stage for stage in stages[:-1])
    data = json.loads((here / "report.json").read_text())
    jsonschema.validate(data, report_schema())
    assert data["settings"]["units"] == ["first", "second"] and data["settings"]["micro_batches"] == 2
    assert (here / "out.txt").read_text().startswith("# joint: captured")
    assert (here / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((here / "trace.json").read_text())["traceEvents"]


def test_repeated_blocks_are_folded_or_written_in_full(here, capsys):
    outputs = ["--unit", "layers.*", "--text", "out.txt"]
    lengths = []
    for words in ([], ["--all-blocks"]):
        assert main([*GOOD[:1], "factories:deep", *GOOD[2:], *outputs, *words]) == 0
        text = (here / "out.txt").read_text()
        lengths.append(text.count("\n"))
        assert ("# 5 more blocks of " in text) is (not words) and ("# text unchanged" in text) is (not words)
    assert lengths[1] > 2 * lengths[0]
    capsys.readouterr()


def test_placements_from_a_dict(here, capsys):
    outputs = ["--json", "report.json", "--html", "report.html"]
    mesh = ["--mesh", "shard=2,tp=2", "--placements", "factories:placements"]
    assert main([*GOOD[:-2], *mesh, *outputs]) == 0
    assert "Reshards over tp of a step: " in capsys.readouterr().out
    data = json.loads((here / "report.json").read_text())
    assert [one["placement"] for one in data["placements"]] == ["Shard(0)", "Shard(0)", "Shard(1)", "Replicate"]
    assert "Placements on tp=2" in (here / "report.html").read_text()


@pytest.mark.slow
def test_formulas_with_a_ready_plan(here, capsys):
    """What Python's `formulas` gives; the further axis stays as it is. Large batches have other reshards."""
    (here / "named_factories.py").write_text(
        "import torch\nfrom support.searched_models import Misnamed\n\n"
        "def make():\n    with torch.device('meta'):\n        return Misnamed(), (torch.empty(4, 3, 8),)\n"
    )
    words = ["--hardware", "round.json", "--mesh", "shard=2,tp=2", "--placements", "gpt", "--formulas", "batch=0"]
    assert main(["inspect", "named_factories:make", *words]) == 0
    printed = capsys.readouterr().out
    model, args = importlib.import_module("named_factories").make()
    sys.modules.pop("named_factories")
    options = {"dynamic": {"batch": 0}, "mesh": {"shard": 2, "tp": 2}, "hardware": ROUND_CARD}
    assert printed == formulas_text(graphshard.formulas(model, args, placements="gpt", **options))
    assert printed.startswith("reference: batch=4, shard=2, tp=2\n") and "reshards over tp" in printed


SHARDED = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from graphshard import fully_shard
from factories import Model

def make():
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
    return model, (torch.empty(2, 4),)
"""


def test_a_sharded_model_brings_its_mesh(here, capsys, fake_group):
    fake_group(4)
    (here / "sharded.py").write_text(SHARDED)
    words = ["inspect", "sharded:make", "--hardware", "round.json", "--loss", "factories:loss"]
    assert main(words) == 0
    assert "Model, 76 parameters, shard=4, round" in capsys.readouterr().out
    assert main([*words, "--mesh", "shard=4"]) == 2
    assert "mesh: the model has been through fully_shard, which was told already" in capsys.readouterr().err
    sys.modules.pop("sharded")


@pytest.mark.parametrize("ends_process", [False, True])
def test_only_a_process_that_ends_keeps_its_garbage(here, monkeypatch, ends_process):
    frozen = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    assert main(GOOD, ends_process=ends_process) == 0
    assert frozen == [True] * ends_process


def test_policies_reach_the_capture(here, capsys):
    dtypes = ["--param-dtype", "bfloat16", "--reduce-dtype", "float32"]
    rest = ["--optimizer", "sgd", "--reshard-after-forward", "false", "--plan", "auto", "--checkpoint", "first"]
    assert main([*GOOD, *dtypes, *rest, "--json", "report.json"]) == 0
    capsys.readouterr()
    data = json.loads((here / "report.json").read_text())
    assert data["settings"] == {
        "units": [], "placements": None, "reshard_after_forward": False, "param_dtype": "bfloat16",
        "reduce_dtype": "float32", "optimizer": "sgd", "micro_batches": 1, "memory_budget": None, "plan": "auto",
        "checkpoint": ["first"],
        "tables": None,
    }  # fmt: skip
    assert data["throughput"]["dtype"] == "bfloat16"
    assert {one["kind"] for one in data["collectives"] if one["half"] == "backward"} == {"reduce_scatter"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["factories"], "write PKG.MODULE:NAME"),
        (["no_such_module:make"], "no_such_module cannot be imported: ModuleNotFoundError"),
        (["broken:make"], "broken cannot be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        (["factories:model"], "factories has no function 'model'"),
        (["factories:number"], "factories has no function 'number'"),
        (["factories:nothing"], "factories:nothing returned (NoneType); a factory returns (model, args)"),
        (["factories:only_a_model"], "factories:only_a_model returned (Model); a factory returns (model, args)"),
        (["factories:tensor_as_args"], "factories:tensor_as_args returned (Model, Tensor); a factory returns"),
        (["factories:fails"], "factories:fails raised KeyError: 'no weights here'"),
        (["factories:short"], "what the model returns is no loss: f32[2, 4]; give a function"),
        (["factories:wide"], "the model does not run on these inputs (args[0] f32[2, 5]): a and b must have same"),
        ([], "name a model: PKG.MODULE:FACTORY, or --hf CONFIG"),
        (["factories:make", "--sequence", "8"], "--batch and --sequence go with --hf; a factory makes its own"),
        (["factories:make", "--batch", "2"], "--batch and --sequence go with --hf; a factory makes its own inputs"),
        (["factories:make", "--hf", "llama"], "factories:make and --hf llama: name one model"),
        (["--hf", "llama", "--batch", "0"], "--batch and --sequence: give whole numbers, at least 1"),
        (["factories:breaks"], "factories.py:16, in forward: `torch._dynamo.graph_break()`"),
        (["factories:selects"], "factories.py:22, in forward: `return y[y > 0].sum()`"),
        (["factories:make", "--mesh", "shard"], "--mesh shard: write AXIS=N"),
        (["factories:make", "--mesh", "shard=four"], "--mesh shard=four: write AXIS=N"),
        (["factories:make", "--mesh", "shard=2,shard=4"], "--mesh names the axis 'shard' twice"),
        (["factories:make", "--mesh", "shard=12"], "12 ranks do not divide into nodes of 8"),
        (["factories:make", "--mesh", "data=2"], "write shard=N, or replicate=M and then shard=N"),
        (["factories:make", "--hardware", "h1000"], "no hardware card 'h1000'"),
        (["factories:make", "--tables", "none.csv"], "none.csv"),
        (["factories:make", "--unit", "layers.*"], "units: no module matches 'layers.*'"),
        (["factories:make", "--loss", "factories:missing"], "factories has no function 'missing'"),
        (["factories:make", "--param-dtype", "int8"], "--param-dtype int8: no floating-point dtype"),
        (["factories:make", "--optimizer", "lamb"], "optimizer='lamb' is unknown"),
        (["factories:make", "--plan", "best"], "plan='best' is unknown"),
        (["factories:make", "--micro-batches", "0"], "micro_batches=0 must be"),
        (["factories:make", "--memory-budget", "lots"], "memory_budget='lots' cannot be read"),
        (["factories:make", "--memory-budget", "60"], "memory_budget='60' has no unit, and would be 60 bytes; write"),
        (["factories:make", "--memory-budget", "100B", "--loss", "factories:loss"], "memory_budget: 100 bytes a rank"),
        (["factories:make", "--placements", "llama"], "placements: the mesh shard=2 has no axis for them; add one"),
        (["factories:make", "--mesh", "shard=2,tp=2"], "mesh axis tp has no placements: say how the model lies on it"),
        ([*PLACED, "lama"], "there is no ready plan 'lama'; there are llama, gpt, vit, llama-sequence, gpt-sequence"),
        ([*PLACED, "llama"], "the ready plan 'llama' does not fit Model: in numbered blocks (layers.0, ...)"),
        ([*PLACED, "factories:number"], "--placements factories:number: it is a int; name a dict of placements, or a"),
        ([*PLACED, "factories:nowhere"], "--placements 'factories:nowhere': factories has no attribute 'nowhere'"),
        ([*PLACED, "factories:odd"], "parallelize: 'third.weight' matches no parameter; there are first.weight, "),
        ([*PLACED, "llama", "--formulas", "batch=0"], "the ready plan 'llama' does not fit Model: in numbered blocks"),
        (["factories:make", "--json", "nowhere/report.json"], "--json nowhere/report.json: its folder does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(here, capsys, caplog, arguments, complaint):
    hardware = [] if "--hardware" in arguments else ["--hardware", "round.json"]
    mesh = [] if "--mesh" in arguments else ["--mesh", "shard=2"]
    assert main(["inspect", *arguments, *hardware, *mesh]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *_, last = printed.err.splitlines()
    assert last.startswith("graphshard inspect: ") and complaint in last
    assert "Traceback" not in printed.err + caplog.text


def test_without_a_terminal_only_results_are_printed(here, capsys):
    assert main(GOOD) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "Time" in printed.out


def test_debug_shows_the_traceback(here):
    with pytest.raises(UsageError, match="factories:fails raised KeyError") as caught:
        main(["inspect", "--debug", "factories:fails"])
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_mesh_is_read_in_order():
    assert list(parse_mesh(["replicate=4", "shard=16"]).items()) == [("replicate", 4), ("shard", 16)]
    assert parse_mesh(["replicate=4,shard=16"]) == {"replicate": 4, "shard": 16}


def test_default_types_are_untouched():
    assert torch.get_default_dtype() == torch.float32
