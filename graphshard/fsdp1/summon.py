"""``summon_full_params``: modules show whole parameters for a while, and what is written to them is kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import UnsupportedShardingError
from ..fsdp import SUMMONED, mesh_device, refuse_lost_data, slots_of
from .training_state import check_idle
from .wrapper_state import WrapperState, own_modules, state_of, wrappers_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Summon:
    """The arguments of ``summon_full_params``.

    Attributes:
        writeback: keep what this rank writes to its own piece of a parameter.
        rank0_only: show whole parameters on the first rank alone; the others show shards.
        offload_to_cpu: show them on the CPU.
        with_grads: show whole gradients too.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def check(self, states: list[WrapperState]) -> None:
        """Refuses what FSDP1 refuses.

        Raises:
            UnsupportedShardingError: (a NotImplementedError) two arguments contradict each other.
        """
        if self.with_grads and self.offload_to_cpu:
            raise UnsupportedShardingError(
                "summon_full_params: with_grads=True and offload_to_cpu=True cannot be combined: a gradient is on the "
                "device of its parameter; leave out one"
            )
        if self.writeback and self.rank0_only:
            raise UnsupportedShardingError(
                "summon_full_params: writeback=True and rank0_only=True cannot be combined: the other ranks would not "
                "get what the first one writes; pass writeback=False"
            )
        if self.offload_to_cpu and not self.rank0_only and states:
            warnings.warn(
                "summon_full_params: offload_to_cpu=True and rank0_only=False copies all parameters to the CPU for "
                "each rank of a node; pass rank0_only=True if one copy is enough",
                stacklevel=5,
            )


@contextmanager
def summoned(module: nn.Module, summon: Summon, *, recurse: bool) -> Iterator[None]:
    """Shows whole parameters of the wrappers in a module; with ``recurse=False``, of the module alone.

    Raises:
        TrainingStateError: (an AssertionError) a forward or a backward is running, or parameters are shown already.
        UnsupportedShardingError: (a NotImplementedError) arguments contradict each other.
    """
    own = state_of(module)
    chosen = list(wrappers_in(module)) if recurse else ([(module, own)] if own is not None else [])
    summon.check([state for _, state in chosen])
    for wrapper, _ in chosen:
        check_idle(wrapper, "summon_full_params")
    with ExitStack() as stack:
        for wrapper, state in chosen:
            stack.enter_context(_one_summoned(wrapper, state, summon))
        yield


@contextmanager
def _one_summoned(wrapper: nn.Module, state: WrapperState, summon: Summon) -> Iterator[None]:
    if state.unit is not None:
        state.unit.reshard()
    entries = _entries(wrapper)
    is_shown = not summon.rank0_only or state.meshes.shard.get_local_rank() == 0
    with torch.no_grad():
        shown = {id(shard): _whole(shard, summon, is_shown) for shard in _shards(entries)}
    state.is_summoned = wrapper._is_summoned = True
    if is_shown:
        for each, name, shard in entries:
            each._parameters[name] = shown[id(shard)]
    try:
        yield
    finally:
        state.is_summoned = wrapper._is_summoned = False
        if is_shown:
            _put_back(entries, summon)


def _entries(wrapper: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Each place where a module of the wrapper's own unit holds a shard.

    Raises:
        ParameterStateError: (a RuntimeError) something was assigned to the ``.data`` of a shard.
    """
    found = []
    for _, each in own_modules(wrapper):
        for name, slot in slots_of(each):
            param = slot.param
            if isinstance(param, DTensor):
                refuse_lost_data(param, slot.name)
                found.append((each, name, param))
    return found


def _shards(entries: list[tuple[nn.Module, str, nn.Parameter]]) -> list[nn.Parameter]:
    return list({id(shard): shard for _, _, shard in entries}.values())


def _whole(shard: nn.Parameter, summon: Summon, is_shown: bool) -> nn.Parameter | None:
    """The whole parameter; None where it is not shown, but gathered with the other ranks."""
    full = whole_tensor(shard)
    grad = whole_tensor(shard.grad) if summon.with_grads and shard.grad is not None else None
    if not is_shown:
        return None
    parameter = nn.Parameter(full.cpu() if summon.offload_to_cpu else full, requires_grad=shard.requires_grad)
    setattr(parameter, SUMMONED, True)
    parameter.grad = grad
    return parameter


def whole_tensor(value: Tensor) -> Tensor:
    """The whole of a sharded tensor, in memory of its own; all ranks take part."""
    assert isinstance(value, DTensor)
    value = value.detach().to(mesh_device(value.device_mesh))
    full = value.full_tensor()
    local = value.to_local()
    return full.clone() if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else full


@torch.no_grad()
def _put_back(entries: list[tuple[nn.Module, str, nn.Parameter]], summon: Summon) -> None:
    """Makes modules hold shards again, with what was written to the whole parameters."""
    done: set[int] = set()
    for each, name, shard in entries:
        full = each._parameters[name]
        each._parameters[name] = shard
        if not summon.writeback or full is None or id(shard) in done:
            continue
        done.add(id(shard))
        write_piece(shard, full.detach())
        if summon.with_grads and shard.grad is not None and full.grad is not None:
            write_piece(shard.grad, full.grad)


def write_piece(shard: Tensor, full: Tensor) -> None:
    """Copies this rank's piece of a whole tensor into its shard, if it differs; no rank communicates.

    A shard that is not written to counts as unchanged: forwards before may still have their backwards.
    """
    assert isinstance(shard, DTensor)
    full = full.to(mesh_device(shard.device_mesh))
    piece = distribute_tensor(full, shard.device_mesh, shard.placements, src_data_rank=None)
    local, written = shard.to_local(), piece.to_local()
    if not torch.equal(local, written.to(local.device)):
        local.copy_(written)
