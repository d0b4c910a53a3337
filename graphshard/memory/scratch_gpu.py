"""What attention's kernels on a GPU allocate for themselves, from torch's source (2.11).

- The memory-efficient backward (aten/src/ATen/native/transformers/cuda/attention_backward.cu and
  mem_eff_attention/kernel_backward.h) holds a tile of 64 x 64 sums of the queries' gradient with 16 bytes of state, for
  each 64 queries and each 64 elements of a head; the row sums of the result times its gradient; and their product
  before it is summed. In 16 bits with heads above 64, also a tile of sums of the keys' and of the values' gradient. In
  float32 and heads of 16 this is what CUDA's allocator was asked for on an H100.
- FlashAttention's backward (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd) sums the queries'
  gradient in float32, with tokens rounded up to 128 and heads to 32, and holds the row sums. cuDNN's kernel, which
  torch prefers on an H100, is counted alike.

Not counted: the workspaces of cuBLAS (64 MiB on an H100, allocated once), and those of cuDNN's convolutions.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ..ir import size_hint, tensors_of

aten = torch.ops.aten

_EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
_FLASH = aten._scaled_dot_product_flash_attention_backward.default

#: Bytes of a sum, and the side of a tile of the memory-efficient kernel.
_SUM_BYTES, _TILE = 4, 64


def gpu_scratch_bytes(node: fx.Node) -> int:
    """What a node's kernel allocates on a GPU beside its operands and results; 0 for all but attention's backward."""
    if node.target not in (_EFFICIENT, _FLASH):
        return 0
    _gradient, query, _key, value = tensors_of([each.meta["val"] for each in node.args[:4]])
    batch, heads, tokens, head = map(size_hint, query.shape)
    value_head, rows = size_hint(value.shape[-1]), batch * heads
    if node.target is _FLASH:
        tokens = _up(tokens, 128)
        return _SUM_BYTES * rows * tokens * (_up(head, 32) + 1)
    tiles = math.ceil(tokens / _TILE) * math.ceil(head / _TILE)
    sums = tiles * (_TILE * _TILE + 4)
    if query.dtype.itemsize == 2 and head > _TILE:
        sums += _TILE * (_up(head, _TILE) + _up(value_head, _TILE))
    return _SUM_BYTES * rows * (sums + tokens + tokens * value_head)


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
