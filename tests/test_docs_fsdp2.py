"""The pages that compare with FSDP1, FSDP2 and others name tests that exist, and leave no cell of a table empty."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
DOCS = ROOT / "docs"
#: The pages, where their tables of behaviours begin, and how many rows there are at least.
PAGES = {
    "reference/fsdp2.md": ("## Sharding", 100),
    "reference/fsdp1.md": ("## Constructor", 70),
    "start/migrate.md": ("## Names", 15),
    "start/migrate-from-others.md": ("## From FSDP1", 35),
}
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


@pytest.mark.parametrize("page", PAGES)
def test_every_test_exists(page: str) -> None:
    text = (DOCS / page).read_text()
    assert len(cited(text)) > PAGES[page][1]
    assert missing_tests(text) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_row_is_complete(page: str) -> None:
    text, (start, least) = (DOCS / page).read_text(), PAGES[page]
    behaviours = text[text.index(start) :]
    assert len(rows_of(behaviours)) > least
    assert incomplete_rows(behaviours) == []


@pytest.mark.parametrize("name", ["test_nothing.py", "test_docs_fsdp2.py::test_nothing"])
def test_a_missing_test_is_found(name: str) -> None:
    assert missing_tests(f"| x | works | `{name}` |") == [name]


@pytest.mark.parametrize(
    "row", ["| x |  | `test_docs_fsdp2.py` |", "| x | works | none |", "| x | `test_docs_fsdp2.py` |"]
)
def test_an_incomplete_row_is_found(row: str) -> None:
    assert len(incomplete_rows(f"| a | b | c |\n|---|---|---|\n{row}")) == 1
    assert incomplete_rows("| a | b | c |\n|---|---|---|\n| x | works | `test_docs_fsdp2.py` |") == []
