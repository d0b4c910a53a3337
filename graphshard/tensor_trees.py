"""Casts and moves the tensors inside the inputs or outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with each floating-point tensor in it cast to ``dtype``.

    Tuples, named tuples, lists, dicts, dataclasses and their subclasses are rebuilt. Other values are returned as they
    are, and so is a dataclass in which nothing changed.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return _map_tensors(cast, value)


def move_tensors(value: Any, device: torch.device) -> Any:
    """``value`` with each tensor in it on ``device``."""
    return _map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to(device), value)


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        changed_items = [_map_tensors(change, item) for item in value]
        return type(value)(*changed_items) if hasattr(value, "_fields") else tuple(changed_items)
    if isinstance(value, list):
        return [_map_tensors(change, item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: _map_tensors(change, getattr(value, name)) for name in names}
        if all(changed[name] is getattr(value, name) for name in names):
            return value
        return dataclasses.replace(value, **changed)
    if isinstance(value, Mapping):
        items = {key: _map_tensors(change, item) for key, item in value.items()}
        rebuild: Any = type(value)
        return items if rebuild is dict else rebuild(items)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors inside a value, at any depth of containers."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(take, value)
    return found
