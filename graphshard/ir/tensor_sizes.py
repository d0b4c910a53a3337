"""Bytes of tensors. Symbolic sizes count with the hint seen while tracing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value: the value itself, or the tensors among the items of a tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [part for part in value if isinstance(part, torch.Tensor)] if isinstance(value, (tuple, list)) else []
    )


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor or a tuple of tensors."""
    return sum(size_hint(tensor.numel()) * tensor.element_size() for tensor in tensors_of(value))


def stored_bytes(value: Any) -> int:
    """Bytes of the elements that are in memory: an expanded dim (stride 0) counts once."""
    return sum(_stored_elements(tensor) * tensor.element_size() for tensor in tensors_of(value))


def _stored_elements(tensor: torch.Tensor) -> int:
    sizes = [size_hint(size) for size in tensor.shape]
    if not all(sizes):
        return 0
    return math.prod(
        size for size, stride in zip(sizes, tensor.stride(), strict=True) if size_hint(stride) != 0
    )


def size_hint(size: int | torch.SymInt) -> int:
    """The size seen while tracing; 0 for a size that depends on data, and for the length of a ragged dim."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return hint if isinstance(hint, int) else 0  # the hint of a ragged dim is a symbol again


def is_contiguous(tensor: torch.Tensor, order: Sequence[int] | None = None) -> bool:
    """Whether a tensor has no gaps in memory, with its last dim innermost.

    Args:
        tensor: its sizes may be symbolic; no guards are added.
        order: the dims from the outermost to the innermost; None for their own order.
    """
    if order is None and all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return tensor.is_contiguous()
    expected = 1
    for dim in reversed(range(tensor.dim()) if order is None else order):
        size = size_hint(tensor.shape[dim])
        if size != 1 and size_hint(tensor.stride(dim)) != expected:
            return False
        expected *= size
    return True
