"""Level 1: the op ``graphshard::reshard``, which moves a tensor from one placement to another on one mesh axis.

A placement says what a rank of the axis holds of a tensor:

| text | the rank holds |
|---|---|
| ``Replicate`` | the whole tensor |
| ``Shard(1)`` | its piece along dim 1, cut as ``torch.chunk`` cuts: the last ranks may hold less or nothing |
| ``Partial(sum)`` | a term: the tensor is the sum of the terms (also ``avg``, ``max``, ``min``, ``product``) |

The op carries everything its lowering needs. :func:`emit_reshard` writes it with collectives, for the eager op and for
the pass ``lower_reshards``. Its backward is a reshard in the other direction: the gradient of a replicated tensor is
replicated, that of a cut tensor is cut in the same way, that of a term is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..errors import UnsupportedShardingError
from .collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT, aten
from .lowering import (
    EagerEmitter,
    Emitter,
    emit_bytes,
    emit_contiguous,
    emit_dim_to_ranks,
    emit_from_bytes,
    emit_ranks_to_dim,
)
from .params import padded_rows, padded_shape, shard_shape
from .tensor_sizes import size_hint

REPLICATE = "Replicate"

#: Reductions of pending terms; those in the first row have a reduce-scatter.
_SCATTERED = ("sum", "avg")
_REDUCTIONS = (*_SCATTERED, "max", "min", "product")


class ReshardCall(NamedTuple):
    """The arguments of ``graphshard::reshard``, in order; ``ReshardCall(*node.args)`` reads a node.

    Attributes:
        value: what this rank holds before.
        src, dst: placements, as :func:`placement_text` writes them.
        shape: shape of the whole tensor.
        axis: label of the mesh axis.
        group_size: ranks on it.
        group_name: its process group.
        rank: this rank's place on it. Like group names, it is not printed: graph text is equal on all ranks.
        placed: the pass ``propagate_sharding`` has written it. Others say what the model's code has in pieces.
    """

    value: Any
    src: str
    dst: str
    shape: Sequence[int]
    axis: str
    group_size: int
    group_name: str
    rank: int
    placed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParameter:
    """A parameter of a graph captured without ``parallelize``, and how it lies on the axis.

    Attributes:
        placeholder: the graph input that holds the whole parameter.
        name: name of the parameter.
        call: the reshard to ``Replicate``; ``value`` is ignored.
    """

    placeholder: str
    name: str
    call: ReshardCall


def placement_text(placement: Placement) -> str:
    """``Replicate``, ``Shard(1)`` or ``Partial(sum)`` for a placement of torch.

    Raises:
        UnsupportedShardingError: another kind of placement.
    """
    if isinstance(placement, Replicate):
        return REPLICATE
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    if type(placement) is Partial and placement.reduce_op in _REDUCTIONS:
        return f"Partial({placement.reduce_op})"
    raise UnsupportedShardingError(f"no reshard knows the placement {placement!r}")


def cut_dim(placement: str) -> int | None:
    """The dim of ``Shard(dim)``; None for another placement."""
    return int(placement[6:-1]) if placement.startswith("Shard(") else None


def _reduction(placement: str) -> str | None:
    return placement[8:-1] if placement.startswith("Partial(") else None


def of_gradient(placement: str) -> str:
    """The placement of the gradient of a value with this placement."""
    return REPLICATE if _reduction(placement) else placement


def local_shape(shape: Sequence[int], placement: str, num_ranks: int, rank: int) -> list[int]:
    """Shape of what ``rank`` holds of a tensor of ``shape``."""
    dim = cut_dim(placement)
    return list(shape) if dim is None else shard_shape(shape, dim, num_ranks, rank)


def bytes_sent(call: ReshardCall, dtype: torch.dtype) -> int | None:
    """Bytes that each rank sends, padding included; None if a size is symbolic.

    An all-reduce counts as a reduce-scatter and an all-gather.
    """
    if call.src == call.dst or not all(isinstance(size, int) for size in call.shape):
        return 0 if call.src == call.dst else None
    whole, ranks = list(call.shape), call.group_size
    src, dst = cut_dim(call.src), cut_dim(call.dst)
    for dim in (src, dst):
        if dim is not None:
            whole[dim] = padded_rows(call.shape[dim], ranks) * ranks
    piece = math.prod(whole) * dtype.itemsize // ranks
    if src is not None and dst is not None:
        return piece // ranks * (ranks - 1)
    if src is not None:
        return piece * (ranks - 1) if dst is None and call.dst == REPLICATE else 0
    if _reduction(call.src) is None:
        return 0
    if dst is not None and _reduction(call.src) in _SCATTERED:
        return piece * (ranks - 1)
    return -(-math.prod(call.shape) * dtype.itemsize // ranks) * (ranks - 1) * 2


def expected_bytes_sent(call: ReshardCall, dtype: torch.dtype) -> int:
    """:func:`bytes_sent` of a node's call, with the sizes seen while tracing in place of symbolic ones."""
    values = [size.meta["val"] if isinstance(size, fx.Node) else size for size in call.shape]
    sent = bytes_sent(call._replace(shape=[size_hint(each) for each in values]), dtype)
    assert sent is not None, "hints are numbers"
    return sent


