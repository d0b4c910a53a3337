"""Decisions of earlier processes in the user's cache folder: the rank that decides looks there before it plans.

The others follow what it decides, as they follow a plan that was made now. So all ranks use a kept plan, or none does,
and what lies in the cache of another rank does not matter. The caller's key has all that a plan depends on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..progress import LOGGER
from ..user_cache import cache_folder, keep_newest, write_in_one_step

#: The most plans that are kept; of more, the oldest are deleted.
_MOST_PLANS = 1000


def read_plan(key: str) -> dict[str, Any] | None:
    """The plan of an earlier process; None if there is none, or if its file cannot be read."""
    file = _file_of(key)
    if file is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        data = json.loads(file.read_text())
        if data["key"] == key:
            plan: dict[str, Any] = dict(data["plan"])
            LOGGER.info("the plan of an earlier run is used: %s", file)
            return plan
    return None


def keep_plan(key: str, plan: Mapping[str, Any]) -> None:
    """Keeps a plan for later processes, where there is a cache folder that can be written."""
    file = _file_of(key)
    if file is not None and write_in_one_step(file, json.dumps({"key": key, "plan": dict(plan)})):
        keep_newest(file.parent, _MOST_PLANS)


def _file_of(key: str) -> Path | None:
    folder = cache_folder("plans")
    return None if folder is None else folder / f"{key[:32]}.json"
