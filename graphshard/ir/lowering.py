"""From level 1 to level 2: what the shard ops become when they are written with collectives.

A lowering is written once, against an *emitter*. :class:`EagerEmitter` runs each op at once: this is the eager
implementation of the shard ops. :class:`graphshard.ir.rewrite.GraphEmitter` appends each op to a graph: this is the
pass ``lower_shards``. So the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .bucket_ops import ADD_ROWS
from .collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT, aten
from .custom_collectives import ALL_REDUCE_HOOK, CUSTOM_ALL_GATHER, CUSTOM_REDUCE_SCATTER
from .params import ReduceGradCall, Scaling, UnshardCall, padded_rows, padded_shape

prims = torch.ops.prims


class Emitter(Protocol):
    """What a lowering needs: to apply an op, and to see the tensor of a value."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any: ...

    def tensor(self, value: Any) -> torch.Tensor: ...


class EagerEmitter:
    """Applies each op at once."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def tensor(self, value: Any) -> torch.Tensor:
        return value


def emit_unshard(emit: Emitter, call: UnshardCall) -> Any:
    """Pads, moves and casts a shard, gathers it along its dim, and drops the padding.

    The shard may be padded already; missing rows are filled with zeros. The result is contiguous, of ``call.shape``.
    """
    piece = padded_shape(call.shape, call.dim, call.group_size)
    shard = emit_gather_input(emit, call)
    if call.group_size == 1:
        return shard
    dtype = emit.tensor(shard).dtype
    shard = emit_bytes(emit, emit_contiguous(emit, shard))
    gathered = emit_from_bytes(emit, emit(WAIT, emit_all_gather(emit, shard, call)), dtype)
    if call.dim != 0:
        gathered = emit_ranks_to_dim(emit, gathered, piece, call.dim, call.group_size)
    if emit.tensor(gathered).shape[call.dim] != call.shape[call.dim]:
        gathered = emit_contiguous(emit, emit(aten.slice.Tensor, gathered, call.dim, 0, call.shape[call.dim]))
    return gathered


def emit_gather_input(emit: Emitter, call: UnshardCall) -> Any:
    """The input of a gather: the padded shard, on the device and in the dtype of the full parameter."""
    piece = padded_shape(call.shape, call.dim, call.group_size)
    return emit_cast(emit, emit_move(emit, emit_pad(emit, call.shard, piece), call.device), call.dtype)


def emit_bytes(emit: Emitter, value: Any) -> Any:
    """An 8-bit float tensor viewed as bytes, because not every process group knows its dtype; else the value."""
    tensor = emit.tensor(value)
    is_small_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return emit(aten.view.dtype, value, torch.uint8) if is_small_float else value


def emit_from_bytes(emit: Emitter, value: Any, dtype: torch.dtype) -> Any:
    """The inverse of :func:`emit_bytes` for a value that had ``dtype``."""
    return value if emit.tensor(value).dtype == dtype else emit(aten.view.dtype, value, dtype)


def emit_all_gather(emit: Emitter, value: Any, call: UnshardCall) -> Any:
    """Starts the gather of a contiguous value, by the user's collective if one is set."""
    if "all_gather" in call.custom.split(","):
        return emit(CUSTOM_ALL_GATHER, value, call.group_size, call.group_name, call.handle)
    return emit(ALL_GATHER, value, call.group_size, call.group_name)


def emit_reduce_grad(emit: Emitter, call: ReduceGradCall) -> Any:
    """Reduces a full gradient over the ranks to this rank's piece.

    In order: cast to the dtype of the reduction, add gradients of earlier micro-batches, pad, reduce-scatter along the
    dim, all-reduce over the copies, call the user's hook, scale, cast to the shard's dtype, cut to its shape. Without
    the all-reduce the result is the partial sum: not scaled, padded, in the dtype of the reduction.
    """
    prepared, scaling = emit_reduction_input(emit, call)
    reduced = prepared if call.group_size == 1 else emit_reduce_scatter(emit, prepared, scaling.op, call)
    if call.partial is not None:
        reduced = emit(aten.add.Tensor, call.partial, reduced)
    if not call.all_reduce:
        return reduced
    reduced = emit_all_reduce(emit, reduced, scaling.op, call)
    return emit_reduction_output(emit, reduced, scaling, call)


def emit_reduction_input(emit: Emitter, call: ReduceGradCall) -> tuple[Any, Scaling]:
    """The input of a reduce-scatter, the pieces of the ranks one after the other, and its scaling."""
    grad = emit_cast(emit, call.grad, call.reduce_dtype)
    if call.unreduced is not None:
        grad = emit(aten.add.Tensor, call.unreduced, grad)
    scaling = call.scaling(emit.tensor(grad).dtype)
    grad = emit_scale(emit, grad, scaling.before)
    if call.group_size == 1:
        return grad, scaling
    shape = list(emit.tensor(grad).shape)
    shape[call.dim] = padded_rows(shape[call.dim], call.group_size) * call.group_size
    padded = emit_pad(emit, grad, shape)
    if call.dim != 0:
        padded = emit_dim_to_ranks(emit, padded, shape, call.dim, call.group_size)
    return emit_contiguous(emit, padded), scaling


