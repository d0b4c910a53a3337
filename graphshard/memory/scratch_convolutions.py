"""What the convolutions of the CPU allocate for themselves while they run.

oneDNN (float32; bfloat16 and float16 where the processor has them) computes in blocks of channels: it copies the
input, the weight and the result, or the gradients of these, into tensors of its own, with channels in multiples of
16. Which of them depends on sizes and the processor, so all are counted, and sums of a weight's gradient for each
further thread of this process. What it does not take is unfolded into columns.
Compared with the allocator by tests/test_scratch_convolutions.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import fx

from .._compat import in_onednn
from ..ir import size_hint, tensor_bytes

CONVOLUTION = torch.ops.aten.convolution.default
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

#: Channels that oneDNN computes together.
_BLOCK = 16

#: What it sums in, whatever it is given.
_SUM_BYTES = 4

#: The input of one sample that it leaves to the unfolding ones, in elements.
_SMALL_INPUT = 20480


def convolution_scratch_bytes(node: fx.Node) -> int:
    """The most that a convolution, or its backward, allocates beside its inputs and results; 0 for other nodes."""
    if node.target not in (CONVOLUTION, CONVOLUTION_BACKWARD):
        return 0
    is_backward = node.target is CONVOLUTION_BACKWARD
    of_args = [argument.meta["val"] for argument in node.args[:3] if isinstance(argument, fx.Node)]
    result, source, weight = of_args if is_backward else (node.meta["val"], *of_args[:2])
    is_channels_last = any(map(_is_channels_last, (result, source, weight)))
    further_threads = torch.get_num_threads() - 1 if is_backward else 0
    of_threads = further_threads * _BLOCK * math.ceil(size_hint(result.shape[1]) / _BLOCK) * _SUM_BYTES
    if _is_unfolded(source, weight):
        is_transposed = node.args[7 if is_backward else 6]
        columns = _column_bytes(source if is_transposed else result, weight)
        copies = 3 * tensor_bytes(weight) if is_channels_last else 0
        copies += (2 if is_backward else 1) * (columns + tensor_bytes(result)) + tensor_bytes(source)
        return copies + of_threads
    blocked_weight = _blocked_bytes(weight, (0, 1))
    copies = 2 * blocked_weight if is_channels_last else 0
    copies += _blocked_bytes(result, (1,)) + _blocked_bytes(source, (1,)) + blocked_weight
    return copies + of_threads + further_threads * blocked_weight


def _is_unfolded(source: torch.Tensor, weight: torch.Tensor) -> bool:
    is_small = size_hint(source.shape[0]) == 1 and size_hint(source.numel()) <= _SMALL_INPUT
    return not in_onednn(source.dtype) or (is_small and min(map(size_hint, weight.shape[2:])) <= 3)


def _column_bytes(windows: torch.Tensor, weight: torch.Tensor) -> int:
    """One column of a kernel's size and all input channels for each place of the result."""
    places = size_hint(windows.numel()) // max(1, size_hint(windows.shape[1]))
    return places * size_hint(weight.numel()) // max(1, size_hint(weight.shape[0])) * weight.element_size()


def _blocked_bytes(tensor: torch.Tensor, channel_dims: Collection[int]) -> int:
    sizes = [
        _BLOCK * math.ceil(size_hint(size) / _BLOCK) if dim in channel_dims else size_hint(size)
        for dim, size in enumerate(tensor.shape)
    ]
    return math.prod(sizes) * max(_SUM_BYTES, tensor.element_size())


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.stride(1) == 1
