"""Measured cards in the user's cache folder, one file each, under a key of the machine, the ranks and torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cost import HardwareCard, parse_card
from ..errors import CardError
from ..ir import text_fingerprint
from ..memory import table_beside
from ..user_cache import cache_folder, write_in_one_step
from .machine_need import MachineNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCard:
    """A measured card of the cache.

    Attributes:
        file: where it is.
        key: what it holds for, by name: host, device, ranks, torch.
        need: what was measured.
        card: the card.
    """

    file: Path
    key: Mapping[str, str]
    need: MachineNeed
    card: HardwareCard


def file_of(key: Mapping[str, str]) -> Path | None:
    """The file of a card with this key, whether it is there or not; None if nothing is to be kept."""
    folder = cache_folder("cards")
    text = json.dumps(dict(sorted(key.items())))
    return None if folder is None else folder / f"{text_fingerprint(text)[:16]}.json"


def read_kept(file: Path | None) -> KeptCard | None:
    """A kept card; None if there is none, or if the file cannot be read."""
    if file is None:
        return None
    try:
        data = json.loads(file.read_text())
        need = MachineNeed.from_data(data["need"])
        card = parse_card(json.dumps(data["card"]), where=str(file))
        return KeptCard(file=file, key=dict(data["key"]), need=need, card=replace(card, file=file))
    except (OSError, ValueError, TypeError, KeyError, CardError):
        return None


def keep_card(key: Mapping[str, str], need: MachineNeed, card: HardwareCard) -> Path | None:
    """Writes a card and returns its file; None, with a line in the log, if the folder cannot be written."""
    file = file_of(key)
    data: dict[str, Any] = {"key": dict(key), "need": need.as_data(), "card": card.as_dict()}
    return file if file is not None and write_in_one_step(file, json.dumps(data, indent=1) + "\n") else None


def kept_cards() -> list[KeptCard]:
    """All kept cards, by file name."""
    folder = cache_folder("cards")
    files = sorted(folder.glob("*.json")) if folder is not None else []
    return [kept for kept in map(read_kept, files) if kept is not None]


def delete_cards(names: tuple[str, ...] = ()) -> list[Path]:
    """Deletes kept cards by the names of their files without ".json", or all; returns the files that are gone."""
    found = [kept.file for kept in kept_cards() if not names or kept.file.stem in names]
    for file in found:
        file.unlink(missing_ok=True)
        table_beside(file).unlink(missing_ok=True)
    return found
