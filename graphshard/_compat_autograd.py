"""Hooks of saved tensors, tensor subclasses, inputs of joint graphs; private torch names, as in ``_compat``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch._C._autograd import (  # checked: 2.11, 2.13
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput  # checked: 2.13

#: A context in which tensor subclasses are plain tensors to torch's functions (checked: 2.13).
without_torch_function = torch._C.DisableTorchFunctionSubclass

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def hooks_in_force() -> Hooks | None:
    """The hooks (pack, unpack) that autograd calls for tensors that it saves now; None if there are none."""
    hooks: Hooks | None = _top_saved_tensors_default_hooks(True)
    return hooks


def hooks_are_enabled() -> bool:
    """Whether hooks of saved tensors may be set; some transforms of ``torch.func`` forbid it (checked: 2.11, 2.13)."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()
    return enabled


def is_of_checkpoint(hooks: Hooks) -> bool:
    """Whether hooks are those of ``torch.utils.checkpoint``, which must see all tensors that are saved."""
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def unseen_by_checkpoint(
    pack: Callable[[torch.Tensor], Any], others: Hooks | None = None
) -> Callable[[torch.Tensor], Any]:
    """``pack``, marked as none of the user's hooks, or as one around ``others``, which are.

    A selective checkpoint warns of the user's hooks, or gives them what it saves (checked: 2.14; no effect before).
    """
    vars(pack).update(_checkpoint_internal=True, _user_hooks=others)
    return pack


class HooksOf:
    """A context with the given hooks of saved tensors in force; None: without the innermost that are."""

    def __init__(self, hooks: Hooks | None) -> None:
        self._hooks = hooks
        self._hidden: Hooks | None = None

    def __enter__(self) -> None:
        if self._hooks is not None:
            _push_saved_tensors_default_hooks(*self._hooks)
            return
        self._hidden = hooks_in_force()
        if self._hidden is not None:
            _pop_saved_tensors_default_hooks()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._hooks is not None:
            _pop_saved_tensors_default_hooks()
        elif self._hidden is not None:
            _push_saved_tensors_default_hooks(*self._hidden)


def are_in_order(grads: Iterable[torch.Tensor | None]) -> bool:
    """Whether what runs now on the devices of gradients comes in the order of their default streams.

    To ask takes microseconds on a GPU, so it is asked once for all gradients of a backward.
    """
    return all(
        _is_on_default_stream(device) for device in {grad.device for grad in grads if grad is not None}
    )


def _is_on_default_stream(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    module = torch.get_device_module(device)
    default_stream = getattr(module, "default_stream", None)
    return default_stream is not None and module.current_stream(device) == default_stream(device)


def accumulates_in_leaf(node: Any, *, is_in_order: bool) -> bool:
    """Whether a node is that of a leaf, and all that it would do with a gradient in the running backward is to add it.

    Not if hooks of the leaf want it, ``torch.autograd.grad`` returns it, ``backward(inputs=...)`` leaves it out,
    ``create_graph=True`` records the addition, the leaf was frozen since the forward, or streams of a device have to
    wait for each other (checked: 2.13).

    Args:
        node: whatever follows in the backward.
        is_in_order: :func:`are_in_order` of the gradients of the running backward.
    """
    leaf = getattr(node, "variable", None)
    if (
        leaf is None
        or not is_in_order
        or not leaf.requires_grad
        or leaf._backward_hooks
        or leaf._post_accumulate_grad_hooks
        or torch.is_grad_enabled()
    ):
        return False
    return is_in_backward(node)


def backward_id() -> int:
    """A number for the running backward; one inside of another has its own (checked: 2.13)."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_in_backward(node: Any) -> bool:
    """Whether the running backward runs a node, or has run it (checked: 2.13)."""
    try:
        is_run: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf that torch.autograd.grad was given; or another engine runs the backward
        return False
    return is_run


def is_asked_for(node: Any) -> bool:
    """Whether the running backward is a ``torch.autograd.grad`` that returns the gradient of a leaf (checked: 2.13).

    Args:
        node: of the leaf.
    """
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot say it of a leaf that autograd.grad was given
        return True
    return False


def compiles_backwards() -> bool:
    """Whether compiled autograd is on: Dynamo traces each backward as it runs (checked: 2.13)."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def tensor_of_input(node: fx.Node, traced: fx.GraphModule) -> torch.Tensor | None:
    """The parameter or buffer of ``traced`` that an input of its joint graph stands for; None if it stands for none."""
    described = node.meta.get("desc")
    if isinstance(described, BufferAOTInput):
        return traced.get_buffer(described.target)
    return traced.get_parameter(described.target) if isinstance(described, ParamAOTInput) else None
