"""The user's cache folder: what one run has measured or planned and a later run uses."""

from __future__ import annotations

import os
from pathlib import Path

from .progress import LOGGER

#: Environment that names the folder; empty for none.
CACHE_VARIABLE = "GRAPHSHARD_CACHE"


def cache_folder(*parts: str) -> Path | None:
    """``$GRAPHSHARD_CACHE``, or ``~/.cache/graphshard``, and a folder in it; None if nothing is to be kept."""
    named = os.environ.get(CACHE_VARIABLE)
    if named == "":
        return None
    return (Path(named) if named else Path.home() / ".cache" / "graphshard").joinpath(*parts)


def write_in_one_step(file: Path, text: str) -> bool:
    """Writes a file; a reader finds the old one or the new one. False, with a line in the log, if it cannot."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text)
        unfinished.replace(file)
    except OSError as error:
        LOGGER.info("%s cannot be written (%s), so it is not kept", file, error)
        return False
    return True
