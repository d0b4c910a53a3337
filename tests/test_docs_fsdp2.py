"""docs/reference/fsdp2.md names tests that exist, and leaves no cell of its tables empty."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
TEXT = (ROOT / "docs" / "reference" / "fsdp2.md").read_text()
BEHAVIOURS = TEXT[TEXT.index("## Sharding") :]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def rows_of(text: str) -> list[list[str]]:
    """The cells of each row of the tables, without headings and rules."""
    lines = text.splitlines()
    rows = []
    for index, line in enumerate(lines):
        is_heading = index + 1 < len(lines) and lines[index + 1].startswith("|---")
        if line.startswith("|") and not line.startswith("|---") and not is_heading:
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def cited(text: str) -> list[tuple[str, str]]:
    """(file, function or "") of every test that is named."""
    return re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", text)


def missing_tests(text: str) -> list[str]:
    missing = []
    for file, function in cited(text):
        sources = [path.read_text() for path in FILES if path.name == file]
        if not sources:
            missing.append(file)
        elif function and not any(f"\ndef {function}(" in source for source in sources):
            missing.append(f"{file}::{function}")
    return missing


def incomplete_rows(text: str) -> list[str]:
    """Rows with an empty or a missing cell, or without a test and without a reason."""
    problems = []
    for row in rows_of(text):
        has_reason = any(word in " ".join(row) for word in ("not yet: ", "not needed: "))
        if not all(row) or len(row) not in (3, 4) or (not cited(row[-1]) and not has_reason):
            problems.append(" | ".join(row))
    return problems


def test_every_test_exists() -> None:
    assert len(cited(TEXT)) > 100
    assert missing_tests(TEXT) == []


def test_every_row_is_complete() -> None:
    assert len(rows_of(BEHAVIOURS)) > 100
    assert incomplete_rows(BEHAVIOURS) == []


@pytest.mark.parametrize("name", ["test_nothing.py", "test_docs_fsdp2.py::test_nothing"])
def test_a_missing_test_is_found(name: str) -> None:
    assert missing_tests(f"| x | works | `{name}` |") == [name]


@pytest.mark.parametrize(
    "row", ["| x |  | `test_docs_fsdp2.py` |", "| x | works | none |", "| x | `test_docs_fsdp2.py` |"]
)
def test_an_incomplete_row_is_found(row: str) -> None:
    assert len(incomplete_rows(f"| a | b | c |\n|---|---|---|\n{row}")) == 1
    assert incomplete_rows("| a | b | c |\n|---|---|---|\n| x | works | `test_docs_fsdp2.py` |") == []
