"""Mixed precision that ``fully_shard`` has no setting for: buffers, inputs of the root alone, layers left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from .._compat_fsdp1 import WRAPPED
from ..fsdp.state import Unit, owner_of, slots_of
from ..tensor_trees import cast_tensors, tensors_in
from .wrapper_state import WrapperState, own_modules, plain_name, wrappers_in


def cast_buffers(module: nn.Module, state: WrapperState) -> None:
    """Casts floating-point buffers to ``buffer_dtype``; the state notes their dtypes, for state dicts."""
    given = state.options.mixed_precision
    dtype = given.buffer_dtype if given is not None else None
    if dtype is None:
        return
    found = [
        (plain_name(f"{path}.{name}"), each, name, buffer)
        for path, each in own_modules(module, at_every_path=True)
        if each not in state.ignored_modules
        for name, buffer in each._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    for path, each, name, buffer in found:
        state.buffer_dtypes[path] = buffer.dtype
        if each._buffers[name] is buffer:  # else cast already, at another path
            each._buffers[name] = buffer.to(dtype)


def is_precise_in_eval() -> bool:
    """Whether the environment asks for full precision in eval mode; FSDP1 reads the variable as it wraps, too."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"


def input_dtype(state: WrapperState) -> torch.dtype | None:
    """What a wrapper casts its floating-point inputs to; None if it leaves them as they are."""
    given = state.options.mixed_precision
    if given is None or state.is_precise or not state.options.casts_inputs(state.is_root):
        return None
    return given.param_dtype


def follow_mode(wrapper: nn.Module) -> None:
    """Computes in full precision if the wrapped module is in eval mode, else as ``mixed_precision`` says.

    For the wrappers in a module that ``FSDP_USE_FULL_PREC_IN_EVAL`` holds for. The next forward is traced again.
    """
    for each, state in wrappers_in(wrapper):
        module = each._modules[WRAPPED]
        assert module is not None
        if not state.is_precise_in_eval or state.is_precise is not module.training:
            continue
        state.is_precise = not module.training
        precise = MixedPrecisionPolicy(cast_forward_inputs=False)
        for unit in _units_of(module, state):
            unit.set_policy(precise if state.is_precise else state.options.mp_policy)
        if state.is_precise:
            restore_buffers(module, state)
        else:
            cast_buffers(module, state)
        each._input_dtype = input_dtype(state)


def _units_of(module: nn.Module, state: WrapperState) -> Iterator[Unit]:
    """The units that own parameters of a wrapper's module: one, or none."""
    seen: set[int] = set()
    for _, each in own_modules(module):
        for _, slot in slots_of(each):
            unit = owner_of(slot)
            if state.unit in unit.modules and id(unit) not in seen:
                seen.add(id(unit))
                yield unit


def restore_buffers(module: nn.Module, state: WrapperState) -> None:
    """Casts the buffers that :func:`cast_buffers` has cast back."""
    for path, each in own_modules(module):
        for name, buffer in each._buffers.items():
            dtype = state.buffer_dtypes.get(plain_name(f"{path}.{name}"))
            if buffer is not None and dtype is not None:
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
