"""Tables of docs that repeat the code: contracts of passes, options of the backend, entries of cards."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from graphshard.backend.options import BackendOptions
from graphshard.cost import known_cards, load_card
from graphshard.passes import KNOWN

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
DOCS = ROOT / "docs"


def rows_of(page: str) -> dict[str, list[str]]:
    """By the name in the first cell, the other cells of the rows that begin with one."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (DOCS / page).read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def contract(step: type[Any]) -> tuple[set[str], set[str], dict[str, str]]:
    """What a pass requires and provides, and its options with their defaults."""
    facts = [{fact.name for fact in group} for group in (step.requires, step.provides)]
    return facts[0], facts[1], {option.name: repr(option.default) for option in fields(step)}


def told_contract(cells: list[str]) -> tuple[set[str], set[str], dict[str, str]]:
    """The same, of the cells of a row."""
    _, requires, provides, options = cells
    facts = [set(cell.split(", ")) - {""} for cell in (requires, provides)]
    return facts[0], facts[1], dict(re.findall(r"`(\w+)=([^`]*)`", options.replace('"', "'")))


@pytest.mark.parametrize("name", KNOWN)
def test_row_of_a_pass_has_its_contract(name: str) -> None:
    assert told_contract(rows_of("understand/passes.md")[name]) == contract(KNOWN[name])


def test_every_option_of_the_backend_has_a_row_that_begins_with_its_default() -> None:
    rows = rows_of("use/options.md")
    defaults = BackendOptions()
    assert set(rows) == {option.name for option in fields(BackendOptions)}
    for name, cells in rows.items():
        told = cells[0].split("`")[1].replace('"', "'")
        assert told == repr(getattr(defaults, name)), name


def test_every_entry_of_a_card_and_every_card_is_told() -> None:
    text = (DOCS / "understand" / "cost-model.md").read_text()
    names = {entry.name for entry in fields(load_card("h100-sxm"))} - {"name", "summary", "sources"}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
    assert [card for card in known_cards() if f"`{card}`" not in text] == []
