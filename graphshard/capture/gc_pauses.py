"""gc_pauses: keeps Python's garbage collector out of long work on graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, Python collects no garbage.

    Work on graphs makes millions of objects that live to its end, and each full collection visits all of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def spared_by_garbage_collection() -> Iterator[None]:
    """Inside, collections do not visit the objects that exist now: captured graphs, which live on."""
    if gc.get_freeze_count():
        yield  # somebody else froze objects: do not unfreeze those
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
