"""Links, module paths and file paths of the docs and of README lead somewhere, and the index reaches every page."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphshard import errors
from graphshard.errors import GraphShardError

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Where text about code may be: folders of the repository that pages name files in.
FOLDERS = "graphshard|passes|tests|benchmarks|examples|docs"
#: In map.md, the tables behind this heading have what was in their first column.
OLD_PATHS = "## Old import paths"


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text: str) -> list[str]:
    """Targets of links and pictures, but for those of other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not (target.exists() and target.is_relative_to(ROOT)):
            broken.append(link)
            continue
        headings = anchors(target.read_text() if name else text) if anchor else {anchor}
        if anchor not in headings:
            broken.append(link)
    return broken


def current(text: str) -> str:
    """A page without the first column of tables of old paths."""
    before, heading, tables = text.partition(OLD_PATHS)
    return before + heading + re.sub(r"^\|[^|]*\|", "|", tables, flags=re.MULTILINE)


def named_files(text: str) -> set[str]:
    """Paths of files and folders, which may hold a ``*``; what commands write is none."""
    return set(re.findall(rf"(?<![\w./\-])((?:{FOLDERS})/[\w./*\-]*[\w/*])", text))


def missing_files(text: str) -> list[str]:
    return sorted(name for name in named_files(text) if not any(ROOT.glob(name.rstrip("/"))))


def named_modules(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w./\-])(graphshard(?:\.[A-Za-z_]\w*)+)", text))


def resolves(path: str) -> bool:
    """Whether a dotted path is a module, or a name in one."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def missing_modules(text: str) -> list[str]:
    return sorted(path for path in named_modules(text) if not resolves(path))


def reached(start: Path) -> set[Path]:
    """The pages of docs that links lead to from one."""
    pending, seen = [start], {start}
    for page in pending:
        for link in links(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_relative_to(DOCS) and target not in seen:
                seen.add(target)
                pending.append(target)
    return seen


def public_errors(kind: type = GraphShardError) -> Iterator[str]:
    """Names of the error classes of graphshard that have been imported, but for private ones."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("graphshard") and not one.__name__.startswith("_"):
            yield one.__name__
        yield from public_errors(one)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_what_exists(page: Path) -> None:
    text = page.read_text()
    assert broken_links(page, text) == []
    assert missing_files(current(text)) == []
    assert missing_modules(current(text)) == []


def test_index_reaches_every_page() -> None:
    assert sorted(set(PAGES) - reached(DOCS / "index.md")) == []


def test_every_error_has_a_row() -> None:
    for module in ("testing", "backend", "planner", "inspection", "cli", "cost"):
        importlib.import_module(f"graphshard.{module}")
    rows = set(re.findall(r"^\| `(\w+Error)` \|", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE))
    assert rows == set(public_errors())
    assert {name for name in vars(errors) if name.endswith("Error")} - {"GraphShardError"} <= rows


def test_what_is_missing_is_found() -> None:
    page = DOCS / "index.md"
    assert broken_links(page, "[a](nothing.md) [b](map.md#nothing) [c](#here)\n") == [
        "nothing.md",
        "map.md#nothing",
        "#here",
    ]
    assert broken_links(page, "# Here it is\n[a](map.md) [b](#here-it-is) [c](https://pytorch.org)\n") == []
    assert missing_files("`graphshard/nothing.py`, `passes/merge_waits.py`, tests/nothing_*.py") == [
        "graphshard/nothing.py",
        "tests/nothing_*.py",
    ]
    assert missing_modules("`graphshard.nothing.at_all`, `graphshard.pipeline.Fact`") == ["graphshard.nothing.at_all"]
    row = "| `graphshard.old` | x |"
    assert named_modules(row) and not named_modules(current(f"{OLD_PATHS}\n{row}"))
