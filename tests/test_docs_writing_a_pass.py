"""docs/extend quotes examples/write_a_pass.py, which runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
SCRIPT = ROOT / "examples" / "write_a_pass.py"
PAGES = ("writing-a-pass.md", "testing-a-pass.md")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def foreign_blocks(text: str, source: str) -> list[str]:
    """Blocks of Python on a page that are not, as they stand, in the source."""
    return [block for block in blocks(text, "python") if block.strip("\n") not in source]


def test_script_runs_and_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.endswith("all right\n")
    (shown,) = blocks((ROOT / "docs" / "extend" / "writing-a-pass.md").read_text(), "text")
    assert "all_gather" in shown and shown in printed


@pytest.mark.parametrize("page", PAGES)
def test_page_quotes_the_script(page: str) -> None:
    text = (ROOT / "docs" / "extend" / page).read_text()
    assert blocks(text, "python")
    assert foreign_blocks(text, SCRIPT.read_text()) == []


def test_a_foreign_block_is_found() -> None:
    assert foreign_blocks("```python\nx = 2\n```\n", "x = 1\n") == ["x = 2\n"]
    assert foreign_blocks("```python\nx = 1\n```\n", "x = 1\n") == []
