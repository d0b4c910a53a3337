"""The README's commands run, and what it shows is what they produce."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from support.gloo_pool import GlooPools
from support.thorough import is_thorough

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FIRST_TRAINING = (ROOT / "docs" / "start" / "first-training.md").read_text()
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

#: Each command of the README, and what runs it: a test of this file, or CI.
COMMANDS = {
    "pip install .": "test_a_wheel_runs_the_example_and_the_command",
    "make train": "test_the_main_job_prints_what_is_shown",
    "make test": "CI",
    'graphshard inspect examples.llama_model:llama_3_8b --mesh shard=64 --hardware h100-sxm --unit "layers.*" '
    "--html out.html": "test_inspect_writes_the_page",
    "python benchmarks/step_time.py --rounds 3 --steps-per-round 2 --contenders "
    "fsdp2-compile,ddp-compile,graphshard-rules,graphshard-planned,graphshard": "test_the_benchmark_runs",
    "python benchmarks/draw_timelines.py": "test_the_timelines_are_those_shown",
}  # fmt: skip

#: A model for the command: `toy:make`.
TOY = """
import torch
from torch import nn


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).square().mean()


def make():
    return Loss(), (torch.randn(4, 8),), {}
"""


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of this language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> set[str]:
    """What a reader is told to run: lines of `sh` blocks, and inline `python ...` and `make ...`."""
    lines = {line for block in blocks(text, "sh") for line in block.splitlines()}
    inline = set(re.findall(r"`((?:python|make|graphshard inspect|pip|torchrun) [^`]+)`", text))
    return lines | inline - {"make gpu-check"}


def run(*command: str, folder: Path = ROOT, limit: int = 600) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_on_this_rank(folder: str) -> str:
    """What `train.py` prints, run by a rank whose process group exists."""
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path("train.py", run_name="__main__")
        dist.init_process_group.assert_called_once_with("gloo")
        dist.destroy_process_group.assert_called_once_with()
    return said.getvalue()


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory, gloo_pools: GlooPools) -> Path:
    """The folder of dumps that the script of the first training writes; in `make test` under ranks that are there."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "train.py").write_text(blocks(FIRST_TRAINING, "python")[0])
    if is_thorough():
        said = run(*TORCHRUN, "train.py", folder=folder)
    else:
        said, _ = gloo_pools.run(2, run_on_this_rank, str(folder), interprets=True, is_thorough=False)
    assert float(re.findall(r"loss (\d+\.\d+)", said)[-1]) < 0.1
    return folder / "graphs"


def test_every_command_is_run() -> None:
    assert commands(README) == set(COMMANDS)
    here = Path(__file__).read_text()
    assert all(by == "CI" or f"def {by}(" in here for by in COMMANDS.values())
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_a_command_that_is_not_run_is_found() -> None:
    assert commands("```sh\nmake more\n```\n and `python x.py`") == {"make more", "python x.py"}


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_lines_of_a_dump_are_those_shown(dumped: Path) -> None:
    (shown,) = (block for block in blocks(README, "text") if block.startswith("%"))
    assert shown in (dumped / "rank0" / "graph0.forward.5-schedule_collectives.txt").read_text()
    assert shown.count("\n") == 8


def test_the_first_training_writes_the_files_it_names(dumped: Path) -> None:
    named = re.findall(r"`(graph0\.[\w.-]+\.txt)`", FIRST_TRAINING)
    assert len(named) == 4
    assert [name for name in named if not (dumped / "rank0" / name).exists()] == []


def test_dumps_are_equal_on_both_ranks(dumped: Path) -> None:
    texts = [{file.name: file.read_text() for file in (dumped / rank).iterdir()} for rank in ("rank0", "rank1")]
    assert len(texts[0]) == 20
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_timelines_are_those_shown(tmp_path: Path) -> None:
    said = run(sys.executable, "benchmarks/draw_timelines.py", "--out", str(tmp_path / "timelines.png"))
    in_place, planned = map(float, re.findall(r"([\d.]+) ms", said))
    assert planned < 0.6 * in_place
    assert (tmp_path / "timelines.png").read_bytes().startswith(b"\x89PNG")
    assert "merged 130 collectives into 26" in README.replace("\n", " ")


@pytest.mark.slow
def test_the_main_job_prints_what_is_shown(tmp_path: Path) -> None:
    options = ("--steps", "30", "--must-fall-to", "0.95", "--out", str(tmp_path))
    said = run(*TORCHRUN, "examples/train_gpt.py", *options, limit=900)
    (shown,) = (block for block in blocks(README, "text") if block.startswith("ok"))
    for line in shown.splitlines():
        words = re.findall(r"[a-z]{4,}", line)
        assert all(word in said for word in words), line


@pytest.mark.slow
def test_inspect_writes_the_page(tmp_path: Path) -> None:
    (command,) = (one for one in COMMANDS if one.startswith("graphshard inspect"))
    page = tmp_path / "out.html"
    words = command.replace('"', "").replace("out.html", str(page)).split()[1:]
    run(sys.executable, "-m", "graphshard", *words)
    assert "<html" in page.read_text()[:200].lower()


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    (command,) = (one for one in COMMANDS if "step_time" in one)
    said = run(
        sys.executable, *command.split()[1:], "--networks", "loopback", "--layers", "1", "--width", "64", limit=900
    )  # fmt: skip
    assert "graphshard-planned" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_wheel_runs_the_example_and_the_command(kind: str, tmp_path: Path) -> None:
    """Installed into an environment of its own, with the packages of this one behind it."""
    built = tmp_path / "built"
    source = str(ROOT)
    if kind == "sdist":
        script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
        built.mkdir()
        run(sys.executable, "-c", script, str(built))
        (archive,) = built.glob("*.tar.gz")
        source = str(archive)
    pip = (sys.executable, "-m", "pip", "--quiet", "--no-cache-dir")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), source)
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "installed"
    run(*pip, "install", "--no-deps", "--target", str(target), str(wheel))
    (tmp_path / "train.py").write_text(blocks(FIRST_TRAINING, "python")[0])
    (tmp_path / "toy.py").write_text(TOY)
    environment = {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{tmp_path}"}
    for command in (
        [sys.executable, "-P", "-c", f"import graphshard; assert graphshard.__file__.startswith({str(target)!r})"],
        [*TORCHRUN, "train.py"],
        [sys.executable, "-P", "-m", "graphshard", "cards", "h100-sxm"],
        [
            sys.executable, "-P", "-m", "graphshard", "inspect", "toy:make", "--mesh", "shard=4",
            "--hardware", "h100-sxm", "--html", "out.html",
        ],
    ):  # fmt: skip
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
