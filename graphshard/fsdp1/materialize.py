"""What happens to a module before it is sharded: it leaves the meta device, and gets the values of rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import OptionError, ParameterStateError, ShardingError
from .meshes import Meshes
from .options import Options
from .wrapper_state import own_modules


def own_states(
    module: nn.Module, ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    """The parameters that no inner wrapper holds and none ignores, and the buffers of the same modules, with paths."""
    for path, each in own_modules(module):
        if each in ignored_modules:
            continue
        for name, value in (*each._parameters.items(), *each._buffers.items()):
            if value is not None and value not in ignored_params:
                yield f"{path}.{name}" if path else name, value


def materialize(
    module: nn.Module,
    options: Options,
    device: torch.device,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> None:
    """Gives parameters and buffers on the meta device memory and values.

    ``param_init_fn`` is called with each module below the wrapper that no inner one holds, and initialises what the
    module itself holds. Without it, modules are moved to ``device``, and their ``reset_parameters`` is called.
    Parameters that were tied stay tied.

    Raises:
        OptionError: (a ValueError) ``param_init_fn`` cannot be called.
        ParameterStateError: (a RuntimeError) a module has no ``reset_parameters``, or something is left on meta.
    """
    if not any(value.is_meta for _, value in own_states(module, ignored_modules, ignored_params)):
        return
    init = options.param_init_fn
    if init is not None and not callable(init):
        raise OptionError(f"FullyShardedDataParallel: param_init_fn={init!r} cannot be called with a module")
    holders = [(path, each) for path, each in own_modules(module) if each not in ignored_modules]
    tied = _tied_entries(holders)
    with torch.no_grad():
        for path, each in holders:
            if init is not None:
                init(each)
            elif any(value is not None for value in (*each._parameters.values(), *each._buffers.values())):
                _reset(path, each, device)
    for entries in tied:
        (first, first_name), *others = entries
        for other, name in others:
            other._parameters[name] = first._parameters[first_name]
    left = [name for name, value in own_states(module, ignored_modules, ignored_params) if value.is_meta]
    if left:
        raise ParameterStateError(
            f"FullyShardedDataParallel: param_init_fn has left {', '.join(left[:5])} on the meta device; it must "
            "initialise the parameters and buffers of each module that it is called with, with "
            "module.to_empty(device=..., recurse=False) for instance"
        )


def _tied_entries(holders: list[tuple[str, nn.Module]]) -> list[list[tuple[nn.Module, str]]]:
    entries: dict[int, list[tuple[nn.Module, str]]] = {}
    for _, each in holders:
        for name, param in each._parameters.items():
            if param is not None:
                entries.setdefault(id(param), []).append((each, name))
    return [found for found in entries.values() if len(found) > 1]


def _reset(path: str, module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ParameterStateError(
            f"FullyShardedDataParallel: {path or 'the module'} ({type(module).__name__}) is on the meta device and has "
            "no reset_parameters(); pass param_init_fn, which initialises each module"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def move_to_device(
    module: nn.Module,
    options: Options,
    device: torch.device,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> None:
    """Moves parameters to the device of the mesh, whether ``device_id`` names it or not.

    Raises:
        ShardingError: (a ValueError) ``device_id`` is another device than the ranks compute on.
        ParameterStateError: (a RuntimeError) parameters are on several devices, or on another one.
    """
    given = options.device
    if given is not None:
        wanted = given if isinstance(given, torch.device) else torch.device(given)
        if wanted.type != "cpu" and wanted.index is None:
            warnings.warn(
                f"FullyShardedDataParallel: device_id={given} has no index; the current device {device} is used",
                stacklevel=4,
            )
        elif wanted != device:
            raise ShardingError(
                f"FullyShardedDataParallel: device_id={given!r}, but the process group computes on {device}; set the "
                "current device before, or use a process group whose backend runs on the device"
            )
    found = [
        (name, value)
        for name, value in own_states(module, ignored_modules, ignored_params)
        if value.device not in (device, torch.device("cpu"))
    ]
    if found:
        shown = ", ".join(f"({name}, {value.device})" for name, value in found[:5])
        raise ParameterStateError(
            f"FullyShardedDataParallel: the ranks compute on {device}, but these are elsewhere: {shown}; move the "
            "module to that device, or to the CPU"
        )
    for _, value in own_states(module, ignored_modules, ignored_params):
        if value.device != device:
            value.data = value.data.to(device)


def sync_states(
    module: nn.Module,
    options: Options,
    meshes: Meshes,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> None:
    """Copies parameters and buffers of the first rank to the others; with a hybrid strategy to all copies too."""
    mesh = meshes.hybrid if options.is_hybrid and meshes.hybrid is not None else meshes.shard
    seen: set[int] = set()
    for _, value in own_states(module, ignored_modules, ignored_params):
        if id(value) in seen:
            continue
        seen.add(id(value))
        local = value.detach()
        if isinstance(local, DTensor):  # of tensor parallelism
            local = local.to_local()
        for dim in reversed(range(mesh.ndim)):
            dist.broadcast(local, group=mesh.get_group(dim), group_src=0)
