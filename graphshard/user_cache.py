"""The user's cache folder: what one run has measured or planned and a later run uses."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from .progress import LOGGER

#: Environment that names the folder; empty for none.
CACHE_VARIABLE = "GRAPHSHARD_CACHE"

#: An unfinished file that is so old was left by a process that was killed.
_UNFINISHED_SECONDS = 3600.0


def is_switched_off() -> bool:
    """Whether the user wants nothing to be kept. It is the same on ranks that have no home folder."""
    return os.environ.get(CACHE_VARIABLE) == ""


def cache_folder(*parts: str) -> Path | None:
    """``$GRAPHSHARD_CACHE``, or ``~/.cache/graphshard``, and a folder in it.

    None if nothing is to be kept, or if the user has no home folder.
    """
    if is_switched_off():
        return None
    try:
        folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "graphshard")
    except RuntimeError as error:
        LOGGER.info("nothing is kept: %s (%s names a folder)", error, CACHE_VARIABLE)
        return None
    return folder.joinpath(*parts)


def write_in_one_step(file: Path, content: str | bytes) -> bool:
    """Writes a file; a reader finds the old one or the new one. False, with a line in the log, if it cannot."""
    # Processes of several machines, or of several containers, may share the folder and have equal numbers.
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}.{os.urandom(4).hex()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(file)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        LOGGER.info("%s cannot be written (%s), so it is not kept", file, error)
        return False
    return True


def keep_newest(folder: Path, most: int, *, suffix: str = ".json", beside: str = "") -> None:
    """Deletes the oldest files of a folder, and what processes that were killed have left of others.

    Args:
        folder: the folder. What cannot be deleted stays.
        most: how many files stay.
        suffix: the end of the names of these files.
        beside: the end of the names of files that belong to others; they go with these.
    """
    with suppress(OSError):
        files = [file for file in folder.glob(f"*{suffix}") if not beside or not file.name.endswith(beside)]
        for file in sorted(files, key=_written_at, reverse=True)[most:]:
            file.unlink(missing_ok=True)
            if beside:
                file.with_name(file.stem + beside).unlink(missing_ok=True)
        for file in folder.glob(f"*{suffix}.*"):
            if _written_at(file) < time.time() - _UNFINISHED_SECONDS:
                file.unlink(missing_ok=True)


def _written_at(file: Path) -> float:
    """When a file was written; later than all others for one that is gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return math.inf
