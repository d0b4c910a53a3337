"""The command: tables on stdout, progress on stderr, exit status 2 and one line for mistakes."""

import subprocess
import sys

import pytest

from graphshard import cost, hardware
from graphshard.cli.cards_command import format_table
from graphshard.cli.main import SUBCOMMANDS, entry, main
from graphshard.cost import known_cards, load_card
from graphshard.errors import CardError

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


def test_calibrate_writes_a_card_that_cards_shows(tmp_path, capfd):
    out = tmp_path / "here.json"
    assert main(["calibrate", "--quick", "--out", str(out)]) == 0
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["inspect", "--help"], ["inspect"], ["sweep"], ["cards"], ["cards", "h100-sxm"], ["diff"],
        ["inspect", "m:f", "--memory-budget", "60"], ["inspect", "m:f", "--hardware", "h1000"],
        ["sweep", "m:f", "--memory-budget", "lots"],
    ],
    ids=str,
)
def test_what_needs_no_torch_does_not_wait_for_it(arguments):
    """Torch takes seconds to import."""
    script = (
        "import sys, graphshard.cli.main as command\n"
        "try: command.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'graphshard.cli' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
