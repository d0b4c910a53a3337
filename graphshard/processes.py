"""How processes that capture are started."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
from multiprocessing.context import BaseContext

_METHOD = "forkserver"


def process_context() -> BaseContext:
    """Starts processes without the state of this one; "spawn" where there is no fork server."""
    is_known = _METHOD in multiprocessing.get_all_start_methods()
    return multiprocessing.get_context(_METHOD if is_known else "spawn")


def start_early() -> None:
    """For commands: a fork server imports what captures need while the caller does, which takes seconds."""
    context = process_context()
    if context.get_start_method() == _METHOD:
        context.set_forkserver_preload(["graphshard.inspection.sweep"])
        multiprocessing.forkserver.ensure_running()
