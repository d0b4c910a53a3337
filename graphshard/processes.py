"""Starts the processes that capture graphs."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
from multiprocessing.context import BaseContext

_METHOD = "forkserver"


def process_context() -> BaseContext:
    """A context whose processes start without this one's state; "spawn" if there is no fork server."""
    is_known = _METHOD in multiprocessing.get_all_start_methods()
    return multiprocessing.get_context(_METHOD if is_known else "spawn")


def start_early() -> None:
    """Starts a fork server early, for commands: it imports what captures need, for seconds, while the caller does."""
    context = process_context()
    if context.get_start_method() == _METHOD:
        context.set_forkserver_preload(["graphshard.inspection.sweep"])
        multiprocessing.forkserver.ensure_running()
