"""Progress of long work: stages with their times, and lines on the logger "graphshard"."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

LOGGER = logging.getLogger("graphshard")


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Logs the start of a stage, and its duration if it succeeds."""
    LOGGER.info("%s ...", what)
    start = time.perf_counter()
    yield
    LOGGER.info("%s took %.1f s", what, time.perf_counter() - start)


@dataclass(slots=True)
class Stages:
    """Tells of each stage as it begins, and remembers how long it took."""

    progress: Callable[[str], None] | None
    seconds: dict[str, float] = field(default_factory=dict)
    _name: str = ""
    _began: float = 0.0

    def begin(self, name: str) -> None:
        self.end()
        self._name, self._began = name, time.perf_counter()
        if self.progress is not None:
            self.progress(name)

    def end(self) -> None:
        if self._name:
            self.seconds[self._name] = time.perf_counter() - self._began
        self._name = ""
