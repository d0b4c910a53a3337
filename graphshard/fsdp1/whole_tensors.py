"""Whole tensors of the shards of a unit: those that the ranks cut evenly along dim 0 travel in one gather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._compat_gloo import gather_single
from ..fsdp import mesh_device

#: Tensors of one bucket have the same: process group, dtype, device.
_Bucket: TypeAlias = tuple[dist.ProcessGroup, torch.dtype, torch.device]


def whole_tensors(values: Iterable[Tensor]) -> list[Tensor]:
    """The whole of each sharded tensor, in memory of its own; all ranks take part, with the same tensors."""
    values = list(values)
    buckets: dict[_Bucket, list[int]] = {}
    found: dict[int, Tensor] = {}
    for index, value in enumerate(values):
        bucket = _bucket_of(value)
        if bucket is None:
            found[index] = whole_tensor(value)
        else:
            buckets.setdefault(bucket, []).append(index)
    for (group, _, device), members in buckets.items():
        gathered = _gather([values[index] for index in members], group, device)
        found.update(zip(members, gathered, strict=True))
    return [found[index] for index in range(len(values))]


def whole_tensor(value: Tensor) -> Tensor:
    """The whole of a sharded tensor, in memory of its own; all ranks take part."""
    assert isinstance(value, DTensor)
    value = value.detach().to(mesh_device(value.device_mesh))
    full = value.full_tensor()
    local = value.to_local()
    return full.clone() if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else full


def _bucket_of(value: Tensor) -> _Bucket | None:
    """The bucket of a tensor; None if it is gathered by itself."""
    assert isinstance(value, DTensor)
    mesh = value.device_mesh
    cuts = [axis for axis, placement in enumerate(value.placements) if not isinstance(placement, Replicate)]
    if len(cuts) != 1 or type(value.placements[cuts[0]]) is not Shard or value.placements[cuts[0]].dim != 0:
        return None
    is_usual = value.dtype.is_floating_point and value.dtype.itemsize > 1 and not value.is_meta
    is_even = value.shape[0] % mesh.size(cuts[0]) == 0 and mesh.size(cuts[0]) > 1
    if not (is_usual and is_even and type(value.to_local()) is Tensor):
        return None
    return mesh.get_group(cuts[0]), value.dtype, mesh_device(mesh)


def _gather(values: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    flats = [value.detach().to_local().to(device).reshape(-1) for value in values]
    sizes = [flat.numel() for flat in flats]
    flat = torch.cat(flats)
    gathered = flat.new_empty(group.size() * flat.numel())
    gather_single(gathered, flat, group=group)
    pieces = torch.split_with_sizes_copy(gathered.view(group.size(), -1), sizes, 1)
    return [piece.view(value.shape) for value, piece in zip(values, pieces, strict=True)]
