"""What a wrapper's methods check before they start: this is the root, and no forward or backward runs; ``no_sync``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .._compat import in_backward
from ..errors import NotRootError, TrainingStateError
from ..ir import UNIT
from .wrapper_state import WrapperState, state_of, wrappers_in


def own_state(wrapper: nn.Module) -> WrapperState:
    """The state of a wrapper."""
    state = state_of(wrapper)
    assert state is not None
    return state


def check_root(wrapper: nn.Module, method: str) -> None:
    """Refuses a method on a wrapper inside another."""
    if not own_state(wrapper).is_root:
        raise NotRootError(
            f"FullyShardedDataParallel.{method} was called on an inner wrapper; call it on the outermost one, "
            "fsdp_modules(model, root_only=True)"
        )


def check_idle(wrapper: nn.Module, method: str) -> None:
    """Refuses a method in a forward, in a backward, or while full parameters are shown."""
    units = [state.unit for _, state in wrappers_in(wrapper) if state.unit is not None]
    in_forward = any(unit.__dict__[UNIT].tree.in_forward for unit in units)
    is_summoned = any(state.is_summoned for _, state in wrappers_in(wrapper))
    if not (in_forward or in_backward() or is_summoned):
        return
    where = "summon_full_params()" if is_summoned else ("a forward" if in_forward else "a backward")
    raise TrainingStateError(
        f"FullyShardedDataParallel.{method} was called inside {where}; call it between training steps, when neither a "
        "forward, a backward nor summon_full_params() of the model runs"
    )


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
