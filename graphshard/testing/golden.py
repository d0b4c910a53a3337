"""Golden files: expected text beside the test."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def check_golden(text: str, path: Path) -> None:
    """Compares ``text`` with the file at ``path``.

    The environment variable ``GRAPHSHARD_UPDATE_GOLDENS=1`` writes the file instead.

    Raises:
        AssertionError: the text differs (the message has the diff), or the file is missing.
    """
    if os.environ.get("GRAPHSHARD_UPDATE_GOLDENS") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    if not path.exists():
        raise AssertionError(f"no golden at {path}; write it with GRAPHSHARD_UPDATE_GOLDENS=1")
    expected = path.read_text()
    if text != expected:
        diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(path), "now", lineterm="")
        raise AssertionError("graph text differs from its golden:\n" + "\n".join(diff))
