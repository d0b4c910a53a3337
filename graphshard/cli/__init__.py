"""The command line: ``graphshard inspect``, ``sweep``, ``diff``, ``calibrate``, ``cards``.

Read first: ``main``; each command has its file.
"""

from .main import entry

__all__ = [
    "entry",
]