def reshard_exists(src: str, dst: str) -> bool:
    """Whether :func:`emit_reshard` can write a reshard from one placement to another that holds the same values."""
    return src == dst or _reduction(dst) is None


def emit_reshard(emit: Emitter, call: ReshardCall) -> Any:
    """Writes a reshard with collectives and local ops; the result is contiguous.

    Raises:
        UnsupportedShardingError: terms of one reduction should become terms of another.
    """
    src, dst = cut_dim(call.src), cut_dim(call.dst)
    if call.src == call.dst:
        return emit_contiguous(emit, call.value)
    if src is not None and dst is not None:
        return _exchange(emit, call, src, dst)
    if src is not None:
        return _gather(emit, call, src) if call.dst == REPLICATE else _spread_terms(emit, call, src)
    reduction = _reduction(call.src)
    if reduction is None:
        return _slice(emit, call.value, call, dst) if dst is not None else _divide(emit, call)
    if _reduction(call.dst) is not None:
        raise UnsupportedShardingError(
            f"no reshard from {call.src} to {call.dst}: reduce to {REPLICATE} first"
        )
    if dst is not None and reduction in _SCATTERED:
        return _reduce_scatter(emit, call, reduction, dst)
    value = emit_contiguous(emit, call.value)
    reduced = emit(WAIT, emit(ALL_REDUCE, value, reduction, call.group_name))
    return reduced if dst is None else _slice(emit, reduced, call, dst)


def _gather(emit: Emitter, call: ReshardCall, dim: int) -> Any:
    piece = padded_shape(call.shape, dim, call.group_size)
    value = _as_bytes(emit, emit_contiguous(emit, _padded(emit, call.value, piece, call, dim)))
    gathered = emit(WAIT, emit(ALL_GATHER, value, call.group_size, call.group_name))
    gathered = emit_from_bytes(emit, gathered, emit.tensor(call.value).dtype)
    if dim != 0:
        gathered = emit_ranks_to_dim(emit, gathered, piece, dim, call.group_size)
    return _cut(emit, gathered, call, dim, call.shape[dim])


def _reduce_scatter(emit: Emitter, call: ReshardCall, reduction: str, dim: int) -> Any:
    whole = _whole_shape(call.shape, call, dim)
    value = _padded(emit, call.value, whole, call, dim)
    if dim != 0:
        value = emit_dim_to_ranks(emit, value, whole, dim, call.group_size)
    value = emit_contiguous(emit, value)
    reduced = emit(WAIT, emit(REDUCE_SCATTER, value, reduction, call.group_size, call.group_name))
    return _cut(emit, reduced, call, dim, _rows(call, dim))


def _exchange(emit: Emitter, call: ReshardCall, src: int, dst: int) -> Any:
    """Cut along ``src`` becomes cut along ``dst``: each rank sends each other rank a block."""
    piece = padded_shape(call.shape, src, call.group_size)
    value = _padded(emit, call.value, piece, call, src)
    whole = _whole_shape(piece, call, dst)
    value = emit_contiguous(
        emit, emit_dim_to_ranks(emit, _padded(emit, value, whole, call, dst), whole, dst, call.group_size)
    )
    block = list(whole)
    block[dst] //= call.group_size
    value = _as_bytes(emit, value)
    splits = [block[0]] * call.group_size
    received = emit(WAIT, emit(ALL_TO_ALL, value, splits, splits, call.group_name))
    received = emit_from_bytes(emit, received, emit.tensor(call.value).dtype)
    if src != 0:
        received = emit_ranks_to_dim(emit, received, block, src, call.group_size)
    return _cut(emit, _cut(emit, received, call, src, call.shape[src]), call, dst, _rows(call, dst))


