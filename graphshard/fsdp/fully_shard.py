"""``fully_shard``: the function of FSDP2, for a compiler.

Signature, argument names and error types are those of ``torch.distributed.fsdp.fully_shard``, so a script migrates by
changing one import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from .._compat_composable import (
    set_state_for_torch,
    state_for_torch_of,
)
from .._compat_dtensor import drop_foreign_results
from ..errors import (
    GraphShardError,
    ShardingError,
    UnsupportedShardingError,
)
from ..ir import NO_AXIS, READ_WHOLE, UNIT, MeshAxis, axis_of
from .compiled_block import PLAIN_CLASS, wrap_compiled_forward
from .fsdp_module import state_for_torch
from .read_parameter import empty_names, traced_read
from .regroup import note_whole_parameters, tell_added
from .shard_parameter import (
    give_places,
    hand_over,
    local_piece,
    mesh_device,
    shard_extended,
    shard_parameter,
    units_read_in,
)
from .sharded_class import offer_backend, sharded_class, watch_frames, wrap_compiled_call, wrap_own_forward
from .sharding_checks import check_modules, check_offload_policy, checked_reshard, refuse_replicated
from .state import (
    SLOTS,
    SUCCESSOR,
    DataParallelAxes,
    Layout,
    ParameterSlot,
    Tree,
    Unit,
    UnitSettings,
    has_extension,
    layout_of,
    refuse_stale_optimizers,
    refuse_wrapper,
    relabel,
    slots_of,
    store_parameters,
    stored_parameters,
    watch_optimizers,
    why_untraceable,
)

ModuleOrModules = TypeVar("ModuleOrModules", bound="nn.Module | list[nn.Module]")


def fully_shard(
    module: ModuleOrModules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen, as in FSDP2's signature
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> ModuleOrModules:
    """Shards a module's parameters over a mesh axis, in place, and makes the module one unit.

    The unit holds all parameters below ``module`` that no earlier call claimed, so call it on the inner modules first
    and on the root last. Each parameter becomes a DTensor cut along dim 0. As with ``torch.chunk``, the last ranks may
    hold fewer rows or none. A parameter that is a DTensor over an axis of tensor or expert parallelism has its local
    piece cut, and becomes a DTensor over both axes.

    Args:
        module: the module, or a list of modules that form one unit.
        mesh: a ``DeviceMesh``. 1-D: parameters are cut over it. 2-D with names: copied over the first axis, cut over
            the second (hybrid sharding). None: all ranks of the default group.
        reshard_after_forward: True frees the gathered parameters after the forward and gathers them again in the
            backward. False keeps them. A number, a divisor of the shard axis, keeps a piece on each of that many
            neighbouring ranks. None is False for the root and True for the others.
        mp_policy: dtypes of compute and gathers, of reductions, of inputs and outputs.
        shard_placement_fn: called with each parameter. Returns None (cut dim 0), ``Shard(dim)`` (a negative dim counts
            from the end), or torch's ``ShardPlacementResult``, which also gives the parameter a mesh of its own.
        ignored_params: parameters that are not sharded, not moved and not reduced.
        dp_mesh_dims: torch's ``DataParallelMeshDims``, the axes of data parallelism in ``mesh``. ``mesh`` is then the
            mesh of all parallelisms, and every parameter is a DTensor on it.
        offload_policy: ``CPUOffloadPolicy`` keeps shards and gradients, and so the optimizer's state, on the CPU.
            Shards are copied to the mesh's device before each gather, gradients back after each reduction.

    Returns:
        ``module`` itself; its class is now ``FSDP<Class>``.

    Raises:
        ShardingError: (a ValueError) a module, mesh or parameter cannot be sharded; all such parameters are listed.
        ShardDimError: (an AssertionError) ``shard_placement_fn`` names a dim that a parameter does not have.
        AlreadyShardedError: (an AssertionError) the module is a unit already.
        UnnamedMeshError: (an AssertionError) the axes of a 2-D mesh have no names.
        UnsupportedShardingError: (a NotImplementedError) graphshard does not handle a mesh, policy or layout.
        StaleOptimizerError: (a RuntimeError) an optimizer holds parameters that would be replaced.
    """
    modules = list(module) if isinstance(module, list) else [module]
    check_offload_policy(offload_policy)
    check_modules(modules)
    mesh = mesh if mesh is not None else _default_mesh()
    axes = (
        DataParallelAxes.of(mesh) if dp_mesh_dims is None else DataParallelAxes.of_named(mesh, dp_mesh_dims)
    )
    reshard_after_forward = checked_reshard(reshard_after_forward, axes.shard.size)
    ignored = {id(param) for param in ignored_params or ()}
    refuse_replicated(modules, ignored)
    owned = [entry for entry in _owned_parameters(modules) if id(entry.param) not in ignored]
    shared = {
        id(slot.param): slot for root in modules for owner in root.modules() for _, slot in slots_of(owner)
    }
    fresh = [
        entry
        for entry in owned
        if not _is_sharded(entry) and not hasattr(entry.param, SUCCESSOR) and id(entry.param) not in shared
    ]
    layouts = _choose_layouts(fresh, axes, shard_placement_fn)
    _refuse_sparse_gradients(fresh)
    _refuse_unsupported_regather(reshard_after_forward, axes, fresh, layouts)
    refuse_stale_optimizers([(entry.path, entry.param) for entry in fresh], "fully_shard", num_holders=2)
    watch_optimizers(tell_added)
    watch_frames()
    offer_backend()
    settings = UnitSettings(
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        regather=_regather_axis(axes.mesh, reshard_after_forward),
    )
    for used in {layout.mesh for layout in layouts.values()}:
        drop_foreign_results(used)
    if mesh.device_type != "cpu":
        settings.input_device = mesh_device(mesh)
        settings.compute_device = (
            settings.input_device if isinstance(offload_policy, CPUOffloadPolicy) else None
        )
    unit = Unit(tree=Tree(), modules=modules, settings=settings)
    _move_buffers(modules, mesh)
    for entry in owned:
        if not _is_sharded(entry):
            _install(entry, unit, layouts, offload_policy, shared.get(id(entry.param)))
    give_places(unit)
    names: dict[int, _Owned] = {}
    for entry in fresh:
        names.setdefault(id(entry.param), entry)  # a tied parameter has its first name
    hand_over({entry.path: entry.param for entry in names.values()})
    _swap_classes(modules, unit)
    relabel(modules)
    note_whole_parameters(modules)
    for each in modules:
        each.register_state_dict_pre_hook(_show_shards)
        each.register_load_state_dict_pre_hook(_reshard)
    return module


#: ``fully_shard.state(module)``, as of torch's function: an object for each unit, None for another module.
fully_shard.__dict__["state"] = state_for_torch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """One entry of one module's ``_parameters``; a tied parameter has several."""

    owner: nn.Module
    name: str
    path: str
    param: nn.Parameter


