"""``register_comm_hook``: a function of the user reduces gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from ..errors import ConflictingCommError, OptionError, UnsupportedShardingError
from .training_state import own_state
from .wrapper_state import wrappers_in


class HookedReduceScatter:
    """FSDP1's hook as an object that ``set_custom_reduce_scatter`` takes.

    A hook may replace the memory of the tensors it gets, as those that compress do. So it gets tensors of its own.
    """

    def __init__(self, state: Any, hook: Callable[..., Any]) -> None:
        self._state, self._hook = state, hook

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Calls the hook with the flat gradient and room for this rank's piece of the reduced one."""
        piece = output_tensor.detach()
        self._hook(self._state, input_tensor.detach(), piece)
        output_tensor.copy_(piece)


def register_hook(wrapper: nn.Module, state: Any, hook: Callable[..., Any]) -> None:
    """Makes ``hook(state, gradient, piece)`` reduce the gradients of all wrappers; it averages them, too.

    Raises:
        ConflictingCommError: (an AssertionError) an inner wrapper, a second hook, or a hybrid strategy.
        OptionError: (a ValueError) the hook cannot be called.
        UnsupportedShardingError: (a NotImplementedError) NO_SHARD on several ranks.
    """
    if not own_state(wrapper).is_root:
        raise ConflictingCommError(
            "register_comm_hook was called on an inner wrapper; one hook reduces the gradients of the whole model: "
            "call it on the outermost wrapper"
        )
    if not callable(hook):
        raise OptionError(f"register_comm_hook: {hook!r} cannot be called with (state, gradient, piece)")
    states = [each for _, each in wrappers_in(wrapper)]
    for each in states:
        if each.has_comm_hook:
            raise ConflictingCommError("register_comm_hook: this model has a hook; register one only")
        if each.options.is_hybrid:
            raise ConflictingCommError(
                f"register_comm_hook: {each.options.strategy} reduces over two axes, and a hook over one; use "
                "FULL_SHARD or SHARD_GRAD_OP"
            )
        if each.options.strategy is ShardingStrategy.NO_SHARD:
            raise UnsupportedShardingError(
                "register_comm_hook: a hook takes the place of the reduce-scatter, and NO_SHARD has none; use "
                "FULL_SHARD or SHARD_GRAD_OP, or DistributedDataParallel with its hooks"
            )
    for each in states:
        each.has_comm_hook = True
        if each.unit is not None:
            each.unit.set_custom_reduce_scatter(HookedReduceScatter(state, hook))
            each.unit.set_gradient_divide_factor(1.0)
