"""Cuts this rank's shard out of a parameter: a DTensor with a storage of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from ..ir import padded_rows, padded_shape, shard_shape
from .gather_extensions import check_gather, copy_extended, cut_extended, is_quantised
from .placements import Layout


def shard_parameter(param: nn.Parameter, layout: Layout, offload_policy: OffloadPolicy) -> nn.Parameter:
    """This rank's shard, copied out of the full parameter, as a DTensor parameter."""
    full, dim = local_piece(param).detach(), layout.dim
    is_offloaded = isinstance(offload_policy, CPUOffloadPolicy)
    device = full.device if full.is_meta else home_of(layout, offload_policy)
    rank, num_ranks = layout.axes.shard_rank, layout.axes.shard.size
    size = shard_shape(full.shape, dim, num_ranks, rank)[dim]
    start = min(rank * padded_rows(full.shape[dim], num_ranks), full.shape[dim])
    # The shard has its own storage, with room for the padding, so that the full one is freed.
    padded = torch.zeros(padded_shape(full.shape, dim, num_ranks), dtype=param.dtype, device=device)
    if is_offloaded and offload_policy.pin_memory and device.type == "cpu" and torch.cuda.is_available():
        padded = padded.pin_memory()
    # An uneven cut along another dim than 0 is not contiguous in the padded storage: it is copied, without room.
    local = padded.narrow(dim, 0, size).contiguous()
    if not full.is_meta:
        local.copy_(full.narrow(dim, start, size))
    # from_local would move an offloaded shard to the mesh's device, so it only makes the spec.
    like = local if local.device.type == layout.mesh.device_type else torch.empty_like(local, device="meta")
    sharded = DTensor.from_local(
        like, layout.mesh, layout.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    if like is not local:
        sharded = DTensor(local, sharded._spec, requires_grad=False)
    return nn.Parameter(sharded, requires_grad=param.requires_grad)


def shard_extended(
    param: nn.Parameter,
    layout: Layout,
    offload_policy: OffloadPolicy,
    name: str,
    owner: nn.Module,
    policy: Any,
) -> nn.Parameter:
    """As :func:`shard_parameter`, for a tensor subclass with a gather extension: the shard has the same class.

    It is cut by the ops of that class, and what is gathered must be what was cut, bit by bit.
    """
    full = local_piece(param).detach()
    rank, num_ranks = layout.axes.shard_rank, layout.axes.shard.size
    pieces = cut_extended(full, name, num_ranks)
    local = copy_extended(
        pieces[rank], name, full.device if full.is_meta else home_of(layout, offload_policy)
    )
    if is_quantised(full) and not full.is_meta:
        mesh = layout.axes.mesh
        shard_mesh = mesh if mesh.ndim == 1 or mesh.mesh_dim_names is None else mesh[mesh.mesh_dim_names[-1]]
        pre_arguments = (shard_mesh, full.shape, tuple(full.stride()), owner, policy)
        check_gather(full, pieces, name, rank, pre_arguments)
    like = torch.empty(local.shape, dtype=local.dtype, device="meta")  # from_local only makes the spec
    spec = DTensor.from_local(
        like, layout.mesh, layout.placements, run_check=False, shape=param.shape, stride=param.stride()
    )._spec
    return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=param.requires_grad)


def local_piece(param: nn.Parameter) -> torch.Tensor:
    """The tensor that is cut: the parameter, or this rank's piece if it is a DTensor."""
    return param._local_tensor if isinstance(param, DTensor) else param


def home_of(layout: Layout, offload_policy: OffloadPolicy) -> torch.device:
    """The device of the shards."""
    if isinstance(offload_policy, CPUOffloadPolicy):
        return torch.device("cpu")
    return mesh_device(layout.mesh)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank in a mesh: the CPU, or the current device of the accelerator."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