def emit_reduce_scatter(emit: Emitter, value: Any, op: str, call: ReduceGradCall) -> Any:
    """The reduce-scatter of a contiguous value, and its wait."""
    if "reduce_scatter" in call.custom.split(","):
        arguments = (value, op, call.group_size, call.group_name, call.handle)
        return emit(WAIT, emit(CUSTOM_REDUCE_SCATTER, *arguments))
    return emit(WAIT, emit(REDUCE_SCATTER, value, op, call.group_size, call.group_name))


def emit_exchange(emit: Emitter, value: Any, num_ranks: int, group: str) -> Any:
    """Starts an exchange: sends each rank its piece of a value that holds the pieces one after the other."""
    splits = [emit.tensor(value).shape[0] // num_ranks] * num_ranks
    return emit(ALL_TO_ALL, value, splits, splits, group)


def emit_sum_of_exchange(emit: Emitter, received: Any, op: str, num_ranks: int) -> Any:
    """The result of a reduce-scatter, from that of :func:`emit_exchange` after its wait; ``op``: "sum" or "avg"."""
    return emit(ADD_ROWS, received, num_ranks, op == "avg")


def emit_all_reduce(emit: Emitter, value: Any, op: str, call: ReduceGradCall) -> Any:
    """The sum over the copies if there are any, then the user's hook if one is set."""
    if call.replicate_size > 1:
        whole = emit_contiguous(emit, value)
        value = emit(WAIT, emit(ALL_REDUCE, whole, op, call.replicate_group))
    if "all_reduce_hook" in call.custom.split(","):
        whole = emit_contiguous(emit, value)
        value = emit(WAIT, emit(ALL_REDUCE_HOOK, whole, "hook", call.group_name, call.handle))
    return value


def emit_reduction_output(emit: Emitter, reduced: Any, scaling: Scaling, call: ReduceGradCall) -> Any:
    """The gradient of the shard from the padded sum: scaled, cast, cut, and moved to the shard's device."""
    reduced = emit_cast(emit, emit_scale(emit, reduced, scaling.after), call.dtype)
    if emit.tensor(reduced).shape[call.dim] != call.shard_shape[call.dim]:
        cut = emit(aten.slice.Tensor, reduced, call.dim, 0, call.shard_shape[call.dim])
        reduced = emit_contiguous(emit, cut)
    return emit_move(emit, reduced, call.device)


def emit_cast(emit: Emitter, value: Any, dtype: torch.dtype | None) -> Any:
    """The value in ``dtype``; the value itself if it has that dtype, or if ``dtype`` is None."""
    if dtype is None or emit.tensor(value).dtype == dtype:
        return value
    return emit(prims.convert_element_type.default, value, dtype)


def emit_move(emit: Emitter, value: Any, device: torch.device | None) -> Any:
    """The value on ``device``; the value itself if it is there, or if ``device`` is None.

    A copy to an accelerator is asynchronous: the stream orders it before the gather that reads it. A copy to the CPU
    waits, because its readers there use no stream. Inductor has no lowering for ``aten._to_copy``; this is the op that
    it makes of it.
    """
    if device is None or emit.tensor(value).device == device:
        return value
    return emit(prims.device_put.default, value, device, device.type != "cpu")


def emit_scale(emit: Emitter, value: Any, factor: float) -> Any:
    """The value times a constant; the value itself if that is 1."""
    return value if factor == 1.0 else emit(aten.mul.Tensor, value, factor)


def emit_pad(emit: Emitter, value: Any, shape: Sequence[int]) -> Any:
    """The value with zeros appended up to ``shape``; the value itself if it has that shape."""
    missing = [want - have for want, have in zip(shape, emit.tensor(value).shape, strict=True)]
    if not any(missing):
        return value
    amounts = [amount for size in reversed(missing) for amount in (0, size)]
    return emit(aten.constant_pad_nd.default, value, amounts, 0.0)


def emit_contiguous(emit: Emitter, value: Any) -> Any:
    """The value, copied if it is not contiguous."""
    if emit.tensor(value).is_contiguous():
        return value
    return emit(aten.clone.default, value, memory_format=torch.contiguous_format)


def emit_ranks_to_dim(emit: Emitter, gathered: Any, piece: Sequence[int], dim: int, num_ranks: int) -> Any:
    """From pieces one after the other along dim 0, ``[ranks * piece[0], ...]``, to pieces joined along ``dim``."""
    split = emit(aten.view.default, gathered, [num_ranks, *piece])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(piece) + 1)]
    joined = emit_contiguous(emit, emit(aten.permute.default, split, order))
    whole = list(piece)
    whole[dim] *= num_ranks
    return emit(aten.view.default, joined, whole)


def emit_dim_to_ranks(emit: Emitter, whole: Any, shape: Sequence[int], dim: int, num_ranks: int) -> Any:
    """The inverse of :func:`emit_ranks_to_dim`."""
    piece = list(shape)
    piece[dim] //= num_ranks
    contiguous = emit_contiguous(emit, whole)
    split = emit(aten.view.default, contiguous, [*piece[:dim], num_ranks, *piece[dim:]])
    order = [dim, *range(dim), *range(dim + 1, len(piece) + 1)]
    ordered = emit_contiguous(emit, emit(aten.permute.default, split, order))
    return emit(aten.view.default, ordered, [num_ranks * piece[0], *piece[1:]])
