"""Progress of long work: the time of each stage, told to a callback or to the logger "graphshard"."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

LOGGER = logging.getLogger("graphshard")


@dataclass(slots=True)
class Stages:
    """Stages that follow each other. The name of each is told when it begins; its seconds are kept when it ends.

    Attributes:
        progress: is called with the name of each stage.
        seconds: by name, of the stages that have ended.
    """

    progress: Callable[[str], None] | None
    seconds: dict[str, float] = field(default_factory=dict)
    _name: str = ""
    _began: float = 0.0

    def begin(self, name: str) -> None:
        """Ends the current stage and begins another."""
        self.end()
        self._name, self._began = name, time.perf_counter()
        if self.progress is not None:
            self.progress(name)

    def end(self) -> None:
        """Ends the current stage, if there is one."""
        if self._name:
            self.seconds[self._name] = time.perf_counter() - self._began
        self._name = ""


@contextlib.contextmanager
def logged(name: str) -> Iterator[None]:
    """Logs the start of a stage, and its duration if it succeeds."""
    stages = Stages(lambda name: LOGGER.info("%s ...", name))
    stages.begin(name)
    yield
    stages.end()
    LOGGER.info("%s took %.1f s", name, stages.seconds[name])
