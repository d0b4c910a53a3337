"""Operations of products: formulas for ops that torch's own registry lacks or counts wrongly.

A formula takes the arguments of its op (tensors without data) and ``out_val``, the result. A multiplication and an
addition are two operations. Masked scores count in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """A product of matrices, vectors or equal batches: every element of ``a`` meets a row of ``b``."""
    return 2 * _num_values(a) * (b.shape[-1] if b.dim() > 1 else 1)


def _added_product(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    """A product that is added to the first argument."""
    return _product(a, b)


def _packed_product(a: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """A product with a weight in a packed layout; its columns are those of the result."""
    return 2 * a.numel() * out_val.shape[-1]


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """One product a group; groups divide a dim of an operand that is 2-D."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * _num_values(a[0] if a.dim() == 3 else a) * b.shape[-1]


def _num_values(a: Tensor) -> int:
    """Values in an operand; an element holds two 4-bit floats."""
    return a.numel() * (2 if a.dtype is torch.float4_e2m1fn_x2 else 1)


def _recurrent(sequence: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """A recurrent network: every weight matrix meets every step."""
    steps = sequence.numel() // max(sequence.shape[-1], 1)
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _recurrent_layer(sequence: Tensor, of_input: Tensor, of_state: Tensor, *_: Any, **__: Any) -> int:
    """One layer of a recurrent network in one direction."""
    return _recurrent(sequence, (of_input, of_state))


def _twice(formula: Callable[..., int]) -> Callable[..., int]:
    """The backward of a product: two products for each one of the forward."""
    return lambda *args, **kwargs: 2 * formula(*args, **kwargs)


def _attention(rows: int, keys: int, width: int, value_width: int) -> int:
    """Two products: the scores, and the weighted sum of values."""
    return 2 * rows * keys * (width + value_width)


def _attention_backward(rows: int, keys: int, width: int, value_width: int) -> int:
    """Five products: the scores again, and gradients of the weights, q, k and v."""
    return 2 * rows * keys * (3 * width + 2 * value_width)


def _by_heads(count: Callable[[int, int, int, int], int], *, query: int = 0) -> Callable[..., int]:
    """Attention over (..., heads, tokens, width), q at position ``query``; query heads may share a key head."""

    def formula(*args: Any, **_: Any) -> int:
        q, k, v = args[query : query + 3]
        return count(math.prod(q.shape[:-1]), k.shape[-2], q.shape[-1], v.shape[-1])

    return formula


def _by_tokens(
    count: Callable[[int, int, int, int], int], *, query: int = 0, ends: int, longest: int
) -> Callable[..., int]:
    """Attention over (batch, tokens, heads, width), or over packed sequences.

    For packed sequences, ``ends`` is the position of the argument with their ends, and ``longest`` that of the largest
    number of keys; every sequence counts with that number.
    """

    def formula(*args: Any, **_: Any) -> int:
        q, k, v = args[query : query + 3]
        keys = k.shape[-3] if args[ends] is None or args[longest] is None else args[longest]
        return count(math.prod(q.shape[:-1]), keys, q.shape[-1], v.shape[-1])

    return formula


#: Formulas by name of op: ops that torch's registry lacks, and attention, which it counts wrongly: it takes heads for
#: tokens where tokens come first, and before torch 2.13 it does not count attention whose heads share keys.
_BY_NAME: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), _added_product),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    **dict.fromkeys(("_weight_int8pack_mm", "_weight_int4pack_mm"), _packed_product),
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _twice(_recurrent),
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _twice(_recurrent_layer),
    "scaled_dot_product_attention": _by_heads(_attention),
    **{
        f"_scaled_dot_product_{kind}{suffix}": _by_heads(count, query=query)
        for kind in (
            "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
            "fused_attention_overrideable",
        )
        for suffix, count, query in (("", _attention, 0), ("_backward", _attention_backward, 1))
    },
    "_flash_attention_forward": _by_tokens(_attention, ends=4, longest=6),
    "_flash_attention_backward": _by_tokens(_attention_backward, query=1, ends=7, longest=9),
    "_efficient_attention_forward": _by_tokens(_attention, ends=5, longest=7),
    "_efficient_attention_backward": _by_tokens(_attention_backward, query=1, ends=7, longest=9),
    "_cudnn_attention_forward": _by_tokens(_attention, ends=5, longest=7),
    "_cudnn_attention_backward": _by_tokens(_attention_backward, query=1, ends=10, longest=12),
}  # fmt: skip

#: The formulas by op, for the ops that this version of torch has.
FORMULAS: dict[Any, Callable[..., int]] = {
    getattr(aten, name): formula for name, formula in _BY_NAME.items() if hasattr(aten, name)
}

#: Attention ops whose tensors have tokens before heads.
TOKENS_FIRST = frozenset(
    getattr(aten, f"_{kind}_attention_{way}")
    for kind in ("flash", "efficient", "cudnn")
    for way in ("forward", "backward")
)
