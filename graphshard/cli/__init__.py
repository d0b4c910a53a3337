"""The command line: ``graphshard inspect``, ``sweep``, ``precompile``, ``diff``, ``cards`` and ``calibrate``.

Imports: all rooms below.

Read first: ``main``, which lists the subcommands; each has a file of its own.
"""

from .main import entry

__all__ = [
    "entry",
]
