"""What modules show of a parameter between a forward and its backward, if its unit stays gathered.

It has the values of the full parameter, and the gradient and the hooks of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat_autograd import without_torch_function
from ...errors import ParameterStateError


class StandsForShard(Tensor):
    """The values of a parameter between a forward and its backward; gradients and hooks are those of the shard.

    ``torch.autograd.grad`` takes it for the shard. An optimizer of it is refused, and ``backward(inputs=[it])`` is
    noticed by ``retains_grad``, which the engine sets.
    """

    shard: nn.Parameter
    name_in_model: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Ops treat it as what it was before."""
        with without_torch_function():
            if func is torch.autograd.grad:
                outputs, inputs, *rest = args
                inputs = tuple(each.shard if isinstance(each, StandsForShard) else each for each in inputs)
                args = (outputs, inputs, *rest)
            return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the shard.

        Raises:
            ParameterStateError: ``backward(inputs=...)`` was to give this tensor one.
        """
        if self.is_asked_for:
            raise lost_gradients([self.name_in_model])
        return self.shard.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.shard.grad = value

    @property
    def requires_grad(self) -> bool:
        """Of the shard: a parameter that is frozen or thawed here is so from the next forward on."""
        return self.shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.shard.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """``Tensor.requires_grad_`` of the shard."""
        self.shard.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of the values."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return copied

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """``Tensor.register_hook`` of the shard, as the next one."""
        return self.shard.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """See above."""
        return self.shard.register_post_accumulate_grad_hook(hook)

    @property
    def retains_grad(self) -> bool:
        """Asked by optimizers of what is no leaf.

        Raises:
            ParameterStateError: always.
        """
        raise ParameterStateError(
            f"parameter {self.name_in_model} is gathered here, between a forward and its backward, so an optimizer of "
            "it would train nothing: make the optimizer before the forward or after the backward, or call reshard() "
            "on the module first"
        )

    @property
    def is_asked_for(self) -> bool:
        """Whether a backward was to accumulate a gradient in it."""
        with without_torch_function():
            retains: bool = Tensor.retains_grad.__get__(self)
        return retains


class KeptParameter(StandsForShard, nn.Parameter):
    """A plain parameter."""


class KeptDTensor(StandsForShard, DTensor):
    """A parameter of tensor parallelism."""


def stand_for(shown: Tensor, shard: nn.Parameter, name: str) -> None:
    """Makes what modules show of a parameter stand for its shard; a class of tensors of the user's stays as it is."""
    if type(shown) not in (nn.Parameter, DTensor):
        return
    shown.__class__ = KeptParameter if type(shown) is nn.Parameter else KeptDTensor
    assert isinstance(shown, StandsForShard)
    shown.shard, shown.name_in_model = shard, name


def lost_writes(names: Sequence[str]) -> ParameterStateError:
    """The error for writes to full parameters that modules show between a forward and its backward."""
    return ParameterStateError(
        f"parameter(s) {', '.join(names)} were written to between a forward and its backward, where modules show "
        "gathered parameters that the backward frees, so the write would be lost: call reshard() on the module first, "
        "or write after the backward"
    )


def lost_gradients(names: Sequence[str]) -> ParameterStateError:
    """The error for ``backward(inputs=...)`` of what modules show between a forward and its backward."""
    return ParameterStateError(
        f"backward(inputs=...) was given parameter(s) {', '.join(names)} as they are between a forward and its "
        "backward, gathered, and they got no gradient: read model.parameters() before the forward, or call reshard() "
        "on the module before that"
    )
