"""The ``graphshard`` command.

One function per subcommand, registered in :data:`SUBCOMMANDS`. A mistake of the user (any
:class:`graphshard.errors.GraphShardError`) is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..errors import GraphShardError
from .calibrate_command import add_calibrate_arguments, run_calibrate
from .cards_command import add_cards_arguments, run_cards
from .diff_command import add_diff_arguments, run_diff
from .inspect_command import add_arguments, run_inspect
from .precompile_command import add_precompile_arguments, run_precompile
from .sweep_command import add_sweep_arguments, run_sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """One subcommand.

    Attributes:
        summary: its line in ``--help``.
        add_arguments: declares its options.
        run: runs it and returns the exit status.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None, *, ends_process: bool = False) -> int:
    """Runs one subcommand; returns the exit status, which is 2 after a mistake of the user.

    ``ends_process`` says that the process ends afterwards, so that garbage need not be collected.
    """
    options = make_parser().parse_args(arguments)
    options.ends_process = ends_process
    try:
        return SUBCOMMANDS[options.subcommand].run(options)
    except GraphShardError as error:
        if options.debug:
            raise
        print(f"graphshard {options.subcommand}: {error}", file=sys.stderr)
        return 2


def entry() -> NoReturn:
    """Runs the command and ends the process."""
    status = main(ends_process=True)
    gc.freeze()
    sys.exit(status)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
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
    "precompile": Subcommand(
        summary="compile a model for a later run, on one machine",
        add_arguments=add_precompile_arguments,
        run=run_precompile,
    ),
    "diff": Subcommand(
        summary="compare two reports of inspect", add_arguments=add_diff_arguments, run=run_diff
    ),
    "cards": Subcommand(
        summary="list hardware cards", add_arguments=add_cards_arguments, run=run_cards
    ),
    "calibrate": Subcommand(
        summary="measure this machine and write a hardware card",
        add_arguments=add_calibrate_arguments,
        run=run_calibrate,
    ),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
