"""Shows what long work is doing: a line that changes on a terminal, and one line a stage in a log.

A stage that takes less than :data:`PATIENCE_SECONDS` shows nothing. Of stages in each other the innermost is shown.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

#: A stage is shown once it has taken so long.
PATIENCE_SECONDS = 2.0


@dataclass(slots=True, eq=False)
class _Stage:
    name: str
    detail: str = ""
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"graphshard: {self.name}" + (f": {self.detail}" if self.detail else "")


class ShownProgress:
    """The stages of one compilation, as a person sees them.

    Args:
        is_on: show anything at all.
        stream: where lines go; None for stderr.
    """

    def __init__(self, *, is_on: bool = True, stream: TextIO | None = None) -> None:
        self._is_on, self._stream = is_on, stream
        self._stages: list[_Stage] = []
        self._status: Any = None
        self._lock = threading.RLock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Work of this name happens inside."""
        if not self._is_on:
            yield
            return
        stage = _Stage(name)
        timer = threading.Timer(PATIENCE_SECONDS, self._show, (stage,))
        timer.daemon = True
        with self._lock:
            self._stages.append(stage)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._stages.remove(stage)
                self._refresh()

    def tell(self, detail: str) -> None:
        """Says how far the current stage is."""
        with self._lock:
            if self._stages:
                self._stages[-1].detail = detail
                self._refresh()

    def _show(self, stage: _Stage) -> None:
        with self._lock:
            if not self._stages or stage is not self._stages[-1]:
                return  # it is over, or another lies in it
            stream = self._stream or sys.stderr
            if not stream.isatty():
                print(stage, file=stream, flush=True)
                return
            if self._status is None:
                from rich.console import Console  # only where something is shown

                self._status = Console(file=stream).status(str(stage))
                self._status.start()
            self._refresh()

    def _refresh(self) -> None:
        if self._status is None:
            return
        if self._stages:
            self._status.update(str(self._stages[-1]))
        else:
            self._status.stop()
            self._status = None
