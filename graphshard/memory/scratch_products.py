"""What products of 16-bit floats on the CPU allocate for themselves while they run.

oneDNN packs blocks of both operands, and copies more of a left one whose columns lie together (that of a weight's
gradient). How much follows from no rule that is written down, and depends on the processor: this is the most that was
seen for 13,888 products of sizes up to 4,096 on an AMD EPYC with one thread, and as much for each further thread of
this process. Those of float16 are multiplied so where the processor has that type: on an Intel Xeon with AVX512-FP16
they took up to twice as much, however the left operand lay. Products of other types allocate nothing there.
Compared with the allocator by tests/test_scratch_products.py.
"""

from __future__ import annotations

import torch
from torch import fx

from .._compat import in_onednn
from ..ir import argument, size_hint

aten = torch.ops.aten

#: The left and the right operand of each product, by name.
_OPERANDS = {
    aten.mm.default: ("self", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten.addmm.default: ("mat1", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
    aten._grouped_mm.default: ("self", "mat2"),
}

#: Bytes of packed blocks, where at most so many products are summed, and where more are.
_SHORT_SUM, _BLOCKS, _LONG_BLOCKS = 1024, 133 * 1024, 1300 * 1024

#: Sizes are filled up to multiples; rows that are copied of a left operand have a gap behind them.
_ROW_BLOCK, _SUM_BLOCK, _ROW_GAP = 96, 64, 33

#: So many rows of a left operand are copied at a time, up to sums of this length; of longer ones so many bytes.
_MOST_ROWS, _MIDDLE_SUM, _MOST_COPIED = 640, 512, 1233 * 1024


def product_scratch_bytes(node: fx.Node) -> int:
    """The most that a product allocates beside its operands and its result; 0 for those that oneDNN does not pack."""
    if node.target not in _OPERANDS:
        return 0
    left, right = (argument(node, name).meta["val"] for name in _OPERANDS[node.target])
    if not is_packed(left.dtype):
        return 0
    rows, summed, columns = map(size_hint, (*left.shape[-2:], right.shape[-1]))
    is_transposed = size_hint(left.stride(-1)) != 1
    return packed_bytes(rows, summed, columns, left.dtype, is_transposed=is_transposed)


def is_packed(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs products of this type: bfloat16, and float16 where the processor has it."""
    return dtype is torch.bfloat16 or (dtype is torch.float16 and in_onednn(dtype))


def packed_bytes(rows: int, summed: int, columns: int, dtype: torch.dtype, *, is_transposed: bool) -> int:
    """Bytes for a product of 16-bit floats (``rows`` x ``summed``) @ (``summed`` x ``columns``), on all threads.

    Args:
        dtype: bfloat16 or float16.
        is_transposed: the left operand's columns lie together in memory, and not its rows.
    """
    sums = 4 * _padded(columns, _ROW_BLOCK) * (_padded(rows, _ROW_BLOCK) + _padded(summed, _SUM_BLOCK))
    packed = min(sums + 2048, _BLOCKS if summed <= _SHORT_SUM else _LONG_BLOCKS)
    is_float16 = dtype is torch.float16
    if (is_transposed or is_float16) and min(rows, summed) > 1:
        of_rows = 2 * min(rows, _MOST_ROWS) * (summed + _ROW_GAP)
        packed += _MOST_COPIED if summed > _MIDDLE_SUM else of_rows
    return torch.get_num_threads() * packed * (2 if is_float16 else 1)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
