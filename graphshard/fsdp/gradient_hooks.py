"""Hooks of a shard in a backward that has no gradient for it.

Autograd visits the leaf of each shard that a gather has read. It calls the leaf's hooks also if the gather gives no
gradient, because that waits for a reduction or the forward has not used the parameter. Hooks of a module that is not
sharded are not called then. So :func:`expect_no_gradient` puts a function in the place of each hook that asks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor
from torch.distributed.tensor import DTensor

#: Attribute of a parameter: its gradient, and the version of that, when a backward had none for it.
_BEFORE = "_graphshard_gradient_before"


class HookOfGradient:
    """A hook of ``Tensor.register_hook`` that is called with gradients, and not with None."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Any:
        """Calls the hook, if there is a gradient."""
        return None if grad is None else self._hook(grad)


class _HookOfAddition:
    """A hook of ``register_post_accumulate_grad_hook`` that is called only if a gradient was added."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, param: Tensor) -> None:
        before = vars(param).get(_BEFORE)
        if before is not None:
            grad, version = before
            if param.grad is grad() and _version_of(param.grad) == version:
                return
            del vars(param)[_BEFORE]
        self._hook(param)


def expect_no_gradient(param: Tensor) -> None:
    """Keeps the hooks of a leaf from being called in the running backward, unless it gets a gradient from elsewhere."""
    hooks: Any = param._backward_hooks
    for key, hook in (hooks or {}).items():
        if type(hook) is not HookOfGradient:
            hooks[key] = HookOfGradient(hook)
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    for key, hook in (hooks or {}).items():
        if type(hook) is not _HookOfAddition:
            hooks[key] = _HookOfAddition(hook)
    if hooks:
        grad = param.grad
        vars(param)[_BEFORE] = (ref(grad) if grad is not None else lambda: None), _version_of(grad)


def _version_of(grad: Tensor | None) -> tuple[int, int]:
    if grad is None:
        return 0, 0
    return grad._version, grad._local_tensor._version if isinstance(grad, DTensor) else 0
