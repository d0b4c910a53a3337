"""The command: tables on stdout, progress on stderr, exit status 2 and one line for mistakes."""

import json
import subprocess
import sys

import pytest
import torch

from graphshard import cost, hardware
from graphshard.cli.cards_command import format_table
from graphshard.cli.main import SUBCOMMANDS, entry, main
from graphshard.cost import known_cards, load_card
from graphshard.errors import CardError
from graphshard.inspection.optimizers import OPTIMIZERS
from graphshard.parallel import READY_PLANS
from graphshard.setting_checks import FLOAT_DTYPES, OPTIMIZER_NAMES, READY_PLAN_NAMES

#: Why a card of one rank is not kept.
ONE_RANK = "a card of one rank has no collectives, and the backend looks for those of its process groups"

#: Of what torchrun sets, what says nothing of the number of ranks.
RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_cards_lists_all_that_ship(capsys):
    assert main(["cards"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "card"
    assert [row.split()[0] for row in rows] == list(known_cards())
    h100 = next(row for row in rows if row.startswith("h100-sxm"))
    assert h100.split() == ["h100-sxm", "989.4", "66.9", "3350", "74.51", "8", "450", "50"]


def test_cards_shows_a_file(capsys, tmp_path):
    load_card("b200").save(tmp_path / "mine.json")
    assert main(["cards", str(tmp_path / "mine.json")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_mistake_is_one_line_and_status_2(capsys):
    assert main(["cards", "h1000"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("graphshard cards: no hardware card 'h1000'")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "status"), [(["cards"], 0), (["cards", "h1000"], 2)])
def test_the_script_ends_with_the_status_and_without_a_last_collection(arguments, status, capsys, monkeypatch):
    frozen = []
    monkeypatch.setattr("sys.argv", ["graphshard", *arguments])
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    with pytest.raises(SystemExit) as stop:
        entry()
    assert stop.value.code == status and frozen == [True]


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (["--help"], 0, "usage: graphshard [-h] SUBCOMMAND", ""),
        pytest.param(
            ["prune"], 2, "", "graphshard: error: argument SUBCOMMAND: invalid choice: 'prune'", marks=pytest.mark.slow
        ),
        pytest.param(["cards"], 0, "h100-sxm", "", marks=pytest.mark.slow),
        (["cards", "h1000"], 2, "", "graphshard cards: no hardware card 'h1000'"),
    ],
    ids=["help", "unknown", "cards", "mistake"],
)
def test_python_m_graphshard_is_the_command(arguments, status, out, err):
    command = [sys.executable, "-m", "graphshard", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert out in done.stdout and bool(out) == bool(done.stdout)
    assert err in done.stderr
    assert "__main__" not in done.stdout + done.stderr


def test_debug_shows_the_traceback():
    with pytest.raises(CardError):
        main(["cards", "--debug", "h1000"])


@pytest.mark.parametrize(
    "arguments", [[], ["prune"], ["calibrate", "--out"], ["calibrate", "--out", "x", "--device", "tpu"]]
)
def test_wrong_words_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: graphshard" in capsys.readouterr().err


def test_help_lists_the_subcommands(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for name, subcommand in SUBCOMMANDS.items():
        assert name in printed
        assert subcommand.summary in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nproc", "1"], "at least 2 ranks, not 1"),
        (["--like", "h1000"], "no hardware card 'h1000'"),
        (["--device", "cuda"], "torch sees no CUDA device here"),
    ],
    ids=str,
)
def test_what_calibrate_cannot_do(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["calibrate", "--out", str(tmp_path / "x.json"), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_calibrate_complains_of_a_folder_before_it_measures(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda *_: pytest.fail("it measured"))
    assert main(["calibrate", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder: name the file of the card, {tmp_path / 'here.json'}" in capsys.readouterr().err


def test_the_help_of_calibrate_says_which_device_it_takes(capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert "default cuda under torchrun where there is one, else cpu" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments", [pytest.param([], marks=pytest.mark.slow), ["--nproc", "1", "--like", "h100-sxm"]], ids=["two", "one"]
)
def test_calibrate_writes_a_card_that_cards_shows(arguments, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("graphshard.cost.probes.largest_cache_bytes", lambda: 2**20)  # takes time to fill
    out = tmp_path / "here.json"
    assert main(["calibrate", "--quick", "--out", str(out), *arguments]) == 0
    printed = capfd.readouterr()
    assert printed.out == f"wrote {out}; use it with hardware={str(out)!r}\n"
    assert "matmul float32" not in printed.err  # progress is for terminals
    assert main(["cards", str(out)]) == 0
    assert capfd.readouterr().out.splitlines()[1].split()[0] == "here"


@pytest.mark.parametrize(
    ("environment", "arguments", "complaint"),
    [
        ({"GRAPHSHARD_CACHE": ""}, [], "GRAPHSHARD_CACHE is empty, so no card is kept"),
        ({}, ["--nproc", "1", "--like", "h100-sxm"], ONE_RANK),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", **RANK_0}, [], "the backend measures several nodes by itself"),
        ({}, ["--device", "cuda"], "the backend takes the shipped card h200-sxm on this GPU"),
    ],
    ids=str,
)
def test_a_card_that_would_not_be_found_is_not_measured(environment, arguments, complaint, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: "--device" in arguments)
    monkeypatch.setattr(hardware, "shipped_card_of_device", lambda d: "h200-sxm" if d.type == "cuda" else None)
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda *_: pytest.fail("it measured"))
    assert main(["calibrate", *arguments]) == 2
    assert f"calibrate without --out: {complaint}; give --out FILE" in capsys.readouterr().err


def test_a_card_without_a_file_is_kept_where_the_backend_looks(capsys, monkeypatch):
    monkeypatch.setattr(cost, "calibrate", lambda *_, **__: load_card("cpu-loopback"))
    assert main(["calibrate", "--nproc", "3"]) == 0
    (kept,) = hardware.kept_cards()
    assert kept.card.name == "cpu-loopback" and kept.key["ranks"].startswith("3 in all")
    threads = kept.key["device"].rpartition(", ")[2]
    takes = f'hardware="auto" takes it for 3 ranks of {threads} in one process group on this machine'
    assert capsys.readouterr().out == f"kept {kept.file}; {takes}\n"


def test_a_cache_that_cannot_be_written_asks_for_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cost, "calibrate", lambda *_, **__: load_card("cpu-loopback"))
    assert main(["calibrate"]) == 2
    assert f"{tmp_path / 'file'} cannot be written; give --out FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_calibrate_under_torchrun(tmp_path):
    out = tmp_path / "here.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "graphshard", "calibrate", "--quick", "--device", "cpu", "--out", str(out)]
    done = subprocess.run([*launch, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    assert load_card(out).ranks_per_node == 2


def test_a_table_is_aligned():
    assert format_table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc   d"


#: Words of a command, and what it says to them without torch.
ANSWERED_WITHOUT_TORCH = {
    "--help": "usage: graphshard",
    "inspect --help": "usage: graphshard inspect",
    "cards": "h100-sxm",
    "cards h100-sxm": "h100-sxm",
    "diff": "the following arguments are required",
    "diff a.json b.json": "report 'a.json' cannot be read: No such file",
    "sweep": "name a model: PKG.MODULE:FACTORY, or --hf CONFIG",
    "inspect": "name a model: PKG.MODULE:FACTORY, or --hf CONFIG",
    "inspect no_colon": "the factory 'no_colon': write PKG.MODULE:NAME",
    "inspect models/mine.py:make": "the factory 'models/mine.py:make': write PKG.MODULE:NAME",
    "inspect nowhere:make": "nowhere cannot be imported: ModuleNotFoundError: No module named 'nowhere'",
    "inspect models.nowhere:make": "ModuleNotFoundError: No module named 'models.nowhere'",
    "inspect models.mine:mak": "models.mine has no function 'mak'",
    "sweep models.mine:mak": "models.mine has no function 'mak'",
    "precompile models.mine:mak --mesh shard=2 --out out": "models.mine has no function 'mak'",
    "inspect {} --loss models.mine:los": "--loss 'models.mine:los': models.mine has no function 'los'",
    "inspect {} --mesh shard=2,tp=2 --placements models.mine:cuts": "models.mine has no attribute 'cuts'",
    "inspect {} --mesh shard=2,tp=2 --placements lama": "there is no ready plan 'lama'; there are llama, gpt, vit",
    "inspect {} --mesh shard=2,tp=2": "mesh axis tp has no placements",
    "inspect {} --mesh shard=2 --placements auto": "placements: the mesh shard=2 has no axis for them",
    "inspect {} --mesh shard=four": "--mesh shard=four: write AXIS=N",
    "inspect {} --mesh shard=0": "mesh: shard=0 must be a whole number of ranks",
    "inspect {} --mesh data=2": "write shard=N, or replicate=M and then shard=N",
    "inspect {} --mesh shard=12": "12 ranks do not divide into nodes of 8 (card 'h100-sxm')",
    "sweep {} --mesh shard=8,12": "12 ranks do not divide into nodes of 8 (card 'h100-sxm')",
    "inspect {} --param-dtype float7": "--param-dtype float7: no floating-point dtype of torch",
    "precompile {} --mesh shard=2 --out out --reduce-dtype int8": "--reduce-dtype int8: no floating-point dtype",
    "precompile {} --mesh shard=2 --out out --hardware h1000": "no hardware card 'h1000'",
    "precompile {} --mesh shard=2 --out models/mine.py": "--out models/mine.py: it is a file; name a folder",
    "inspect {} --memory-budget 60": "memory_budget='60' has no unit",
    "sweep {} --memory-budget lots": "memory_budget='lots' cannot be read",
    "inspect {} --hardware h1000": "no hardware card 'h1000'",
    "inspect {} --tables none.csv": "none.csv",
    "inspect {} --optimizer lamb": "optimizer='lamb' is unknown; known: adamw, ",
    "inspect {} --plan best": "plan='best' is unknown; known: 'unit', 'auto'",
    "inspect {} --micro-batches 0": "micro_batches=0 must be a whole number",
    "inspect {} --formulas batch=0 --html a.html": "--html: --formulas writes none; leave it out",
    "inspect {} --formulas batch=0 --plan auto": "--formulas are those of --plan unit",
    "inspect --hf none.json": "--hf none.json: ",
    "inspect --hf broken.json": "--hf broken.json",
    "calibrate --out nowhere/card.json": "no folder nowhere to write card.json to",
    "calibrate --like h1000": "no hardware card 'h1000'",
    "calibrate --nproc 1": "collectives need at least 2 ranks, not 1",
}

#: Runs commands one after the other in a process that has no torch. A command that needs it says "asks for torch".
WITHOUT_TORCH = """
import contextlib, io, json, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise RuntimeError("asks for torch")
sys.meta_path.insert(0, NoTorch())
import graphshard.cli.main as command
def said(words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try: status = command.main(words)
        except SystemExit as end: status = end.code
        except RuntimeError as error: status = str(error)
    return status, out.getvalue()
print(json.dumps([said(words) for words in json.loads(sys.argv[1])]))
"""


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path):
    """Torch takes seconds to import."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text("import torch\ndef make():\n    return None\n")
    (tmp_path / "made.py").write_text("from other import *\n")
    (tmp_path / "broken.json").write_text("{")
    known = [line.format("models.mine:make").split() for line in ANSWERED_WITHOUT_TORCH]
    unknown = [["inspect", "models.mine:make"], ["inspect", "made:anything"]]
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([*known, *unknown])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for (line, expected), (status, text) in zip(ANSWERED_WITHOUT_TORCH.items(), answers, strict=False):
        assert expected in text and status in (0, 2), (line, status, text)
    assert [status for status, _ in answers[-2:]] == ["asks for torch"] * 2  # so the others have not asked


def test_names_that_are_known_without_torch_are_those_of_torch():
    dtypes = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    assert {name for name in dtypes if getattr(torch, name).is_floating_point} <= FLOAT_DTYPES
    assert tuple(OPTIMIZERS) == OPTIMIZER_NAMES and READY_PLANS == READY_PLAN_NAMES


def test_the_package_imports_its_names_when_they_are_asked_for():
    script = (
        "import sys, graphshard\n"
        "assert 'torch' not in sys.modules\n"
        "assert graphshard.fully_shard.__module__ == 'graphshard.fsdp.fully_shard'\n"
        "assert graphshard.passes.LowerShards and graphshard.MixedPrecisionPolicy().param_dtype is None\n"
        "assert not hasattr(graphshard, 'nonsense')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
