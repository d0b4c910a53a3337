"""The script of docs/start/first-training.md runs as it stands, and writes the files that the page names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = ROOT / "docs" / "start" / "first-training.md"


@pytest.mark.slow
def test_script_runs_and_writes_what_the_page_says(tmp_path: Path) -> None:
    text = PAGE.read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    done = subprocess.run(
        [sys.executable, *launch.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    loss = float(re.findall(r"loss (\d+\.\d+)", done.stdout)[-1])
    assert loss < 0.1
    files = re.findall(r"`(graph0\.[\w.-]+\.txt)`", text)
    assert len(files) == 4
    assert [file for file in files if not (tmp_path / "graphs" / "rank0" / file).exists()] == []
