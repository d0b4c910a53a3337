"""Waits that last until gloo holds nothing of the collective.

A thread of gloo first reports the end of a collective and then releases its tensors. If the thread loses its core in
between, memory that the graph frees after the wait stays allocated for up to a time slice of the system, and the step
holds more than its plan says. Compiled halves with a memory budget therefore wait for the release too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..._compat import num_holders, num_memory_holders

#: After so long a wait gives up, with a warning.
PATIENCE_SECONDS = 1.0

#: Pause between two looks: enough for another thread of this process to get the core.
_PAUSE_SECONDS = 1e-5


def wait_until_released(result: Tensor) -> None:
    """Waits like ``_c10d_functional.wait_tensor``, then until only Python code holds ``result`` or its memory.

    Args:
        result: the result of a collective, alone in its memory; of several results, the last that is waited for.

    Warns:
        UserWarning: it is held for longer than ``PATIENCE_SECONDS`` after its wait; the step goes on.
    """
    # A thread that holds views of a tensor releases the tensor first.
    _wait(result, lambda: num_holders(result) + num_memory_holders(result))


def wait_until_released_in_place(result: Tensor) -> None:
    """Like :func:`wait_until_released`, for a tensor that a collective wrote to: others may share its memory."""
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