def _slice(emit: Emitter, value: Any, call: ReshardCall, dim: int) -> Any:
    start = min(call.rank * padded_rows(call.shape[dim], call.group_size), call.shape[dim])
    cut = emit(aten.slice.Tensor, value, dim, start, start + _rows(call, dim))
    return emit_contiguous(emit, cut)


def _divide(emit: Emitter, call: ReshardCall) -> Any:
    """Equal terms whose reduction is the value."""
    if _reduction(call.dst) == "product":
        raise UnsupportedShardingError(f"no reshard from {call.src} to {call.dst}")
    value = emit_contiguous(emit, call.value)
    return emit(aten.div.Tensor, value, call.group_size) if _reduction(call.dst) == "sum" else value


def _spread_terms(emit: Emitter, call: ReshardCall, dim: int) -> Any:
    """The piece with zeros around it: the terms of a sum."""
    if _reduction(call.dst) != "sum":
        raise UnsupportedShardingError(
            f"no reshard from {call.src} to {call.dst}: gather to {REPLICATE} first"
        )
    start = min(call.rank * padded_rows(call.shape[dim], call.group_size), call.shape[dim])
    behind = call.shape[dim] - start - _rows(call, dim)
    amounts = [0, 0] * (len(call.shape) - 1 - dim) + [start, behind]
    return emit(aten.constant_pad_nd.default, emit_contiguous(emit, call.value), amounts, 0.0)


def _rows(call: ReshardCall, dim: int) -> int:
    return shard_shape(call.shape, dim, call.group_size, call.rank)[dim]


def _whole_shape(shape: Sequence[int], call: ReshardCall, dim: int) -> list[int]:
    whole = list(shape)
    whole[dim] = padded_rows(shape[dim], call.group_size) * call.group_size
    return whole


def _is_even(call: ReshardCall, dim: int) -> bool:
    return bool(call.shape[dim] % call.group_size == 0)


def _padded(emit: Emitter, value: Any, shape: Sequence[int], call: ReshardCall, dim: int) -> Any:
    """Pads up to ``shape``; on every rank if on one, so that all ranks have equal nodes."""
    if _is_even(call, dim):
        return value
    missing = [want - have for want, have in zip(shape, emit.tensor(value).shape, strict=True)]
    amounts = [amount for size in reversed(missing) for amount in (0, size)]
    return emit(aten.constant_pad_nd.default, value, amounts, 0.0)


def _cut(emit: Emitter, value: Any, call: ReshardCall, dim: int, size: int) -> Any:
    """Drops padding; on every rank if on one."""
    if _is_even(call, dim):
        return value
    cut = emit(aten.slice.Tensor, value, dim, 0, size)
    return emit(aten.clone.default, cut, memory_format=torch.contiguous_format)


def _as_bytes(emit: Emitter, value: Any) -> Any:
    is_bool = emit.tensor(value).dtype is torch.bool
    return emit(aten.view.dtype, value, torch.uint8) if is_bool else emit_bytes(emit, value)


@torch.library.custom_op("graphshard::reshard", mutates_args=())
def reshard(
    value: Tensor,
    src: str,
    dst: str,
    shape: Sequence[int],
    axis: str,
    group_size: int,
    group_name: str,
    rank: int,
    placed: bool = False,
) -> Tensor:
    """Moves a tensor from one placement to another; :class:`ReshardCall` names the arguments.

    Returns:
        What this rank holds afterwards, contiguous.
    """
    result: Tensor = emit_reshard(
        EagerEmitter(), ReshardCall(value, src, dst, shape, axis, group_size, group_name, rank, placed)
    )
    is_input = result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return result.clone() if is_input else result


@reshard.register_fake
def _(
    value: Tensor,
    src: str,
    dst: str,
    shape: Sequence[int],
    axis: str,
    group_size: int,
    group_name: str,
    rank: int,
    placed: bool = False,
) -> Tensor:
    return value.new_empty(local_shape(shape, dst, group_size, rank))


def _save_call(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.call = ReshardCall(*inputs)._replace(value=None)


def _reshard_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    call: ReshardCall = ctx.call
    src, dst = of_gradient(call.dst), of_gradient(call.src)
    if src != dst:
        grad = torch.ops.graphshard.reshard(*call._replace(value=grad, src=src, dst=dst))
    return (grad,) + (None,) * (len(ReshardCall._fields) - 1)


reshard.register_autograd(_reshard_gradient, setup_context=_save_call)

RESHARD = torch.ops.graphshard.reshard.default
