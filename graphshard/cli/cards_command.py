"""``graphshard cards``: the main numbers of hardware cards as a table, and the cards that were measured here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..cost import HardwareCard, known_cards, load_card, read_kept_card
from ..errors import CardError, UsageError
from ..user_cache import cache_folder

GIB = 2**30

HEADER = (
    "card", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "memory GiB", "ranks/node", "in node GB/s",
    "between GB/s",
)  # fmt: skip


def add_cards_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="CARD", help="names or files; default all that ship or were measured here"
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete kept cards: those named, or all; graphs measure again"
    )


def run_cards(options: argparse.Namespace) -> int:
    """Prints the main numbers of cards as a table, or deletes kept cards."""
    if options.delete:
        return _delete(tuple(options.names))
    asks_for_kept = not options.names or any((_folder() / f"{name}.json").exists() for name in options.names)
    kept = _kept() if asks_for_kept else {}
    shipped = [name for name in options.names or known_cards() if name not in kept]
    if shipped:
        print(format_table([HEADER, *(_row(load_card(name)) for name in shipped)]))
    shown = {name: each for name, each in kept.items() if name in options.names or not options.names}
    if shown:
        print(f"\nmeasured for hardware='auto', in {_folder()}:" if shipped else "")
        print(format_table([HEADER, *((name, *_row(card)[1:]) for name, (_, card) in shown.items())]))
        for name, (key, card) in shown.items():
            print(f"{name}: host {key.get('host')}, {key.get('ranks')}, {card.summary}")
    return 0


def _folder() -> Path:
    """Where cards are kept; without a cache, a folder that does not exist."""
    return cache_folder("cards") or Path(os.devnull, "cards")


def _kept() -> Mapping[str, tuple[Mapping[str, str], HardwareCard]]:
    """Keys and cards of the kept ones by name, those that can be read."""
    found = {}
    for file in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError, CardError):
            found[file.stem] = read_kept_card(file)
    return found


def _delete(names: tuple[str, ...]) -> int:
    """Deletes kept cards.

    Raises:
        UsageError: a name is none of a kept card.
    """
    if unknown := sorted(set(names) - set(_kept())):
        raise UsageError(f"no kept card {', '.join(unknown)} in {_folder()}; `graphshard cards` lists them")
    from ..hardware import delete_cards

    gone = delete_cards(names)
    print("\n".join([f"deleted {file}" for file in gone] or [f"no kept cards in {_folder()}"]))
    return 0


def _row(card: HardwareCard) -> tuple[str, ...]:
    peaks = [card.peak_flops.get(dtype) for dtype in ("bfloat16", "float32")]
    return (
        card.name,
        *("-" if peak is None else f"{peak / 1e12:.4g}" for peak in peaks),
        f"{card.memory_bandwidth / 1e9:.4g}",
        f"{card.memory_bytes / GIB:.4g}",
        str(card.ranks_per_node),
        f"{card.intra_node.bandwidth / 1e9:.4g}",
        f"{card.inter_node.bandwidth / 1e9:.4g}",
    )


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as aligned columns: the first one to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (text.ljust(width) if i == 0 else text.rjust(width)
                          for i, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)
