"""``graphshard diff A.json B.json``: the differences between two reports."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import UsageError


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``graphshard diff``."""
    parser.add_argument("before", type=Path, metavar="A.json", help="report of graphshard inspect --json")
    parser.add_argument("after", type=Path, metavar="B.json", help="another one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the differences as data")


def run_diff(options: argparse.Namespace) -> int:
    """Prints the differences; the exit status is 0 with and without them."""
    out = options.json
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UsageError(
            f"--json {out}: its folder does not exist, or it is a folder itself; name a file in another"
        )
    from rich.console import Console

    from ..report import diff_reports, diff_tables

    diff = diff_reports(options.before, options.after)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(diff_tables(diff, str(options.before), str(options.after)), crop=False)
    if out is not None:
        out.write_text(json.dumps(diff.to_dict(), allow_nan=False) + "\n")
        print(f"wrote {out}")
    return 0
