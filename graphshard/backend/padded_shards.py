"""Shards as compiled code takes them, equal in shape on all ranks, and their gradients as DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .._compat import gradients_are_boxed
from .._compat_autograd import accumulates_in_leaf, are_in_order
from ..fsdp.state import add_to_grad, as_complex, refuse_lost_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One parameter that enters as its padded shard.

    Attributes:
        position: where the shard enters.
        source: position of the argument: the same, or that of a parameter that the graph reads without a gather, too.
        shape: of the padded shard.
        dim: along which the parameter is cut.
        names: under which the graph gathers it: one, several for a tied parameter, none at one rank.
        as_reals: it is complex, and enters as reals, with a last dim of 2.
        is_carrier: what enters takes the gradient only; the shard has a gather extension.
    """

    position: int
    source: int
    shape: tuple[int, ...]
    dim: int
    names: tuple[str, ...] = ()
    as_reals: bool = False
    is_carrier: bool = False


def padded_local(param: DTensor, crossing: Crossing) -> Tensor:
    """The padded shard of a parameter: a view if its storage has room for the padding, a copy if not.

    The gather drops the padding, whatever its values are.
    """
    refuse_lost_data(param, crossing.names[0] if crossing.names else "")
    if crossing.is_carrier:
        device = param._local_tensor.device
        return torch.empty(1, dtype=param.dtype, device=device).expand(crossing.shape)
    local = param._local_tensor.detach()
    if crossing.as_reals:
        local = torch.view_as_real(local)
    if local.shape == crossing.shape:
        return local
    numel = 1
    for size in crossing.shape:
        numel *= size
    room = local.untyped_storage().nbytes() // local.element_size() - local.storage_offset()
    if crossing.dim == 0 and room >= numel and local.is_contiguous():
        return local.as_strided((numel,), (1,)).view(crossing.shape)
    padded = local.new_zeros(crossing.shape)
    padded.narrow(crossing.dim, 0, local.shape[crossing.dim]).copy_(local)
    return padded


class PaddedLocals(torch.autograd.Function):
    """Turns DTensor parameters into padded local shards, and gradients of shards into DTensor gradients."""

    @staticmethod
    def forward(ctx: Any, crossings: list[Crossing], *params: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.crossings = crossings
        ctx.specs = [param._spec for param in params]
        ctx.local_shapes = [param._local_tensor.shape for param in params]
        return tuple(padded_local(param, crossing) for crossing, param in zip(crossings, params, strict=True))

    #: The gradients come in a list, where torch can do that. Compiled autograd, which would run the backward as it was
    #: before the passes, refuses such functions.
    boxed_grads_call = True

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        given: list[Tensor | None] = grads[0] if gradients_are_boxed else list(grads)
        if torch.is_grad_enabled():  # create_graph: the gradients of gradients are refused
            return _to_shards_once(ctx, *given)
        return PaddedLocals.to_shards(ctx, given)

    @staticmethod
    def to_shards(ctx: Any, grads: Sequence[Tensor | None], *, is_recorded: bool = False) -> tuple[Any, ...]:
        """Gradients of the shards, of those of padded shards.

        Args:
            is_recorded: autograd records what becomes of the gradients, so leaves get them from autograd.
        """
        result: list[Any] = [None]
        is_in_order = are_in_order(grads)
        for (leaf, _), crossing, spec, shape, grad in zip(
            ctx.next_functions, ctx.crossings, ctx.specs, ctx.local_shapes, grads, strict=True
        ):
            if grad is not None:
                if grad.shape[crossing.dim] != shape[crossing.dim]:
                    grad = grad.narrow(crossing.dim, 0, shape[crossing.dim])
                if crossing.as_reals:
                    grad = as_complex(grad)
                # What DTensor(...) does, without its __init__, which is empty and takes 2 us.
                grad = DTensor.__new__(DTensor, grad.contiguous(), spec, requires_grad=False)
                if not is_recorded and accumulates_in_leaf(leaf, is_in_order=is_in_order):
                    # That node would detach the DTensor, through the dispatch of DTensors for each parameter.
                    add_to_grad(leaf.variable, grad)
                    grad = None
            result.append(grad)
        return tuple(result)


@once_differentiable
def _to_shards_once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    detached = [None if grad is None else grad.detach() for grad in grads]
    return PaddedLocals.to_shards(ctx, detached, is_recorded=True)
