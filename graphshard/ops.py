"""Level 1: the shard ops ``graphshard::unshard`` and ``graphshard::reduce_grad``.

They say what must be where, not how. A call carries everything its lowering needs, so a printed
graph is the whole program and compile caches stay sound. Each op has a fake and an eager
implementation; ``unshard`` has an autograd formula whose backward is ``reduce_grad``, so a sharded
model also trains uncompiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .collectives import EagerEmitter, emit_reduce_grad, emit_unshard


@torch.library.custom_op("graphshard::unshard", mutates_args=())
def unshard(
    shard: Tensor,
    name: str,
    unit: str,
    shape: Sequence[int],
    dim: int,
    axis: str,
    group_size: int,
    group_name: str,
    reshard: bool,
    reduce_op: str,
    grad_scale: float,
) -> Tensor:
    """Gather a parameter's shards along ``dim`` into the full parameter.

    Args:
        shard: this rank's piece, padded to ``ceil(shape[dim] / group_size)`` rows or not; any dtype.
        name: fully qualified name of the parameter, for text and errors.
        unit: label of the unit whose collectives are merged.
        shape: shape of the full parameter.
        dim: tensor dimension that is cut.
        axis: label of the mesh axis.
        group_size: ranks on that axis.
        group_name: process group of that axis.
        reshard: free the full parameter after the forward and gather it again in the backward.
        reduce_op: reduction of the gradient, ``"sum"`` or ``"avg"``.
        grad_scale: factor on the reduced gradient.

    Returns:
        A contiguous tensor of ``shape`` and of the shard's dtype.
    """
    full = emit_unshard(
        EagerEmitter(), shard, shape=shape, dim=dim, group_size=group_size, group_name=group_name
    )
    return full.clone() if full is shard else full


@unshard.register_fake
def _(
    shard: Tensor,
    name: str,
    unit: str,
    shape: Sequence[int],
    dim: int,
    axis: str,
    group_size: int,
    group_name: str,
    reshard: bool,
    reduce_op: str,
    grad_scale: float,
) -> Tensor:
    return shard.new_empty(shape)


@torch.library.custom_op("graphshard::reduce_grad", mutates_args=())
def reduce_grad(
    grad: Tensor,
    name: str,
    unit: str,
    shard_shape: Sequence[int],
    dim: int,
    axis: str,
    group_size: int,
    group_name: str,
    reduce_op: str,
    scale: float,
) -> Tensor:
    """Reduce a full gradient over the ranks and keep this rank's piece.

    Args:
        grad: gradient of the full parameter, any layout.
        shard_shape: shape of the piece to return (the shape the shard had).
        scale: factor applied after the reduction (1 / ranks for a mean written as a sum).
        name, unit, dim, axis, group_size, group_name, reduce_op: as in ``unshard``.

    Returns:
        A contiguous tensor of ``shard_shape`` and of the gradient's dtype.
    """
    return emit_reduce_grad(
        EagerEmitter(),
        grad,
        shard_shape=shard_shape,
        dim=dim,
        group_size=group_size,
        group_name=group_name,
        reduce_op=reduce_op,
        scale=scale,
    )


@reduce_grad.register_fake
def _(
    grad: Tensor,
    name: str,
    unit: str,
    shard_shape: Sequence[int],
    dim: int,
    axis: str,
    group_size: int,
    group_name: str,
    reduce_op: str,
    scale: float,
) -> Tensor:
    return grad.new_empty(shard_shape)


def _save_for_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, name, unit, _, dim, axis, group_size, group_name, _, reduce_op, scale = inputs
    ctx.reduction = (name, unit, list(shard.shape), dim, axis, group_size, group_name, reduce_op, scale)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (torch.ops.graphshard.reduce_grad(grad, *ctx.reduction),) + (None,) * 10


unshard.register_autograd(_reduce, setup_context=_save_for_reduction)

UNSHARD = torch.ops.graphshard.unshard.default
REDUCE_GRAD = torch.ops.graphshard.reduce_grad.default
