"""Reads cards: those that ship beside this module by name, and JSON files. An error lists every mistake in a file."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import CardError, OptionTypeError
from ..machine import Machine
from .cards import (
    COLLECTIVE_KINDS,
    KERNEL_CLASSES,
    LINK_NUMBERS,
    LINKS,
    RANK_NUMBERS,
    ROW_ENTRIES,
    HardwareCard,
    LinkClass,
    MeasuredCollective,
    Protocol,
    complaint,
    is_number,
    is_too_large,
)
from .curves import Curve

_CARDS = resources.files("graphshard.cost") / "cards"

PROTOCOL_NUMBERS = ("latency_seconds", "bandwidth_fraction")


def known_cards() -> tuple[str, ...]:
    """Names of the cards that ship with the package."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _CARDS.iterdir()))


def load_card(name_or_path: str | Path) -> HardwareCard:
    """A shipped card by name, or one from a file.

    Args:
        name_or_path: one of :func:`known_cards`, or the path of a JSON file.

    Raises:
        CardError: no such card or file, no JSON, or entries that are missing, unknown or not positive.
        OptionTypeError: neither a name nor a path.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise OptionTypeError(
            f"hardware={name_or_path!r} must be a card, its name or the path of its file; "
            f"known names: {', '.join(known_cards())}"
        )
    if str(name_or_path) in known_cards():
        file = f"{name_or_path}.json"
        return parse_card((_CARDS / file).read_text(), where=file)
    path = Path(name_or_path)
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:  # ValueError: not text, or an impossible file name
        reason = getattr(error, "strerror", None) or error
        raise CardError(
            f"no hardware card {str(name_or_path)!r}: it is none of {', '.join(known_cards())}, "
            f"and as a file it cannot be read ({reason})"
        ) from error
    return replace(parse_card(text, where=str(path)), file=path)


def card_of(hardware: str | Path | HardwareCard) -> HardwareCard:
    """A card as it is, or the card of a name or file.

    Raises:
        CardError, OptionTypeError: see :func:`load_card`.
    """
    return hardware if isinstance(hardware, HardwareCard) else load_card(hardware)


def read_kept_card(file: Path) -> tuple[dict[str, str], HardwareCard]:
    """Key and card of a file in the user's cache.

    Raises:
        OSError, ValueError, TypeError, KeyError, CardError: it cannot be read, or is no such file.
    """
    data = json.loads(file.read_text())
    card = parse_card(json.dumps(data["card"]), where=str(file))
    return dict(data["key"]), replace(card, file=file)


def parse_card(text: str, *, where: str) -> HardwareCard:
    """Reads a card from JSON.

    Args:
        text: the JSON.
        where: the file's name, for errors.

    Raises:
        CardError: see :func:`load_card`.
    """
    try:
        data = json.loads(text)
    except ValueError as error:  # not JSON, or a number with thousands of digits
        raise CardError(f"{where}: no JSON: {error}") from error
    if not isinstance(data, dict):
        raise CardError(f"{where}: a card is a JSON object, not {type(data).__name__}")
    reader = _Reader(data)
    fields: dict[str, Any] = {
        "name": data.pop("name", where),
        "summary": data.pop("summary", ""),
        "device_type": data.pop("device_type", "cuda"),
        "sources": data.pop("sources", {}),
        "machine": reader.machine("machine"),
        "peak_flops": reader.numbers("peak_flops"),
        "efficiency": reader.curves("efficiency", KERNEL_CLASSES),
        **{name: reader.number(name) for name in RANK_NUMBERS},
        **{name: reader.link(name) for name in LINKS},
    }
    reader.problems += [f"{name} is not an entry of a card" for name in data]
    card = None
    if not reader.problems:
        try:
            card = HardwareCard(**fields)
        except CardError as error:
            raise CardError(str(error).replace(f"card {fields['name']!r}", where, 1)) from error
    if card is None:
        raise CardError(complaint(where, reader.problems))
    return card


class _Reader:
    """Takes entries out of the JSON, and collects in ``problems`` what is missing or of the wrong type."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self.problems: list[str] = []

    def number(self, name: str) -> float:
        return self._number(self._data, name, name)

    def numbers(self, name: str) -> dict[str, float]:
        entries = self._object(self._data, name, name)
        return {key: self._number(entries, key, f"{name}.{key}") for key in list(entries)}

    def curves(self, name: str, keys: tuple[str, ...]) -> dict[str, Curve]:
        entries = self._object(self._data, name, name)
        found = {key: self._curve(entries, key, f"{name}.{key}") for key in keys}
        self.problems += [f"{name}.{key} is none of {', '.join(keys)}" for key in entries]
        return found

    def machine(self, name: str) -> Machine | None:
        entry = self._data.pop(name, None)
        try:
            return None if entry is None else Machine.from_data(entry)
        except (TypeError, KeyError, ValueError):
            self.problems.append(f"{name} must have a processor (a text) and num_threads (a number)")
            return None

    def link(self, name: str) -> LinkClass:
        entries = self._object(self._data, name, name)
        numbers = {key: self._number(entries, key, f"{name}.{key}") for key in LINK_NUMBERS}
        protocols = self._object(entries, "protocols", f"{name}.protocols") if "protocols" in entries else {}
        rows = entries.pop("measured", [])
        if not isinstance(rows, list):
            self.problems.append(f"{name}.measured is not a list")
            rows = []
        self.problems += [f"{name}.{key} is not an entry of a link" for key in entries]
        return LinkClass(
            **numbers,
            protocols=tuple(
                self._protocol(protocols, key, f"{name}.protocols.{key}") for key in list(protocols)
            ),
            measured=tuple(self._measured(row, f"{name}.measured[{i}]") for i, row in enumerate(rows)),
        )

    def _protocol(self, entries: dict[str, Any], key: str, path: str) -> Protocol:
        values = self._object(entries, key, path)
        numbers = {name: self._number(values, name, f"{path}.{name}") for name in PROTOCOL_NUMBERS}
        self.problems += [f"{path}.{name} is not an entry of a protocol" for name in values]
        return Protocol(name=key, **numbers)

    def _measured(self, row: Any, path: str) -> MeasuredCollective:
        is_row = isinstance(row, list) and len(row) in (4, 5) and all(map(is_number, row[1:]))
        if not is_row or row[0] not in COLLECTIVE_KINDS:
            entries = "op, ranks, bytes, seconds"
            self.problems.append(
                f"{path} is not [{entries}] or [{entries}, overlapped seconds] with an op of "
                f"{', '.join(COLLECTIVE_KINDS)}"
            )
            return MeasuredCollective(op="", num_ranks=1, num_bytes=1, seconds=1.0)
        return MeasuredCollective(**dict(zip(ROW_ENTRIES, row, strict=False)))

    def _curve(self, entries: dict[str, Any], key: str, path: str) -> Curve:
        if isinstance(entries.get(key), list):
            rows = entries.pop(key)
            if all(isinstance(row, list) and len(row) == 2 and all(map(is_number, row)) for row in rows):
                return Curve(tuple((float(size), float(value)) for size, value in rows))
            self.problems.append(f"{path} is neither a number nor a list of [size, value]")
            return Curve.constant(1.0)
        return Curve.constant(self._number(entries, key, path))

    def _object(self, entries: dict[str, Any], key: str, path: str) -> dict[str, Any]:
        value = entries.pop(key, None)
        if not isinstance(value, dict):
            self.problems.append(f"{path} is missing" if value is None else f"{path} is not an object")
            return {}
        return value

    def _number(self, entries: dict[str, Any], key: str, path: str) -> float:
        value = entries.pop(key, None)
        if is_number(value):
            return value
        if is_too_large(value):
            self.problems.append(f"{path} is too large a number")
        else:
            self.problems.append(
                f"{path} is missing" if value is None else f"{path} is not a number: {value!r}"
            )
        return 1.0
