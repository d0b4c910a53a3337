"""Cuts this rank's shard out of a parameter, and gives it its place in memory.

A shard is a DTensor with a storage of its own. The shards of a unit lie one after the other
(:mod:`graphshard.ir.shard_rows`) where they can. A shard takes over the attributes and hooks of the parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from .._compat import queue_after_backward
from ..errors import ParameterStateError
from ..ir import (
    UNIT,
    ShardedShape,
    lie_in_a_row,
    moved_to_row,
    padded_rows,
    padded_shape,
    row_offsets,
    shard_shape,
)
from .state import (
    SUCCESSOR,
    HookOfGradient,
    Layout,
    Unit,
    check_gather,
    copy_extended,
    cut_extended,
    is_quantised,
    is_substitute,
    link_shard,
    note_storage,
    owner_of,
    slots_of,
    stored_parameters,
)


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


def give_places(unit: Unit) -> None:
    """Gives each shard a place in a row of its unit, and moves it there; each process group has its own row."""
    slots = {slot.name: slot for slot in unit.slots if not (slot.is_extended or unit.settings.compute_device)}
    shapes = {
        name: ShardedShape(
            slot.axis.group_name, slot.shape, slot.dim, slot.axis.size, slot.param.dtype
        )
        for name, slot in slots.items()
    }  # fmt: skip
    for name, offset in row_offsets(shapes).items():
        slots[name].row_offset = offset
    lay_out(unit)


def units_read_in(module: nn.Module) -> list[Unit]:
    """The units of parameters that modules below ``module`` hold, and its own; a tied parameter is of one unit only."""
    own = module.__dict__.get(UNIT)
    found = {id(own): own} if own is not None else {}
    for each in module.modules():
        for _, slot in slots_of(each):
            found[id(slot.unit)] = owner_of(slot)
    return list(found.values())


@contextmanager
def changed_only(unit: Unit, fn: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Keeps shards that ``fn`` returns as they are from ``nn.Module._apply``; yields what to give it instead of ``fn``.

    ``_apply`` swaps each DTensor for its result, which torch refuses while a graph of autograd holds it: a model that
    is moved to the device where it is could not be moved between a forward and its backward. Changed shards keep the
    attributes and hooks of theirs, which torch would swap as well, and are laid out anew at the end.
    """
    applied: dict[int, Tensor] = {}
    unchanged, changed = [], []
    for slot in unit.slots:
        for params, name in [(stored_parameters(owner), name) for owner, name in slot.owners]:
            param = params.get(name)
            if not isinstance(param, Tensor):
                continue
            if id(param) not in applied:
                with torch.no_grad():
                    applied[id(param)] = fn(param)
                    if applied[id(param)] is param and param.grad is not None:
                        param.grad = fn(param.grad)
            if applied[id(param)] is param:
                unchanged.append((params, name, param))
            elif isinstance(param, DTensor):
                own_grad_dtype = (param.grad_dtype,) if param.grad_dtype != param.dtype else ()
                changed.append((param, vars(param), _hooks(param), own_grad_dtype))
    for params, name, _ in unchanged:
        params[name] = None
    try:
        yield lambda value: applied.pop(id(value)) if id(value) in applied else fn(value)
    finally:
        for params, name, param in unchanged:
            params[name] = param
    for param, attributes, hooks, own_grad_dtype in changed:
        if vars(param) is not attributes:
            _restore(param, attributes, hooks, own_grad_dtype)
    lay_out(unit)


def _restore(
    param: DTensor, attributes: dict[str, Any], hooks: tuple[Any, Any], own_grad_dtype: tuple[Any, ...]
) -> None:
    """Gives a shard that was swapped what it had; ``own_grad_dtype``: its ``grad_dtype``, if that was set."""
    for key, value in attributes.items():
        vars(param).setdefault(key, value)
    _set_hooks(param, hooks)
    for dtype in own_grad_dtype:
        param.grad_dtype = dtype
    note_storage(param)


def lay_out(unit: Unit) -> None:
    """Moves shards that have a place in a row there, unless they are there."""
    rows: dict[tuple[str, torch.dtype, torch.device], list[DTensor]] = {}
    for slot in sorted(unit.slots, key=lambda slot: slot.row_offset):
        param = stored_parameters(slot.owners[0][0]).get(slot.owners[0][1]) if slot.owners else None
        if slot.row_offset < 0 or not isinstance(param, DTensor) or param.is_meta:
            continue
        local = param._local_tensor
        if type(local) is Tensor and local.is_contiguous():  # a fake tensor has no address
            rows.setdefault((slot.axis.group_name, local.dtype, local.device), []).append(param)
    for members in rows.values():
        pieces = [param._local_tensor for param in members]
        if not lie_in_a_row(pieces):
            for param, moved in zip(members, moved_to_row(pieces), strict=True):
                _replace_shard(param, moved)
    for slot in unit.slots:
        has_param = any(
            slot.hidden is not None or name in stored_parameters(owner) for owner, name in slot.owners[:1]
        )
        if has_param and isinstance(slot.param, DTensor):  # a user may have deleted it
            note_storage(slot.param, anew=False)
            link_shard(slot)


