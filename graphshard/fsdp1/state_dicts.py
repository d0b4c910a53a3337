"""``state_dict()`` and ``load_state_dict()`` of wrappers: clean names; whole, sharded or local values.

Each wrapper has hooks that treat the values of its own unit. Loading takes whatever kind of value it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor

from .._compat_fsdp1 import (
    WRAPPED,
    is_asked_by_checkpoint_helpers,
    is_sharded_tensor,
    local_rows,
    without_checkpoint_names,
)
from ..errors import ParameterStateError
from ..fsdp import mesh_device
from ..fsdp.state import refuse_lost_data, slots_of
from .meshes import on_mesh
from .training_state import own_state
from .whole_tensors import whole_tensor, whole_tensors
from .wrapper_state import WrapperState, clean_name, own_modules, plain_name


def register_hooks(wrapper: nn.Module) -> None:
    """Makes ``state_dict()`` and ``load_state_dict()`` of a wrapper, or of a module around it, translate values."""
    wrapper.register_state_dict_post_hook(_after_state_dict)
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


def _own_parameters(wrapper: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The sharded parameters of a wrapper's own unit, with their keys before names are cleaned."""
    for path, each in own_modules(wrapper, at_every_path=True):
        for name, slot in slots_of(each):
            yield f"{prefix}{without_checkpoint_names(path)}.{name}", slot.param


def _own_buffers(wrapper: nn.Module, prefix: str) -> Iterator[str]:
    state = own_state(wrapper)
    for path, each in own_modules(wrapper, at_every_path=True):
        if each not in state.ignored_modules:
            yield from (f"{prefix}{without_checkpoint_names(path)}.{name}" for name in each._buffers)


def _after_state_dict(
    wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    state = own_state(wrapper)
    by_helpers = is_asked_by_checkpoint_helpers(1)
    kind = StateDictType.SHARDED_STATE_DICT if by_helpers else state.settings.state_dict_type
    config = state.settings.state_dict_config
    to_cpu = config.offload_to_cpu and not by_helpers
    first_only = kind is StateDictType.FULL_STATE_DICT and getattr(config, "rank0_only", False)
    is_kept = not first_only or _is_first(state)
    for key, param in _own_parameters(wrapper, prefix):
        if isinstance(param, DTensor):
            refuse_lost_data(param, clean_name(key))
    keys = dict.fromkeys(key for key, _ in _own_parameters(wrapper, prefix) if key in state_dict)
    # Others are whole: summon_full_params() shows them.
    sharded = {key: value for key in keys if isinstance(value := state_dict[key], DTensor)}
    if kind is StateDictType.FULL_STATE_DICT:
        state_dict.update(zip(sharded, whole_tensors(sharded.values()), strict=True))
    else:
        for key, value in sharded.items():
            state_dict[key] = state.meshes.as_given(_detached(value, kind, is_copy=not by_helpers))
    for key in keys:
        value = state_dict[key] if is_kept else state_dict.pop(key)
        if is_kept and to_cpu:
            state_dict[key] = value.cpu()
    for key in _own_buffers(wrapper, prefix):
        if not is_kept:
            state_dict.pop(key, None)
        elif key in state_dict:
            dtype = state.buffer_dtypes.get(plain_name(key.removeprefix(prefix)))
            value = state_dict[key] if dtype is None else state_dict[key].to(dtype)
            state_dict[key] = value.cpu() if to_cpu else value
    inner = f"{prefix}{WRAPPED}."
    _rename(state_dict, inner, prefix)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        _rename(metadata, inner, prefix)


def _is_first(state: WrapperState) -> bool:
    mesh = state.meshes.whole
    return all(mesh.get_local_rank(dim) == 0 for dim in range(mesh.ndim))


def _detached(value: DTensor, kind: StateDictType, *, is_copy: bool) -> DTensor:
    """Local values share memory with the model and sharded ones do not, as with FSDP1."""
    value = value.detach()
    return value.clone() if is_copy and kind is StateDictType.SHARDED_STATE_DICT else value


def _rename(entries: dict[str, Any], old: str, new: str) -> None:
    """Replaces the beginning of keys, in place; their order stays."""
    items = list(entries.items())
    entries.clear()
    entries.update(
        (new + key.removeprefix(old) if key.startswith(old) else key, value) for key, value in items
    )


def _before_load(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    inner = f"{prefix}{WRAPPED}."
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
    for key, param in _own_parameters(wrapper, prefix):
        value = state_dict.get(key)
        if isinstance(value, Tensor):
            is_whole = not isinstance(param, DTensor)  # shown by summon_full_params(), which writes it back
            state_dict[key] = _whole_value(value) if is_whole else as_shard(value, param, clean_name(key))


def _whole_value(value: Tensor) -> Tensor:
    return whole_tensor(value) if isinstance(value, DTensor) else value


def _after_load(wrapper: nn.Module, incompatible_keys: Any) -> None:
    """Cleans the names that ``load_state_dict`` returns, or that its error lists."""
    for keys in incompatible_keys:
        keys[:] = map(clean_name, keys)


def as_shard(value: Tensor, like: Tensor, name: str) -> Tensor:
    """A value of any kind of state dict, as a DTensor that is placed as ``like`` is.

    Args:
        value: a DTensor, a ``ShardedTensor``, the whole tensor, or this rank's rows.
        like: the sharded parameter.
        name: its name, for the error.

    Raises:
        ParameterStateError: (a RuntimeError) the shape is neither that of the parameter nor that of its shard.
    """
    assert isinstance(like, DTensor)
    value = value.detach()
    if isinstance(value, DTensor):
        if value.device_mesh != like.device_mesh and torch.equal(
            value.device_mesh.mesh, like.device_mesh.mesh
        ):
            value = on_mesh(value, like.device_mesh)  # the other one has other names, or none
        if value.device_mesh == like.device_mesh:
            return (
                value
                if value.placements == like.placements
                else value.redistribute(placements=like.placements)
            )
        value = value.full_tensor()
    local = like.to_local()
    if is_sharded_tensor(value):
        value = local_rows(value, local)
    elif tuple(value.shape) == tuple(like.shape):
        device = mesh_device(like.device_mesh)
        return distribute_tensor(value.to(device), like.device_mesh, like.placements, src_data_rank=None)
    if tuple(value.shape) != tuple(local.shape):
        raise ParameterStateError(
            f"load_state_dict: {name} has the shape {tuple(value.shape)}; the parameter is {tuple(like.shape)}, and "
            f"this rank's piece of it {tuple(local.shape)}"
        )
    rows = DTensor.from_local(
        value.to(mesh_device(like.device_mesh)),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return rows.detach()
