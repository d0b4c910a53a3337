"""What a wrapper's methods check before they start: this is the root, and no forward or backward runs."""

from __future__ import annotations

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
