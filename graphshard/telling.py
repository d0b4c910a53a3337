"""Progress of long work, for whoever listens to the logger "graphshard"."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

LOGGER = logging.getLogger("graphshard")


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Says at level INFO that something begins, and how many seconds it took; of what fails, only the first."""
    LOGGER.info("%s ...", what)
    start = time.perf_counter()
    yield
    LOGGER.info("%s took %.1f s", what, time.perf_counter() - start)
