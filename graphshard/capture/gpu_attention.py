"""Attention with the kernels of a GPU, for captures on the CPU.

torch chooses the kernel of ``scaled_dot_product_attention`` by device, dtype, mask and sizes. Kernels differ in the
layout of their results and in the values that they save. A capture for a GPU chooses here, as torch does from compute
capability 8.0 on (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), and pads inputs as torch does
(aten/src/ATen/native/transformers/attention.cpp, both torch 2.11). cuDNN's kernel, which torch may prefer to
FlashAttention, has the same layouts.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten = torch.ops.aten

#: The largest head width of FlashAttention, and the multiple to which head widths are padded.
_FLASH_HEAD, _FLASH_MULTIPLE = 256, 8

#: The memory-efficient kernel needs rows of masks to start at multiples of this many elements.
_MASK_MULTIPLE = 8


def use_gpu_attention(gm: fx.GraphModule) -> None:
    """Replaces attention in ``gm`` (not decomposed yet) and its subgraphs by the kernels of a GPU."""
    instead = {
        F.scaled_dot_product_attention: gpu_attention,
        aten.scaled_dot_product_attention.default: gpu_attention,
        F.multi_head_attention_forward: _gpu_multi_head_attention(),
    }
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    node.target = instead.get(node.target, node.target)
            module.recompile()


def _gpu_multi_head_attention() -> Callable[..., Any]:
    """``multi_head_attention_forward``, which Dynamo leaves whole, with :func:`gpu_attention` inside."""
    plain = F.multi_head_attention_forward
    names = {**plain.__globals__, "scaled_dot_product_attention": gpu_attention}
    changed = types.FunctionType(plain.__code__, names, "gpu_multi_head_attention", plain.__defaults__)
    changed.__kwdefaults__ = plain.__kwdefaults__
    changed.__module__ = __name__
    names[plain.__name__] = changed  # the function that it passes to modes, which call it again
    return changed


def gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` with the kernel that a GPU would run; the arguments are the same."""
    given = (query, key, value)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    if attn_mask is None and _fits_flash(*given, is_causal, enable_gqa):
        head = query.shape[-1]
        padded = [
            F.pad(each, (0, -head % _FLASH_MULTIPLE)) if head % _FLASH_MULTIPLE else each for each in given
        ]
        scale = scale if scale is not None else head**-0.5
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head] if head % _FLASH_MULTIPLE else out
    if _fits_efficient(*given, attn_mask):
        if attn_mask is not None:
            attn_mask = _padded_mask(attn_mask, query, key)
        saves = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        return aten._scaled_dot_product_efficient_attention(
            *given, attn_mask, saves, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        *given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _fits_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dtype in (torch.float16, torch.bfloat16)
        and _are_dense(query, key, value)
        and key.shape[1] == value.shape[1]
        and (query.shape[1] % key.shape[1] == 0 if enable_gqa else query.shape[1] == key.shape[1])
        and query.shape[3] == key.shape[3] == value.shape[3] <= _FLASH_HEAD
        and not (is_causal and query.shape[2] != key.shape[2])
    )


def _fits_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    multiple = 16 // query.dtype.itemsize
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and _are_dense(query, key, value)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[3] == key.shape[3]
        and query.shape[3] % multiple == 0
        and value.shape[3] % multiple == 0
        and (mask is None or mask.stride(-1) == 1)
    )


def _are_dense(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether tensors have four dims, equal batches and contiguous heads, as both kernels need."""
    given = (query, key, value)
    return (
        all(each.dim() == 4 and each.stride(3) == 1 for each in given)
        and query.shape[0] == key.shape[0] == value.shape[0]
    )  # fmt: skip


def _padded_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask of all scores, padded so that its rows start at the multiples that the memory-efficient kernel needs."""
    columns = mask.shape[-1]
    if columns % _MASK_MULTIPLE:
        mask = F.pad(mask, (0, -columns % _MASK_MULTIPLE))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
