"""Private torch names of DTensor's sharding propagation: what each op does with placements."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # checked: 2.13
from torch.distributed.tensor._op_schema import OpSchema  # checked: 2.13
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # checked: 2.13
from torch.utils._python_dispatch import _disable_current_modes  # checked: 2.13
from torch.utils._python_dispatch import (  # checked: 2.13
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten  # checked: 2.13

try:
    from torch.distributed.tensor.placement_types import _MaskPartial  # checked: 2.13
except ImportError:  # where older versions have it
    from torch.distributed.tensor._ops._embedding_ops import _MaskPartial

#: Whether DTensor's rule for ``index_put`` leaves whole what indices select; on torch 2.11 it may not (checked: 2.13).
KNOWS_INDEX_PUT = hasattr(_tensor_ops, "index_put_single_dim_strategy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor argument of an op, as DTensor's rules see it.

    Attributes:
        placement: on the one axis of the mesh.
        shape, stride, dtype: of the whole tensor; sizes are numbers.
    """

    placement: Placement
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacements:
    """What DTensor's rule says of one call.

    Attributes:
        op: the op to call; a rule may take another overload.
        args: its arguments: for a tensor the placement that the op wants, for a size the local one.
        outputs: the placement of each tensor that the op returns; None for what is no tensor.
    """

    op: Any
    args: tuple[Any, ...]
    outputs: Any


def mesh_without_groups(num_ranks: int, rank: int) -> DeviceMesh:
    """A mesh of one axis for questions to DTensor's rules; it makes no process group (checked: 2.13)."""
    with _disable_current_modes():  # a graph is traced with fake tensors; this tensor is real
        ranks = torch.arange(num_ranks)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("axis",), _init_backend=False, _rank=rank)


def named_mesh_without_groups(label: str, num_ranks: int) -> DeviceMesh:
    """A mesh of one axis whose group has the name of the axis, in graphs; it makes no group (checked: 2.13)."""
    with _disable_current_modes():
        mesh = DeviceMesh(
            "cpu", torch.arange(num_ranks), mesh_dim_names=(label,), _init_backend=False, _rank=0
        )
    mesh._dim_group_names = [label]
    return mesh


def give_world_to(mesh: DeviceMesh) -> None:
    """Lets ``get_group()`` of a mesh without groups give the default group in traced code (checked: 2.13)."""
    vars(mesh).setdefault("_pg_registry", {})[mesh._dim_group_names[0]] = dist.group.WORLD


def drop_foreign_results(mesh: DeviceMesh) -> None:
    """Empties DTensor's cache of results if they may be of other process groups; call it before parameters are cut.

    Meshes of the same ranks are equal, and DTensor keeps the result of an op by its inputs (checked: 2.13). So an op on
    a new mesh could give an equal one over other process groups, and autograd keeps gradients on it. Ranks whose caches
    differ would then gather a gradient over different groups, and hang.

    The cache is kept if the last equal mesh had the same groups: working out anew what an op gives takes milliseconds,
    for every op and shape. Groups of one rank do not count, since nothing is communicated over them.
    """
    groups = [ref(mesh.get_group(axis)) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    known = _groups_by_mesh()
    if known.pop(mesh, None) != groups:
        _clear_sharding_prop_cache()
    known[mesh] = groups


@functools.cache
def _groups_by_mesh() -> WeakKeyDictionary[DeviceMesh, list[ref[dist.ProcessGroup]]]:
    return WeakKeyDictionary()


def placements_of_op(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh
) -> OpPlacements:
    """Asks DTensor's rule for an op: the placements with the least communication of its inputs (checked: 2.13).

    Args:
        op: an overload.
        args, kwargs: its arguments with :class:`Placed` in place of tensors.
        mesh: of one axis.

    Raises:
        Exception: DTensor has no rule, or its rule fails on these arguments. Rules raise errors of many types.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    if info is None:
        info = propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    specs = tree_map(lambda each: _spec(each, mesh), (tuple(args), dict(kwargs)))
    with _disable_current_modes():
        sharding = propagator.propagate_op_sharding_non_cached(OpSchema(op, *specs, schema_info=info))
    schema = sharding.redistribute_schema
    wanted = schema.args_schema if schema is not None else specs[0]
    wanted = tree_map(_placement, tuple(wanted))
    leaves, structure = tree_flatten(wanted)
    if schema is not None and schema.op is op:  # DTensor may spread a list of tensors out
        structure = tree_flatten(specs[0])[1]
    return OpPlacements(
        op=schema.op if schema is not None else op,
        args=tree_unflatten(leaves, structure),
        outputs=tree_map(_placement, sharding.output_spec),
    )


def masked_dim(placement: Placement) -> tuple[Sequence[int], int] | None:
    """The shape and the cut dim of what indices select from, if each rank keeps only the indices of its own rows."""
    if not isinstance(placement, _MaskPartial):
        return None
    assert placement.offset_shape is not None
    return placement.offset_shape, placement.offset_dim


def is_plain_partial(placement: Placement) -> bool:
    """True for pending terms that no mask belongs to."""
    return type(placement) is Partial


def _spec(value: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(value, Placed):
        return value
    meta = TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
    return DTensorSpec(mesh, (value.placement,), tensor_meta=meta)


def _placement(value: Any) -> Any:
    return value.placements[0] if isinstance(value, DTensorSpec) else value
