"""Mixed precision that ``fully_shard`` has no setting for: buffers, inputs of the root alone, layers left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from ..fsdp import cast_tensors, tensors_in
from .wrapper_state import WrapperState, own_modules


def cast_buffers(module: nn.Module, state: WrapperState) -> None:
    """Casts floating-point buffers to ``buffer_dtype``; the state notes their dtypes, for state dicts."""
    given = state.options.mixed_precision
    dtype = given.buffer_dtype if given is not None else None
    if dtype is None:
        return
    for path, each in own_modules(module):
        if each in state.ignored_modules:
            continue
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                state.buffer_dtypes[f"{path}.{name}" if path else name] = buffer.dtype
                each._buffers[name] = buffer.to(dtype)


def keep_low_precision_gradients(module: nn.Module, mixed_precision: MixedPrecision | None) -> None:
    """Makes gradients stay in the dtype of their reduction, instead of that of their parameter."""
    if mixed_precision is None or not mixed_precision.keep_low_precision_grads:
        return
    dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype
    if dtype is None:
        return
    for _, each in own_modules(module):
        for param in each._parameters.values():
            if param is not None and param.requires_grad and param.is_floating_point():
                param.grad_dtype = None
                param.register_post_accumulate_grad_hook(_Lowering(dtype))


class _Lowering:
    """A hook that casts the gradient of a parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            param.grad = param.grad.to(self._dtype)


def run_in_full_precision(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a module that mixed precision leaves out: inputs become float32, outputs the dtype of the inputs again."""
    floats = [each.dtype for each in tensors_in((args, kwargs)) if each.is_floating_point()]
    args, kwargs = cast_tensors((args, kwargs), torch.float32)
    outputs = module(*args, **kwargs)
    return cast_tensors(outputs, floats[0]) if floats else outputs