def _regather_axis(mesh: DeviceMesh, reshard: bool | int | None) -> MeshAxis:
    """The axis of neighbouring ranks over which parameters are spread after the forward, or ``NO_AXIS``."""
    if reshard is None or isinstance(reshard, bool):
        return NO_AXIS
    rows = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, reshard))
    return axis_of(rows, 1, default_label=f"shard/{reshard}")


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ShardingError(
                "fully_shard: no process group; start the script with torchrun, "
                "call torch.distributed.init_process_group(), or pass mesh="
            )
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_backend()
    device_type = accelerator.type if accelerator is not None and backend != "gloo" else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _owned_parameters(modules: list[nn.Module]) -> Iterable[_Owned]:
    seen: set[int] = set()
    for index, root in enumerate(modules):
        prefix = f"{index}." if len(modules) > 1 else ""
        for path, owner in root.named_modules(remove_duplicate=True):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for name, param in owner._parameters.items():
                if param is not None:
                    full_path = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
                    yield _Owned(owner=owner, name=name, path=full_path, param=param)


def _is_sharded(entry: _Owned) -> bool:
    return entry.name in entry.owner.__dict__.get(SLOTS, {})


def _choose_layouts(
    entries: list[_Owned], axes: DataParallelAxes, placement_fn: Callable[[nn.Parameter], Any] | None
) -> dict[int, Layout]:
    """The layout of each parameter by its id. An error lists all parameters with the first kind of fault."""
    layouts: dict[int, Layout] = {}
    errors: list[GraphShardError] = []
    for entry in entries:
        if id(entry.param) in layouts:
            continue
        # Conversions and copies of the model since parallelize() have left the attribute of the parameter behind.
        if isinstance(entry.param, DTensor) and entry.name in entry.owner.__dict__.get(READ_WHOLE, ()):
            setattr(entry.param, READ_WHOLE, True)
        try:
            placement = placement_fn(entry.param) if placement_fn is not None and entry.param.ndim else None
            layouts[id(entry.param)] = layout_of(entry.param, entry.path, axes, placement)
        except GraphShardError as error:
            errors.append(error)
    if errors:
        kind = type(errors[0])
        raise kind("; ".join(str(error) for error in errors if type(error) is kind)) from errors[0]
    return layouts


