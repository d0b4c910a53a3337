"""``clip_grad_norm_``: one norm over sharded and whole gradients."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat import group_by_name


@torch.no_grad()
def clip_gradients(
    params: Iterable[nn.Parameter], max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Scales all gradients so that their norm, as of one vector, is ``max_norm`` at most.

    Pieces of sharded gradients are counted on the ranks that hold them, whole gradients once. Norms are computed in
    float32, or in the dtype of the gradients if that is wider. Call it on all ranks.

    Returns:
        The norm before, in the widest dtype of the gradients.
    """
    grads = [param.grad for param in params if param.grad is not None]
    max_norm, norm_type = float(max_norm), float(norm_type)
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(_sharding_groups(grad), []).append(_local(grad))
    if not grads:
        warnings.warn(
            "FullyShardedDataParallel.clip_grad_norm_: this rank has no gradients; the norm is a float32 zero",
            stacklevel=3,
        )
        return torch.zeros((), device=device)
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads))
    total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    is_inf = norm_type == torch.inf
    for names, pieces in groups.items():
        norms = [
            torch.linalg.vector_norm(piece, norm_type, dtype=total.dtype) for piece in pieces if piece.numel()
        ]
        part = torch.zeros_like(total)
        for norm in norms:
            norm = norm.to(device)
            part = torch.maximum(part, norm) if is_inf else part + norm**norm_type
        for name in names:
            dist.all_reduce(
                part, op=dist.ReduceOp.MAX if is_inf else dist.ReduceOp.SUM, group=group_by_name(name)
            )
        total = torch.maximum(total, part) if is_inf else total + part
    if not is_inf:
        total = total ** (1.0 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local = _local(grad)
        local.mul_(scale.to(local.device, local.dtype))
    return total.to(dtype)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _sharding_groups(grad: Tensor) -> tuple[str, ...]:
    """The names of the process groups over which a gradient is cut, in pieces that do not overlap."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(
        mesh.get_group(dim).group_name
        for dim, placement in enumerate(grad.placements)
        if placement.is_shard() or not placement.is_replicate()
    )
