"""Which ops that torch calls views copy: a cast, a move, a reshape or ``contiguous`` that memory does not allow.

Their schemas say that the result may share the memory of the input. Whether it does depends on layouts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._compat import is_composite, storage_id
from .calls import schema_call
from .flops import hinted_shape


def copies(node: fx.Node) -> bool:
    """True for a node whose op may be a view, and which copies. Only ``meta["val"]`` is read."""
    if not is_composite(node.target) or not node.target.is_view:
        return False
    target, args, kwargs = schema_call(node)
    if not args or not isinstance(args[0], fx.Node):
        return False
    source, value = args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if source.dtype != value.dtype or source.device != value.device:
        return True
    return _copies(target, _laid_out(args), tuple(kwargs), _laid_out(tuple(kwargs.values())))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Stands for a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _laid_out(value: Any) -> Any:
    """Nodes become what they stand for, tensors their layouts, devices "meta", symbols their hints, lists tuples."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _Layout(hinted_shape(value), hinted_strides(value), value.dtype)
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.SymInt):
        return int(value.node.hint or 0)
    return tuple(map(_laid_out, value)) if isinstance(value, (tuple, list)) else value


def hinted_strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides, symbolic ones by what was seen while tracing."""
    return tuple(step if isinstance(step, int) else int(step.node.hint or 0) for step in value.stride())


@functools.lru_cache(maxsize=4096)
def _copies(target: Any, args: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...]) -> bool:
    source, *rest = map(_without_data, args)
    try:
        result = target(source, *rest, **dict(zip(names, map(_without_data, values), strict=True)))
    except RuntimeError:  # an op that only named tensors or data can run
        return False
    return storage_id(result) != storage_id(source)


def _without_data(value: Any) -> Any:
    if isinstance(value, _Layout):
        return torch.empty_strided(value.sizes, value.strides, dtype=value.dtype, device="meta")
    return list(map(_without_data, value)) if isinstance(value, tuple) else value