def _refuse_sparse_gradients(entries: list[_Owned]) -> None:
    sparse = [
        entry.path
        for entry in entries
        if isinstance(entry.owner, (nn.Embedding, nn.EmbeddingBag))
        and entry.owner.sparse
        and entry.param.requires_grad
    ]
    if sparse:
        raise UnsupportedShardingError(
            f"fully_shard: parameter(s) {', '.join(sparse)} belong to embeddings with sparse=True, whose gradients are "
            "sparse tensors, but reductions are of dense tensors: leave out sparse=True, or list the parameters in "
            "ignored_params"
        )


def _refuse_unsupported_regather(
    reshard: bool | int | None, axes: DataParallelAxes, entries: list[_Owned], layouts: dict[int, Layout]
) -> None:
    """Refuses a number of ranks if its groups would not be neighbours on one shard axis."""
    if reshard is None or isinstance(reshard, bool):
        return
    others = [
        entry.path
        for entry in entries
        if layouts[id(entry.param)].outer is not None or layouts[id(entry.param)].axes is not axes
    ]
    if others or axes.mesh.size() < dist.get_world_size():
        reason = f"parameter(s) {', '.join(others)} are" if others else f"the mesh {axes.mesh} is"
        raise UnsupportedShardingError(
            f"fully_shard: reshard_after_forward={reshard} is for one mesh of all ranks, but {reason} on another; "
            "use True or False"
        )


def _move_buffers(modules: list[nn.Module], mesh: DeviceMesh) -> None:
    device = mesh_device(mesh)
    for root in modules:
        for owner in root.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    owner._buffers[name] = buffer.to(device)


def _install(
    entry: _Owned,
    unit: Unit,
    layouts: dict[int, Layout],
    offload_policy: OffloadPolicy,
    tied_to: ParameterSlot | None,
) -> None:
    """Makes an entry hold a shard: that of ``tied_to``, if it was tied to a parameter that is sharded already."""
    successor = getattr(entry.param, SUCCESSOR, None)
    if successor is None and tied_to is not None:
        successor = (entry.param, tied_to)
    if successor is None:
        layout = layouts[id(entry.param)]
        slot = ParameterSlot(
            unit=unit,
            name=entry.path,
            shape=local_piece(entry.param).shape,
            dim=layout.dim,
            axis=layout.axes.shard,
            replicate=layout.axes.replicate,
            outer=layout.outer,
        )
        unit.slots.append(slot)
        slot.is_extended = has_extension(local_piece(entry.param).detach(), entry.path)
        if slot.is_extended:
            policy = unit.settings.mp_policy
            shard = shard_extended(entry.param, layout, offload_policy, entry.path, entry.owner, policy)
            slot.untraceable = why_untraceable(local_piece(entry.param), slot.axis.size)
            slot.traced_read = traced_read(slot)
        else:
            refuse_wrapper(local_piece(entry.param), entry.path)
            shard = shard_parameter(entry.param, layout, offload_policy)
        successor = (shard, slot)
        setattr(entry.param, SUCCESSOR, successor)
    param, slot = successor
    slot.owners.append((entry.owner, entry.name))
    store_parameters(entry.owner)
    stored_parameters(entry.owner)[entry.name] = param
    entry.owner.__dict__.setdefault(SLOTS, {})[entry.name] = slot


def _swap_classes(modules: list[nn.Module], unit: Unit) -> None:
    state = state_for_torch(unit)
    for root in modules:
        for owner in root.modules():
            names = tuple(owner.__dict__.get(SLOTS, {}))
            is_unit = owner in modules
            wrap_compiled_call(owner)
            if is_unit:
                owner.__dict__[UNIT] = unit
                wrap_own_forward(owner)
                set_state_for_torch(owner, state)
            elif UNIT not in owner.__dict__:
                wrap_compiled_forward(owner)
            if is_unit or (names and UNIT not in owner.__dict__):
                owner.__class__ = sharded_class(_plain_class(owner), names, empty_names(owner), is_unit)
            if names:
                owner.__dict__.pop("_flat_weights", None)  # an RNN's list would keep the full weights alive


def _show_shards(module: nn.Module, *_: Any) -> None:
    """A state-dict hook: makes the modules show shards.

    Gathered parameters stay gathered: a single rank may ask for a state dict, and must not gather alone afterwards.
    """
    for unit in units_read_in(module):  # those of parameters that are tied into it, too
        unit.hide()


def _reshard(module: nn.Module, *_: Any) -> None:
    """A load-state-dict hook: frees gathered parameters, which loading would make stale."""
    for unit in units_read_in(module):
        unit.reshard()


def _plain_class(owner: nn.Module) -> Any:
    """The class that the user wrote, also if it was swapped before."""
    return getattr(type(owner), PLAIN_CLASS, type(owner))
