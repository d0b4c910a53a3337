"""The files of kept steps, in the user's cache folder."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...progress import LOGGER
from ...user_cache import cache_folder, keep_newest, write_in_one_step

#: The most steps that are kept; of more, the oldest are deleted. One of 32 layers takes some megabytes.
_MOST_STEPS = 100

_SUFFIX = ".step"


def is_kept_here() -> bool:
    """Whether there is a folder for steps."""
    return cache_folder("steps") is not None


def read_step(name: str) -> Any:
    """What was kept under a name; None if there is nothing, or if it cannot be read."""
    file = _file_of(name)
    if file is None or not file.exists():
        return None
    try:
        return pickle.loads(file.read_bytes())
    except Exception as error:  # whatever a damaged file makes pickle raise: it stops no run
        LOGGER.info("the kept step %s cannot be read (%r)", file, error)
        return None


def keep_step(name: str, step: Any) -> None:
    """Keeps a step under a name, where there is a folder that can be written."""
    file = _file_of(name)
    if file is not None and write_in_one_step(file, pickle.dumps(step)):
        keep_newest(file.parent, _MOST_STEPS, suffix=_SUFFIX)


def forget_step(name: str) -> None:
    """Deletes what is kept under a name."""
    file = _file_of(name)
    if file is not None:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _file_of(name: str) -> Path | None:
    folder = cache_folder("steps")
    return None if folder is None else folder / f"{name[:32]}{_SUFFIX}"
