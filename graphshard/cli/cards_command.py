"""``graphshard cards``: the main numbers of hardware cards as a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..cost import known_cards, load_card

GIB = 2**30


def add_cards_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="CARD", help="names or files; default all that ship")


def run_cards(options: argparse.Namespace) -> int:
    """Prints the main numbers of cards as a table."""
    header = (
        "card", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "memory GiB", "ranks/node", "in node GB/s",
        "between GB/s",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for name in options.names or known_cards():
        card = load_card(name)
        peaks = [card.peak_flops.get(dtype) for dtype in ("bfloat16", "float32")]
        rows.append((
            card.name,
            *("-" if peak is None else f"{peak / 1e12:.4g}" for peak in peaks),
            f"{card.memory_bandwidth / 1e9:.4g}",
            f"{card.memory_bytes / GIB:.4g}",
            str(card.ranks_per_node),
            f"{card.intra_node.bandwidth / 1e9:.4g}",
            f"{card.inter_node.bandwidth / 1e9:.4g}",
        ))  # fmt: skip
    print(format_table(rows))
    return 0


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as aligned columns: the first one to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (text.ljust(width) if i == 0 else text.rjust(width)
                          for i, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)