def _replace_shard(param: DTensor, local: Tensor) -> None:
    """Gives a parameter another local tensor; the parameter object, its gradient and its attributes stay.

    An assignment would not do: torch 2.13 can trace a DTensor only if its storage offset is that of its local tensor.
    """
    fresh = nn.Parameter(DTensor(local, param._spec, requires_grad=False), requires_grad=param.requires_grad)
    fresh.grad_dtype = param.grad_dtype
    fresh.grad = param.grad
    vars(fresh).update(vars(param))
    hooks = _hooks(param)
    with suppress(RuntimeError):  # a compiled graph, for instance, holds the old one: it stays where it is
        torch.utils.swap_tensors(param, fresh)
        _set_hooks(param, hooks)
        note_storage(param)


def hand_over(replaced: Mapping[str, nn.Parameter]) -> None:
    """Gives shards the attributes and hooks that were set on the parameters, and watches over these.

    Attributes of tensor subclasses stay behind: they may be those of the class. A hook gets the gradient of the shard,
    a DTensor. A parameter that something still holds, and that gets a gradient, is told in a warning.

    Args:
        replaced: parameters by name; each has its successor as an attribute.
    """
    with_gradient = [name for name, param in replaced.items() if param.grad is not None]
    if with_gradient:
        warnings.warn(
            f"fully_shard: the gradients of {', '.join(with_gradient)} from before sharding are dropped: shard the "
            "model before the first backward, or after zero_grad()",
            stacklevel=3,
        )
    watch = _ReplacedWatch()
    first_names: dict[int, str] = {}
    for name, param in replaced.items():
        first_names.setdefault(id(param), name)
    for name, param in replaced.items():
        if first_names[id(param)] != name:  # tied
            continue
        shard, _ = getattr(param, SUCCESSOR)
        if isinstance(param, DTensor) or issubclass(type(param), nn.Parameter):
            for key, value in vars(param).items():
                if key != SUCCESSOR:
                    vars(shard).setdefault(key, value)
        for number, hook in (param._backward_hooks or {}).items():
            param._backward_hooks[number] = HookOfGradient(hook)
        _set_hooks(shard, _hooks(param))
        note_storage(shard)
        param._post_accumulate_grad_hooks = None
        if param.requires_grad and param.is_leaf:
            param.register_post_accumulate_grad_hook(watch.hook_for(name))


class _ReplacedWatch:
    """Warns once, after a backward that has given gradients to parameters which ``fully_shard`` has replaced."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._has_warned = False

    def hook_for(self, name: str) -> Any:
        def note(param: Tensor) -> None:
            if not self._names and not self._has_warned:
                queue_after_backward(self._warn)
            self._names.append(name)

        return note

    def _warn(self) -> None:
        self._has_warned = True
        names = ", ".join(dict.fromkeys(self._names))
        self._names.clear()
        warnings.warn(
            f"graphshard: {names} from before sharding got a gradient, which trains nothing: fully_shard has replaced "
            "the parameter(s), and a list, a closure or a module that was not sharded still holds the old one(s). "
            "Read the parameter from its module where it is used",
            stacklevel=2,
        )


def _hooks(param: Tensor) -> tuple[Any, Any]:
    return param._backward_hooks, param._post_accumulate_grad_hooks


def _set_hooks(param: Tensor, hooks: tuple[Any, Any]) -> None:
    """Handles that were returned for the hooks keep removing them: the dicts that hold them are the same."""
    if hooks[0] is not None:
        param._backward_hooks = hooks[0]
    if hooks[1] is not None:
        param._post_accumulate_grad_hooks = hooks[1]


def refuse_unsharded_state(module: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Refuses plain tensors: they cannot be copied into a shard, and an assigned one would stay unsharded."""
    plain = []
    for path, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
        for name, _ in slots_of(owner):
            key = f"{path}.{name}" if path else name
            value = state_dict.get(key)
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if not is_substitute(stored_parameters(owner).get(name)):  # summon_full_params() shows it whole
                plain.append(f"{key} {tuple(value.shape)}")
    if plain:
        shown = ", ".join(plain[:5]) + (f" and {len(plain) - 5} more" if len(plain) > 5 else "")
        raise ParameterStateError(
            f"load_state_dict: {len(plain)} value(s) of an unsharded model: {shown}; load them with "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, "
            "options=StateDictOptions(full_state_dict=True)), or cut each with distribute_tensor() first"
        )
