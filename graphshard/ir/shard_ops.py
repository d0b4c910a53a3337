"""Level 1: the shard ops ``graphshard::unshard`` and ``graphshard::reduce_grad``.

They say which data must be where, and not how it gets there. A call carries everything its lowering needs
(:class:`~graphshard.ir.params.UnshardCall` and :class:`~graphshard.ir.params.ReduceGradCall` name the arguments), so a
printed graph is the whole program and compile caches stay sound. Each op has a fake and an eager implementation. The
backward of ``unshard`` is ``reduce_grad``, so a sharded model trains uncompiled too.

Graphs of other compilers run these ops one by one. The backend ``graphshard`` lowers them, and a model that runs
uncompiled does not call them (:mod:`graphshard.fsdp.eager_autograd`).

What a user switches between steps (gradient sync, parameters kept gathered) is state of the unit, not of the graph.
The argument ``handle`` leads to it (:mod:`graphshard.ir.handles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import in_backward, outside_transforms
from .handles import unit_state_of
from .lowering import EagerEmitter, emit_reduce_grad, emit_unshard
from .params import ReduceGradCall, UnshardCall, gradient_call, padded_shape


@torch.library.custom_op("graphshard::unshard", mutates_args=())
def unshard(
    shard: Tensor,
    handle: Tensor,
    name: str,
    unit: str,
    shape: Sequence[int],
    dim: int,
    dtype: torch.dtype | None,
    reshard: int,
    reshard_group: str,
    axis: str,
    group_size: int,
    group_name: str,
    replicate_axis: str,
    replicate_size: int,
    replicate_group: str,
    reduce_dtype: torch.dtype | None,
    divide_factor: float | None,
    force_sum: bool,
    device: torch.device | None = None,
    reduce_group: str = "",
    custom: str = "",
    forward_prefetch: str = "",
    backward_prefetch: str = "",
    max_reductions: int = 0,
    reshard_fixed: bool = False,
    row_offset: int = -1,
) -> Tensor:
    """Gathers the shards of a parameter into the full parameter; :class:`UnshardCall` names the arguments.

    Returns:
        A contiguous tensor of ``shape``, in ``dtype`` or the shard's dtype.
    """
    call = UnshardCall(
        shard, handle, name, unit, shape, dim, dtype, reshard, reshard_group, axis, group_size,
        group_name, replicate_axis, replicate_size, replicate_group, reduce_dtype, divide_factor, force_sum,
        device, reduce_group, custom, forward_prefetch, backward_prefetch, max_reductions, reshard_fixed,
        row_offset,
    )  # fmt: skip
    owner = unit_state_of(handle)
    if owner is not None:
        owner.warn_unplanned()
        kept = owner.gathered_value(name)
        if kept is not None:
            return kept.clone()  # the compiler of the graph may write over what an op returns
        owner.meet_for_gather([name], call)
    full = emit_unshard(EagerEmitter(), call)
    full = full.clone() if full is shard else full
    if owner is not None and owner.keeps_from_forward:
        owner.keep(name, full.clone())
    return full


@unshard.register_fake
def _(
    shard: Tensor,
    handle: Tensor,
    name: str,
    unit: str,
    shape: Sequence[int],
    dim: int,
    dtype: torch.dtype | None,
    *rest: Any,
) -> Tensor:
    call = UnshardCall(shard, handle, name, unit, shape, dim, dtype, *rest)
    return shard.new_empty(shape, dtype=dtype or shard.dtype, device=call.device or shard.device)


@torch.library.custom_op("graphshard::reduce_grad", mutates_args=())
def reduce_grad(
    grad: Tensor,
    unreduced: Tensor | None,
    partial: Tensor | None,
    handle: Tensor,
    name: str,
    unit: str,
    shard_shape: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    axis: str,
    group_size: int,
    group_name: str,
    replicate_axis: str,
    replicate_size: int,
    replicate_group: str,
    reduce_dtype: torch.dtype | None,
    divide_factor: float | None,
    force_sum: bool,
    all_reduce: bool,
    device: torch.device | None = None,
    custom: str = "",
) -> Tensor:
    """Reduces a full gradient over the ranks to this rank's piece; :class:`ReduceGradCall` names the arguments.

    Returns:
        A contiguous tensor of ``shard_shape`` and ``dtype``. Without ``all_reduce``: the padded piece in the dtype of
        the reduction.
    """
    call = ReduceGradCall(
        grad, unreduced, partial, handle, name, unit, shard_shape, dim, dtype, axis, group_size, group_name,
        replicate_axis, replicate_size, replicate_group, reduce_dtype, divide_factor, force_sum, all_reduce,
        device, custom,
    )  # fmt: skip
    owner = unit_state_of(handle)
    if owner is not None and in_backward():
        return owner.reduce_unplanned(call)
    reduced: Tensor = emit_reduce_grad(EagerEmitter(), call)
    is_input = any(reduced is given for given in (grad, unreduced, partial))
    return reduced.clone() if is_input else reduced


@reduce_grad.register_fake
def _(*arguments: Any) -> Tensor:
    call = ReduceGradCall(*arguments)
    if call.all_reduce:
        return call.grad.new_empty(call.shard_shape, dtype=call.dtype, device=call.device or call.grad.device)
    shape = padded_shape(call.grad.shape, call.dim, call.group_size)
    return call.grad.new_empty(shape, dtype=call.reduce_dtype or call.grad.dtype)


def _save_for_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = UnshardCall(*inputs)
    ctx.save_for_backward(call.handle)
    shard = call.shard
    ctx.call = gradient_call(call._replace(handle=None), None, shard.shape, shard.dtype, shard.device)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    call = ctx.call.with_gradient(grad, handle)
    owner = unit_state_of(handle)
    if owner is not None:
        (reduced,) = owner.reduce([call])
    else:
        reduced = torch.ops.graphshard.reduce_grad(*call)
    return (reduced,) + (None,) * (len(UnshardCall._fields) - 1)


unshard.register_autograd(_reduce, setup_context=_save_for_reduction)


@torch.compiler.allow_in_graph
def unshard_outside_transforms(param: Tensor, *arguments: Any) -> Tensor:
    """What a forward reads inside a transform of ``torch.func`` (``vmap``, ``grad``, ``jvp``, ...).

    A sharded parameter is a constant of these transforms, which can neither batch nor differentiate its gather. So the
    gather runs outside of all of them; autograd differentiates it there. Dynamo writes a call of this function into its
    graph, and the backend ``graphshard`` moves the gather to the top of it.

    Args:
        param: the sharded parameter, a DTensor.
        arguments: those of ``graphshard::unshard`` after the shard; none if the shard itself is read.
    """
    with outside_transforms(is_traced=True):
        local = param.to_local()
        return UNSHARD(local, *arguments) if arguments else local


UNSHARD = torch.ops.graphshard.unshard.default
REDUCE_GRAD = torch.ops.graphshard.reduce_grad.default
