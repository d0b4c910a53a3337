"""What attention on the CPU allocates for itself while it runs.

The kernel goes through the scores in tiles and holds one for each thread of this process, and the backward two. Sizes
of tiles: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of torch 2.13.
Compared with the allocator by tests/test_scratch_attention.py.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ir import argument, is_contiguous, size_hint, tensor_bytes
from .scratch_products import is_packed, packed_bytes

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: Rows of a tile, from so many queries on; and its columns.
_TILE_ROWS = ((768, 256), (192, 64), (0, 32))
_TILE_COLUMNS = 512


def attention_scratch_bytes(node: fx.Node) -> int:
    """What attention, or its backward, allocates beside its inputs and results; 0 for other nodes.

    Of 16-bit floats whose tiles are multiplied by oneDNN, the most that it may allocate.
    """
    if node.target not in (ATTENTION, ATTENTION_BACKWARD):
        return 0
    query, key = (argument(node, name).meta["val"] for name in ("query", "key"))
    (num_queries, head), num_keys = map(size_hint, query.shape[-2:]), size_hint(key.shape[-2])
    rows = min(num_queries, next(rows for least, rows in _TILE_ROWS if num_queries >= least))
    columns = min(num_keys, _TILE_COLUMNS)
    is_reduced = query.dtype in (torch.bfloat16, torch.float16)
    element, reduced_element = (4, 2) if is_reduced else (query.element_size(), 0)
    tile = rows * columns * (element + reduced_element)
    num_threads = torch.get_num_threads()
    if node.target is ATTENTION:
        return num_threads * (tile + rows * (head + 2) * element)
    scratch = num_threads * (2 * tile + rows * element)
    if is_packed(query.dtype):
        scratch += max(
            packed_bytes(rows, head, columns, query.dtype, is_transposed=False),
            packed_bytes(rows, columns, head, query.dtype, is_transposed=False),
            packed_bytes(columns, rows, head, query.dtype, is_transposed=True),
        )
    gradient = argument(node, "grad_out").meta["val"]
    # The kernel reads (batch, heads, tokens, head) as (batch, tokens, heads, head).
    is_copied = not is_contiguous(gradient, order=(0, 2, 1, 3))
    return scratch + (tensor_bytes(gradient) if is_copied else 0)
