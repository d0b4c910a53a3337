"""The README's script runs as it stands, and the graph text beside it is what it produces."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def blocks() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for language, body in re.findall(r"```(\w*)\n(.*?)```", README.read_text(), re.DOTALL):
        found.setdefault(language, []).append(body)
    return found


@pytest.fixture(scope="module")
def folder(blocks: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "train.py").write_text(blocks["python"][0])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    loss = float(re.findall(r"loss (\d+\.\d+)", result.stdout)[-1])
    assert loss < 0.1
    return folder / "graphs" / "rank0"


def test_captured_graph_is_the_one_shown(folder: Path, blocks: dict[str, list[str]]) -> None:
    *shown, rest = blocks["text"][0].splitlines()
    captured = (folder / "graph0.joint.0-captured.txt").read_text().splitlines()
    assert shown == captured[: len(shown)] and rest == "..."


def test_scheduled_forward_is_the_one_shown(folder: Path, blocks: dict[str, list[str]]) -> None:
    assert blocks["text"][1] == (folder / "graph0.forward.5-schedule_collectives.txt").read_text()


def test_text_is_equal_on_both_ranks(folder: Path) -> None:
    texts = [
        {file.name: file.read_text() for file in (folder.parent / rank).iterdir()}
        for rank in ("rank0", "rank1")
    ]
    assert len(texts[0]) == 20
    assert texts[0] == texts[1]
