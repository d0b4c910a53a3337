"""Waits for collectives of gloo with a time limit.

Gloo's gathers and all-reduces take a limit. Its reduce-scatters are all-reduces with a copy behind them, and the
wait for one ignores the limit (torch 2.13). A receive whose wait ends by its limit closes the connections of its group.
So a thread waits for those, and the caller waits for the thread.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from queue import SimpleQueue
from weakref import finalize

import torch.distributed as dist


class WaitingThread:
    """A thread that waits for collectives, one after the other. It ends with this object."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[LimitedWork | None] = SimpleQueue()
        threading.Thread(
            target=_wait_for_each, args=(self._queue,), daemon=True, name="graphshard-waits"
        ).start()
        finalize(self, self._queue.put, None)

    def wait_for(self, work: LimitedWork) -> None:
        """Has the thread wait for a collective."""
        self._queue.put(work)


class LimitedWork:
    """A collective of gloo that can be waited for with a time limit.

    Args:
        work: the collective.
        thread: waits for it; None if its own wait takes a limit.
    """

    def __init__(self, work: dist.Work, thread: WaitingThread | None) -> None:
        self._work = work
        self._error: RuntimeError | None = None
        self._ended: threading.Lock | None = None
        if thread is not None:
            self._ended = threading.Lock()
            self._ended.acquire()
            thread.wait_for(self)

    def is_over(self, seconds: float) -> bool:
        """Waits for some seconds, more than 0; whether the collective has ended, be it by an error."""
        if self._ended is not None:
            if not self._ended.acquire(timeout=seconds):
                return False
            self._ended.release()
            return True
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return self._work.is_completed()
        return True

    def finish(self) -> None:
        """Waits without a limit, and raises the error that has ended the collective."""
        if self._ended is None:
            self._work.wait()
            return
        with self._ended:
            if self._error is not None:
                raise self._error

    def wait_in_thread(self) -> None:
        """Waits in the thread that does so."""
        assert self._ended is not None
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        finally:
            self._ended.release()


def _wait_for_each(queue: SimpleQueue[LimitedWork | None]) -> None:
    while (work := queue.get()) is not None:
        work.wait_in_thread()
        del work  # the loop must not keep its tensors
