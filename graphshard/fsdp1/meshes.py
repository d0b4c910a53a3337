"""The device meshes of a wrapper: from a process group, a pair of groups, a mesh, or nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from ..errors import ShardingError
from .options import Options

_NAMES = ("replicate", "shard")


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The ranks of a model's wrappers.

    Attributes:
        shard: 1-D, the ranks over which parameters are sharded.
        hybrid: 2-D with names, (replicate, shard); None without a hybrid strategy.
        unnamed: the mesh that the user gave, if it has no names; ``hybrid`` is the same with names.
    """

    shard: DeviceMesh
    hybrid: DeviceMesh | None = None
    unnamed: DeviceMesh | None = None

    @staticmethod
    def of(options: Options) -> Meshes:
        """The meshes that the arguments name.

        Raises:
            ShardingError: (a ValueError) they do not fit the sharding strategy.
        """
        if not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group()
        if not dist.is_initialized():
            raise ShardingError(
                "FullyShardedDataParallel: no process group; start the script with torchrun, or call "
                "torch.distributed.init_process_group()"
            )
        if options.is_hybrid:
            hybrid = _hybrid_mesh(options)
            assert hybrid.mesh_dim_names is not None
            unnamed = options.device_mesh if hybrid is not options.device_mesh else None
            return Meshes(shard=hybrid[hybrid.mesh_dim_names[1]], hybrid=hybrid, unnamed=unnamed)
        mesh, group = options.device_mesh, options.process_group
        if mesh is not None:
            if mesh.ndim != 1:
                raise ShardingError(
                    f"FullyShardedDataParallel: {options.strategy} needs a 1-D device_mesh, got shape "
                    f"{tuple(mesh.shape)}; use HYBRID_SHARD, or one axis of the mesh"
                )
            return Meshes(shard=mesh)
        if group is not None:
            if not isinstance(group, dist.ProcessGroup):
                raise ShardingError(
                    f"FullyShardedDataParallel: process_group is a {type(group).__name__}; {options.strategy} needs "
                    "one ProcessGroup, and the hybrid strategies a tuple of two"
                )
            return Meshes(shard=DeviceMesh.from_group(group, _device_type(options, group)))
        return Meshes(shard=init_device_mesh(_device_type(options), (dist.get_world_size(),)))

    @property
    def whole(self) -> DeviceMesh:
        """The ranks that train the model, copies included."""
        return self.shard if self.hybrid is None else self.hybrid

    @property
    def world_size(self) -> int:
        """Their number."""
        return self.whole.size()

    def as_given(self, value: DTensor) -> DTensor:
        """A value for a state dict: on the mesh that the user gave."""
        if self.unnamed is None or value.device_mesh != self.hybrid:
            return value
        return on_mesh(value, self.unnamed)

    @cached_property
    def copies(self) -> DeviceMesh:
        """2-D with a shard axis of one rank: every rank holds whole parameters, and gradients are all-reduced."""
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(
            [self.shard.get_group(), alone],
            self.shard.device_type,
            mesh=self.shard.mesh.view(-1, 1),
            mesh_dim_names=_NAMES,
        )

    def mesh_for(self, options: Options) -> DeviceMesh:
        """The mesh that ``fully_shard`` gets for the sharding strategy.

        Raises:
            ShardingError: (a ValueError) a hybrid strategy inside a model without one.
        """
        if options.strategy is ShardingStrategy.NO_SHARD and self.shard.size() > 1:
            return self.copies
        if not options.is_hybrid:
            return self.shard
        if self.hybrid is None:
            raise ShardingError(
                f"FullyShardedDataParallel: the auto-wrap policy asks for {options.strategy} below a wrapper without "
                "a second axis; give the outer wrapper a 2-D device_mesh and a hybrid strategy"
            )
        return self.hybrid

    def __deepcopy__(self, memo: dict[int, Any]) -> Meshes:
        """The same meshes: a copied model runs on the same ranks."""
        return self


def on_mesh(value: DTensor, mesh: DeviceMesh) -> DTensor:
    """A detached DTensor with the same local tensor and placements on another mesh of the same ranks."""
    return DTensor.from_local(
        value.detach().to_local(),
        mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _device_type(options: Options, group: dist.ProcessGroup | None = None) -> str:
    given, accelerator = options.device, torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator is not None else "cpu"
    wanted = (
        given.type if isinstance(given, torch.device) else ("cpu" if given is None else "an accelerator's")
    )
    if given is None:
        return kind if dist.get_backend(group) != "gloo" else "cpu"
    if wanted not in ("cpu", kind) and kind == "cpu":
        raise ShardingError(
            f"FullyShardedDataParallel: device_id={given!r} is {wanted}, but this process has no accelerator; leave "
            'it out, or pass torch.device("cpu")'
        )
    return wanted if isinstance(given, torch.device) else kind


def _hybrid_mesh(options: Options) -> DeviceMesh:
    mesh, groups, strategy = options.device_mesh, options.process_group, options.strategy
    if mesh is not None:
        if mesh.ndim != 2:
            raise ShardingError(
                f"FullyShardedDataParallel: {strategy} needs a 2-D device_mesh (replicate, shard), got shape "
                f"{tuple(mesh.shape)}"
            )
        return mesh if mesh.mesh_dim_names is not None else _named(mesh)
    if groups is None:
        if options.auto_wrap_policy is None:
            raise ShardingError(
                f"FullyShardedDataParallel: {strategy} without auto_wrap_policy needs process_group or device_mesh, "
                "so that all wrappers of the model run on the same ranks"
            )
        return _mesh_of_nodes(options)
    if (
        not isinstance(groups, tuple)
        or len(groups) != 2
        or not all(isinstance(each, dist.ProcessGroup) for each in groups)
    ):
        raise ShardingError(
            f"FullyShardedDataParallel: {strategy} needs process_group to be a tuple of two process groups, "
            f"(shard, replicate), got a {type(groups).__name__}; or pass a 2-D device_mesh"
        )
    shard, replicate = groups
    rows: list[Any] = [None] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    return DeviceMesh.from_group(
        [replicate, shard], _device_type(options, shard), mesh=torch.tensor(rows), mesh_dim_names=_NAMES
    )


def _named(mesh: DeviceMesh) -> DeviceMesh:
    groups = mesh.get_all_groups()
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=_NAMES)


def _mesh_of_nodes(options: Options) -> DeviceMesh:
    """Shards inside a node, copies across nodes; a node has as many ranks as this one has devices."""
    device_type, world_size = _device_type(options), dist.get_world_size()
    per_node = torch.accelerator.device_count() if device_type != "cpu" else 0
    if per_node == 0 or world_size % per_node:
        raise ShardingError(
            f"FullyShardedDataParallel: {options.strategy} cannot tell the nodes of {world_size} ranks on "
            f"{per_node} {device_type} device(s) a node; pass a 2-D device_mesh (replicate, shard)"
        )
    return init_device_mesh(device_type, (world_size // per_node, per_node), mesh_dim_names=_NAMES)
