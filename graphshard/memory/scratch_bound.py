"""An upper bound of what a library's kernel on the CPU allocates for itself, where it cannot be measured.

It follows from sizes alone and is fitted to no processor. A library packs, pads and converts what it reads and writes.
So each operand and each result is counted (2 + number of threads) times, in elements of at least 4 bytes: as if the
library copied it twice, and each thread once more. Each is counted with a block of 64 x 64 elements more than it has,
since small tensors are padded. Counted in addition:

- of a convolution, the unfolded input (one element of the weight for each place of the result), once for each of the
  two gradients that its backward may compute;
- of attention, a tile of scores. Torch computes at most 256 x 512 scores at a time
  (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: q_split_size, kv_split_size); a backward holds two such tiles.

A product of float32 or float64 is 0 where BLAS computes it: BLAS keeps its buffers outside of torch's allocator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .scratch_calls import ATTENTION, CONVOLUTIONS, PRODUCTS, KernelCall, TensorSpec, kernel_name

#: Side of a block to which libraries pad.
BLOCK = 64

#: The most rows and columns of a tile of scores.
TILE_ROWS, TILE_COLUMNS = 256, 512

#: Of each operand and result, beside one for each thread.
_COPIES = 2

#: Libraries compute and sum in elements of at least so many bytes.
_LEAST_BYTES = 4


def bound_bytes(call: KernelCall, results: Sequence[TensorSpec], num_threads: int) -> int:
    """The most that a call may allocate beside its operands and results; see the module.

    Args:
        call: what runs.
        results: the tensors that it returns.
        num_threads: threads of the process that it runs in.
    """
    if is_blas(call):
        return 0
    tensors = [*call.tensors, *results]
    width = max([_LEAST_BYTES, *(tensor.dtype.itemsize for tensor in tensors)])
    elements = sum(tensor.num_elements + BLOCK * BLOCK for tensor in tensors) + 2 * _tile_elements(call)
    return width * ((_COPIES + num_threads) * elements + 2 * _unfolded_elements(call, results))


def is_blas(call: KernelCall) -> bool:
    """Whether BLAS computes a call: a product of no 16-bit floats, unless torch may compute float32 in fewer bits."""
    if kernel_name(call.op) not in PRODUCTS:
        return False
    dtypes = {tensor.dtype for tensor in call.tensors}
    if dtypes <= {torch.float64, torch.complex64, torch.complex128}:
        return True
    return dtypes == {torch.float32} and not _is_float32_in_onednn()


def _is_float32_in_onednn() -> bool:
    backend = torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee") or backend.is_acl_available()


def _unfolded_elements(call: KernelCall, results: Sequence[TensorSpec]) -> int:
    """One element of the weight, without its output channels, for each place of the result."""
    if kernel_name(call.op) not in CONVOLUTIONS:
        return 0
    operands = [arg for arg in call.args[:3] if isinstance(arg, TensorSpec)]
    is_backward = kernel_name(call.op) == "convolution_backward"
    result, source, weight = operands[:3] if is_backward else (results[0], *operands[:2])
    is_transposed = call.args[7 if is_backward else 6]
    windows = source if is_transposed else result
    places = windows.num_elements // max(1, windows.shape[1])
    return places * weight.num_elements // max(1, weight.shape[0])


def _tile_elements(call: KernelCall) -> int:
    """Scores that are computed at a time; of operands (..., tokens, head), the keys behind the queries."""
    if not str(kernel_name(call.op)).startswith(ATTENTION):
        return 0
    tokens = [tensor.shape[-2] for tensor in call.tensors if len(tensor.shape) == 4]
    return min(max(tokens, default=0), TILE_ROWS) * min(max(tokens, default=0), TILE_COLUMNS)
