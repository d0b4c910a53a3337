"""The ``graphshard`` command.

One function per subcommand, registered in :data:`SUBCOMMANDS`. A mistake of the user (any
:class:`graphshard.errors.GraphShardError`) is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from ..cost import CalibrationJob, ProbeSizes, calibrate, is_launched, known_cards, load_card
from ..errors import GraphShardError, UsageError
from .diff_command import add_diff_arguments, run_diff
from .inspect_command import add_arguments, run_inspect
from .sweep_command import add_sweep_arguments, run_sweep

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """One word after ``graphshard``.

    Attributes:
        summary: for ``--help``.
        add_arguments: declares its options.
        run: does it; returns the exit status.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None, *, ends_process: bool = False) -> int:
    """Runs one subcommand; the exit status is 2 after a mistake of the user.

    With ``ends_process`` what it makes need not be looked through for garbage, since the process ends anyway.
    """
    options = _parser().parse_args(arguments)
    options.ends_process = ends_process
    try:
        return SUBCOMMANDS[options.subcommand].run(options)
    except GraphShardError as error:
        if options.debug:
            raise
        print(f"graphshard {options.subcommand}: {error}", file=sys.stderr)
        return 2


def entry() -> NoReturn:
    """The console script."""
    status = main(ends_process=True)
    gc.freeze()
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="graphshard", description="Fully sharded data parallelism as a compiler."
    )
    words = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for name, subcommand in SUBCOMMANDS.items():
        summary = subcommand.summary
        subcommand.add_arguments(words.add_parser(name, help=summary, description=summary, parents=[shared]))
    return parser


def _cards_arguments(parser: argparse.ArgumentParser) -> None:
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
    """Rows as aligned columns, the first one to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (text.ljust(width) if i == 0 else text.rjust(width)
                          for i, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="file of the card (JSON)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to spawn without torchrun (default 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default cuda under torchrun where there is one, else cpu"
    )
    parser.add_argument("--like", default="", metavar="CARD", help="card that gives the links not measured")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a trial of the command, no more")


def run_calibrate(options: argparse.Namespace) -> int:
    """Measures this machine and writes a card."""
    device = options.device or ("cuda" if is_launched() and torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here")
    if options.like:
        load_card(options.like)  # complain before measuring
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() else max(options.nproc, 1)
    num_threads = 0 if "OMP_NUM_THREADS" in os.environ else max((os.cpu_count() or 1) // ranks_here, 1)
    job = CalibrationJob(
        out=options.out,
        device_type=device,
        sizes=ProbeSizes.for_device(device, quick=options.quick),
        num_threads=num_threads,
        like=options.like,
    )
    if calibrate(job, num_ranks=options.nproc, report=print_progress) is not None:
        print(f"wrote {options.out}; use it with hardware={str(options.out)!r}")
    return 0


def print_progress(line: str) -> None:
    """Progress goes to stderr, so that stdout holds results only."""
    print(f"  {line}", file=sys.stderr, flush=True)


#: Every subcommand, in the order of ``--help``.
SUBCOMMANDS: dict[str, Subcommand] = {
    "inspect": Subcommand(
        summary="predict a training step of a model on N devices", add_arguments=add_arguments, run=run_inspect
    ),
    "sweep": Subcommand(
        summary="predict a training step on many meshes and batch sizes",
        add_arguments=add_sweep_arguments,
        run=run_sweep,
    ),
    "diff": Subcommand(
        summary="compare two reports of inspect", add_arguments=add_diff_arguments, run=run_diff
    ),
    "cards": Subcommand(
        summary="list hardware cards", add_arguments=_cards_arguments, run=run_cards
    ),
    "calibrate": Subcommand(
        summary="measure this machine and write a hardware card",
        add_arguments=_calibrate_arguments,
        run=run_calibrate,
    ),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
