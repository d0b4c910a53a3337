"""How processes that capture are started: from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
from multiprocessing.context import BaseContext

_METHOD = "forkserver"


def process_context() -> BaseContext:
    """Starts processes without the state of this one; "spawn" where there is no fork server."""
    if _METHOD not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context(_METHOD)
    context.set_forkserver_preload(["graphshard.sweeping"])
    return context


def start_early() -> None:
    """Lets the fork server import while the caller does: both take seconds."""
    if process_context().get_start_method() == _METHOD:
        multiprocessing.forkserver.ensure_running()
