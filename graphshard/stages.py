"""Stages of long work: who watches is told of each as it begins, and each one's time is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


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
