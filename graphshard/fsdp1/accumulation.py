"""``no_sync``: backwards that leave gradients unreduced, for a later one to add to its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .training_state import check_idle, check_root
from .wrapper_state import WrapperState, wrappers_in


@contextmanager
def without_sync(wrapper: nn.Module) -> Iterator[None]:
    """Gradients add up unreduced; parameters that the strategy keeps from the forward stay gathered after the backward.

    Raises:
        NotRootError: (a RuntimeError) the wrapper is inside another.
        TrainingStateError: (a ValueError) a forward or a backward is running.
    """
    check_root(wrapper, "no_sync")
    check_idle(wrapper, "no_sync")
    states = [state for _, state in wrappers_in(wrapper)]
    _set_sync([state for state in states if state.no_sync_depth == 0], is_on=False)
    for state in states:
        state.no_sync_depth += 1
    try:
        yield
    finally:
        for state in states:
            state.no_sync_depth -= 1
        _set_sync([state for state in states if state.no_sync_depth == 0], is_on=True)


def _set_sync(states: list[WrapperState], *, is_on: bool) -> None:
    for state in states:
        if state.unit is not None:
            state.unit.set_requires_gradient_sync(is_on, recurse=False)
            if state.options.keeps_gathered:
                state.unit.set_reshard_after_backward(is_on, recurse=False)
