"""Stop a run cleanly: Ctrl-C and SIGTERM ask, a second one kills, and no rank outlives its launcher.

torchrun passes Ctrl-C and SIGTERM on to its ranks and waits (30 s, `--shutdown-timeout`) before it kills
them: time to finish the step and save it. A SIGKILLed torchrun passes nothing on, so each rank watches for
its parent: otherwise orphaned ranks would go on writing into the folder a restarted run resumes from.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self

WATCH_SECONDS = 0.5


class StopRequest:
    """`with StopRequest() as stop:` turns SIGINT and SIGTERM into `stop.requested`.

    Until `stop.has_progress` is set there is nothing worth saving and the first signal ends the process.
    The former handlers are back after the block.
    """

    def __init__(self) -> None:
        self.requested = False
        self.has_progress = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self._previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.has_progress:
            os._exit(128 + number)
        self.requested = True


def exit_with_launcher() -> None:
    """Under torchrun, end this process soon after torchrun itself is gone (a daemon thread watches)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_SECONDS)
        print("the launcher is gone: this rank ends too", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="exit_with_launcher", daemon=True).start()
