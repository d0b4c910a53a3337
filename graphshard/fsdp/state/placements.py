"""Where the shards of a parameter are: the axes of data parallelism, and the placements on them.

A plain parameter is cut along one dim over the shard axis. A parameter may be a DTensor already, split over the axis of
another parallelism (tensor, expert). Then its local piece is cut, and the shards form a DTensor on the mesh of both.
Placements are those of FSDP2, so checkpoints of one load into the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..._compat import (
    ShardPlacementResult,
    flatten_mesh,
    from_local_takes_grad_placements,
    join_meshes,
    strided_shard,
)
from ...errors import ShardDimError, ShardingError, UnnamedMeshError, UnsupportedShardingError
from ...ir import NO_AXIS, READ_WHOLE, REPLICATE, RESHARD, MeshAxis, axis_of, placement_text


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDims:
    """The axes of data parallelism in a mesh of all parallelisms (FSDP2's ``dp_mesh_dims``)."""

    mesh: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def indices(self, names: Sequence[str]) -> tuple[int, ...]:
        """The positions of axes in the mesh."""
        assert self.mesh.mesh_dim_names is not None
        return tuple(self.mesh.mesh_dim_names.index(name) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelAxes:
    """The axis over which parameters are cut, and the one over which they are copied.

    Attributes:
        mesh: the mesh of these axes alone.
        shard_rank: this rank's position on the shard axis.
        shard_dim: the position of the shard axis in ``mesh``; None if there is no such axis.
        named: the mesh of all parallelisms, if the axes were given by their names in it.
    """

    mesh: DeviceMesh
    shard: MeshAxis
    shard_rank: int
    shard_dim: int | None
    replicate: MeshAxis = NO_AXIS
    named: NamedDims | None = None

    @staticmethod
    def of(mesh: DeviceMesh) -> DataParallelAxes:
        """1-D: the shard axis; 2-D: the replicate axis, then the shard axis.

        Raises:
            ShardingError: another number of dimensions.
            UnnamedMeshError: 2-D without names.
        """
        if mesh.ndim == 1:
            return DataParallelAxes.on(mesh, shard_dim=0)
        shape = tuple(mesh.shape)
        if mesh.ndim != 2:
            raise ShardingError(
                f"fully_shard: the mesh must be 1-D (shard) or 2-D (replicate, shard), "
                f"got {mesh.ndim} dimensions of shape {shape}"
            )
        if mesh.mesh_dim_names is None:
            raise UnnamedMeshError(
                f"fully_shard: the 2-D mesh of shape {shape} needs mesh_dim_names, "
                'such as ("replicate", "shard")'
            )
        return DataParallelAxes.on(mesh, shard_dim=1, replicate_dim=0)

    @staticmethod
    def on(
        mesh: DeviceMesh,
        *,
        shard_dim: int | None,
        replicate_dim: int | None = None,
        named: NamedDims | None = None,
    ) -> DataParallelAxes:
        """The axes at these positions of a mesh that has no others."""
        return DataParallelAxes(
            mesh=mesh,
            shard=NO_AXIS if shard_dim is None else axis_of(mesh, shard_dim),
            shard_rank=0 if shard_dim is None else mesh.get_local_rank(shard_dim),
            shard_dim=shard_dim,
            replicate=NO_AXIS if replicate_dim is None else axis_of(mesh, replicate_dim),
            named=named,
        )

    @staticmethod
    def of_named(mesh: DeviceMesh, dims: Any) -> DataParallelAxes:
        """The axes of a mesh of all parallelisms that ``dims.shard_names`` and ``dims.replicate_names`` name.

        Raises:
            ShardingError: no axis is named, one does not exist, or the mesh has no names.
        """
        shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
        names = mesh.mesh_dim_names
        missing = [name for name in (*shard, *replicate) if name not in (names or ())]
        if names is None or missing or not (shard or replicate):
            raise ShardingError(
                f"fully_shard: dp_mesh_dims names shard={shard} and replicate={replicate}; they must be axes of "
                f"the mesh, whose axes are {names}"
            )
        named = NamedDims(mesh=mesh, shard=shard, replicate=replicate)
        if not shard:
            return DataParallelAxes.on(
                flatten_mesh(mesh, replicate), shard_dim=None, replicate_dim=0, named=named
            )
        if not replicate:
            return DataParallelAxes.on(flatten_mesh(mesh, shard), shard_dim=0, named=named)
        both = join_meshes(flatten_mesh(mesh, replicate), flatten_mesh(mesh, shard))
        return DataParallelAxes.on(both, shard_dim=1, replicate_dim=0, named=named)

    def placements(self, cut: Placement) -> list[Placement]:
        """``cut`` on the shard axis, copies on the other."""
        return [cut if dim == self.shard_dim else Replicate() for dim in range(self.mesh.ndim)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterLayout:
    """The layout of a gathered parameter that is a DTensor of another parallelism (tensor, expert).

    Shards are cut from this rank's piece of the DTensor. A gather returns that piece, and the forward must see the
    DTensor again.

    Attributes:
        mesh, placements: those of the parameter.
        grad_placements: those that its gradient must have before data parallelism reduces it.
        shape, stride: those of the whole parameter over all ranks.
        whole: arguments of the reshard after the value, if the forward sees the whole tensor in place of the DTensor
            (``graphshard.parallelize``); None if it sees the DTensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    grad_placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    whole: tuple[Any, ...] | None = None

    @staticmethod
    def of(param: DTensor, partial_dims: tuple[int, ...] = ()) -> OuterLayout:
        """The layout of ``param``; its gradients are not summed over the mesh dims ``partial_dims``."""
        placements = tuple(param.placements)
        return OuterLayout(
            mesh=param.device_mesh,
            placements=placements,
            grad_placements=tuple(
                Partial() if dim in partial_dims else placement for dim, placement in enumerate(placements)
            ),
            shape=param.shape,
            stride=tuple(param.stride()),
            whole=_to_whole(param) if hasattr(param, READ_WHOLE) else None,
        )

    def wrap(self, piece: Tensor) -> Tensor:
        """What a forward reads: the DTensor with the local tensor ``piece``, or the whole tensor.

        Gradients flow back to ``piece``.
        """
        if self.whole is not None:
            return RESHARD(piece, *self.whole) if self.whole[0] != REPLICATE else piece
        of_gradient = {"grad_placements": self.grad_placements} if from_local_takes_grad_placements else {}
        return DTensor.from_local(
            piece,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
            **of_gradient,
        )


def _to_whole(param: DTensor) -> tuple[Any, ...]:
    axis = axis_of(param.device_mesh)
    src, rank = placement_text(param.placements[0]), param.device_mesh.get_local_rank()
    return (src, REPLICATE, list(param.shape), axis.label, axis.size, axis.group_name, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one parameter is sharded.

    Attributes:
        axes: the axes over which shards are gathered and gradients reduced.
        dim: the dim that is cut.
        mesh, placements: those of the sharded DTensor.
        outer: layout of the DTensor that it is while gathered; None for a plain tensor.
    """

    axes: DataParallelAxes
    dim: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    outer: OuterLayout | None = None


def layout_of(param: nn.Parameter, name: str, axes: DataParallelAxes, placement: Any = None) -> Layout:
    """How ``param`` is sharded.

    Args:
        param: plain, or a DTensor on the mesh of another parallelism.
        name: its name, for errors.
        axes: the axes of its unit.
        placement: the result of ``shard_placement_fn``: None (dim 0), ``Shard``, or torch's
            ``ShardPlacementResult`` (a placement, and axes for this parameter alone).

    Raises:
        ShardingError: no dim to cut, a mesh that does not fit, or an unknown kind of placement.
        ShardDimError: the parameter has no such dim.
        UnsupportedShardingError: graphshard does not handle the layout.
    """
    shape = tuple(param.shape)
    if param.ndim == 0:
        raise ShardingError(
            f"fully_shard: parameter {name} has no dimension to cut over {axes.mesh.size()} ranks; "
            "make it 1-D (shape [1]) or list it in ignored_params"
        )
    if not param.is_contiguous():
        raise UnsupportedShardingError(
            f"fully_shard: parameter {name} {shape} is not contiguous; "
            "call .contiguous() on its data first (channels_last weights included)"
        )
    if ShardPlacementResult is not None and isinstance(placement, ShardPlacementResult):
        axes, placement = _own_axes(name, placement.mesh_info), placement.placement
    dim = _dim_of(placement, name, shape)
    if axes.named is not None:
        return _layout_on_named(param, name, axes, axes.named, dim)
    if not isinstance(param, DTensor):
        return Layout(axes=axes, dim=dim, mesh=axes.mesh, placements=tuple(axes.placements(Shard(dim))))
    outer = OuterLayout.of(param)
    cut = strided_shard(dim, _num_cuts(outer.mesh, outer.placements, dim))
    return Layout(
        axes=axes,
        dim=dim,
        mesh=_joint_mesh(param, name, axes),
        placements=(*axes.placements(cut), *outer.placements),
        outer=outer,
    )


def _own_axes(name: str, mesh_info: Any) -> DataParallelAxes:
    """The axes in torch's ``FSDPMeshInfo``, a mesh for one parameter."""
    if mesh_info.shard_mesh_dim is None or mesh_info.dp_mesh_dims is not None:
        raise UnsupportedShardingError(
            f"fully_shard: the mesh that shard_placement_fn gives parameter {name} must have an axis to shard over "
            "and no dp_mesh_dims"
        )
    return DataParallelAxes.on(
        mesh_info.mesh, shard_dim=mesh_info.shard_mesh_dim, replicate_dim=mesh_info.replicate_mesh_dim
    )


def _dim_of(placement: Any, name: str, shape: tuple[int, ...]) -> int:
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise ShardingError(
            f"fully_shard: shard_placement_fn returned {placement!r} for parameter {name} {shape}; "
            "it must return None, Shard(dim) or ShardPlacementResult(Shard(dim) or None, mesh)"
        )
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise ShardDimError(
            f"fully_shard: shard_placement_fn returned Shard({placement.dim}) for parameter {name} {shape}, "
            f"whose dims are 0 to {len(shape) - 1}"
        )
    return dim


def _num_cuts(mesh: DeviceMesh, placements: Sequence[Placement], dim: int, first_axis: int = 0) -> int:
    """The number of pieces into which the axes of ``mesh``, from ``first_axis`` on, cut ``dim``."""
    return math.prod(
        mesh.size(axis)
        for axis, placement in enumerate(placements)
        if axis >= first_axis and not placement.is_replicate() and getattr(placement, "dim", None) == dim
    )


def _joint_mesh(param: DTensor, name: str, axes: DataParallelAxes) -> DeviceMesh:
    inner, outer = axes.mesh, param.device_mesh
    what = f"fully_shard: parameter {name} {tuple(param.shape)} is a DTensor {tuple(param.placements)} on {outer}"
    if inner.device_type != outer.device_type:
        raise ShardingError(f"{what}, but it is to be sharded over a mesh of {inner.device_type} devices")
    if any(placement.is_partial() for placement in param.placements):
        raise ShardingError(f"{what}; a parameter cannot be partial: redistribute it first")
    if outer.ndim > 2:
        raise UnsupportedShardingError(
            f"{what}; at most two axes of other parallelisms are supported: flatten some, or pass the mesh of all "
            "axes with dp_mesh_dims"
        )
    if inner.mesh_dim_names is None or outer.mesh_dim_names is None:
        raise UnnamedMeshError(
            f"{what}; make one mesh with named axes for both, such as "
            'init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp")), and pass mesh["dp"]'
        )
    try:
        return join_meshes(inner, outer)
    except RuntimeError as error:
        raise ShardingError(
            f"{what}, which does not fit the mesh {inner} it is to be sharded over: both must be different axes "
            f"of one mesh ({error})"
        ) from error


def _layout_on_named(
    param: nn.Parameter, name: str, axes: DataParallelAxes, named: NamedDims, dim: int
) -> Layout:
    """The layout of a DTensor on the mesh of all parallelisms; it is cut over the shard axes, where it was copied."""
    if not isinstance(param, DTensor):
        raise ShardingError(
            f"fully_shard: with dp_mesh_dims, parameter {name} {tuple(param.shape)} must be a DTensor on the mesh: "
            "use torch.distributed.tensor.distribute_module"
        )
    if param.device_mesh != named.mesh:
        raise ShardingError(
            f"fully_shard: with dp_mesh_dims, parameter {name} must be a DTensor on {named.mesh}, "
            f"not on {param.device_mesh}"
        )
    if not from_local_takes_grad_placements:
        raise UnsupportedShardingError(
            f"fully_shard: parameter {name}: dp_mesh_dims needs torch 2.12, where DTensor.from_local takes "
            f"grad_placements, and this is {torch.__version__}; make the parameter a DTensor on the other axes alone, "
            "and pass the mesh of the data-parallel axes without dp_mesh_dims"
        )
    shard_dims, replicate_dims = named.indices(named.shard), named.indices(named.replicate)
    placements = list(param.placements)
    for axis in (*shard_dims, *replicate_dims):
        if not placements[axis].is_replicate():
            assert named.mesh.mesh_dim_names is not None
            raise ShardingError(
                f"fully_shard: parameter {name} is {placements[axis]!r} on the axis "
                f"{named.mesh.mesh_dim_names[axis]!r} of dp_mesh_dims; it must be Replicate() there"
            )
    outer = OuterLayout.of(param, partial_dims=(*shard_dims, *replicate_dims))
    for axis in shard_dims:
        cuts = _num_cuts(named.mesh, outer.placements, dim, first_axis=axis + 1)
        placements[axis] = strided_shard(dim, cuts)
    mesh = named.mesh
    if len(shard_dims) > 1:
        mesh, placements = _with_one_shard_axis(axes, named, placements)
    return Layout(axes=axes, dim=dim, mesh=mesh, placements=tuple(placements), outer=outer)


def _with_one_shard_axis(
    axes: DataParallelAxes, named: NamedDims, placements: list[Placement]
) -> tuple[DeviceMesh, list[Placement]]:
    """The mesh and placements with the axes of data parallelism flattened, at the position of the first shard axis."""
    first, *others = sorted(named.indices(named.shard))
    dropped = {*others, *named.indices(named.replicate)}
    assert named.mesh.mesh_dim_names is not None
    meshes: list[DeviceMesh] = []
    result: list[Placement] = []
    for axis, name in enumerate(named.mesh.mesh_dim_names):
        if axis == first:
            meshes.append(axes.mesh)
            result += axes.placements(placements[axis])
        elif axis not in dropped:
            meshes.append(named.mesh[name])
            result.append(placements[axis])
    return join_meshes(*meshes), result
