"""Waits that last until the backend holds nothing of the collective.

Gloo's threads tell of the end of a collective first and let go of its tensors then. Where such a thread loses its core
in between, what the graph frees behind the wait stays, by up to a time slice of the system, and a step holds more than
its plan says. Compiled halves with a memory budget wait for that, too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .._compat import num_holders, num_memory_holders

#: What is held for longer is no longer waited for.
PATIENCE_SECONDS = 1.0

#: Between looks: enough for a thread of this process to get the core.
_PAUSE_SECONDS = 1e-5


def wait_until_released(result: Tensor) -> None:
    """As ``_c10d_functional.wait_tensor``, and until nothing but Python code holds ``result`` or its memory.

    Args:
        result: what a collective gave, alone in memory of its own; the only result, or the last that is waited for.

    Warns:
        UserWarning: it is held for longer than ``PATIENCE_SECONDS`` after its wait; the step goes on.
    """
    # A thread that lets go of views of a tensor lets go of the tensor first.
    _wait(result, lambda: num_holders(result) + num_memory_holders(result))


def wait_until_released_in_place(result: Tensor) -> None:
    """As :func:`wait_until_released` of a tensor that a collective wrote to, whose memory others may share."""
    _wait(result, lambda: num_holders(result))


def _wait(result: Tensor, count_holders: Callable[[], int]) -> None:
    torch.ops._c10d_functional.wait_tensor.default(result)
    if count_holders() == 0:
        return
    deadline = time.monotonic() + PATIENCE_SECONDS
    while count_holders() > 0:
        if time.monotonic() > deadline:
            warnings.warn(
                f"graphshard: the backend still holds a collective's result of shape {tuple(result.shape)} "
                f"{PATIENCE_SECONDS:g} s after its wait, so this step may hold more than its memory_budget; "
                "leave some room in it, or compile without one if every step says so",
                stacklevel=3,
            )
            return
        time.sleep(_PAUSE_SECONDS)
