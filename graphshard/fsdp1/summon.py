"""``summon_full_params``: modules show whole parameters for a while, and what is written to them is kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import ParameterStateError, UnsupportedShardingError
from ..fsdp import mesh_device
from ..fsdp.state import LAST_SHOWN, SUMMONED, Version, refuse_lost_data, slots_of, version_of
from .training_state import check_idle
from .whole_tensors import whole_tensors
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


#: A place where a module holds a shard: the module, the name in it, the shard, and its name in the model.
_Entry: TypeAlias = tuple[nn.Module, str, nn.Parameter, str]


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
    for _, state in chosen:
        if state.unit is not None:
            state.unit.reshard()
    entries = [_entries(wrapper) for wrapper, _ in chosen]
    whole: dict[int, _Whole] = {}  # by the id of the shard: a tied parameter is one, in whichever wrappers
    with ExitStack() as stack:
        for (wrapper, state), places in zip(chosen, entries, strict=True):
            stack.enter_context(_one_summoned(wrapper, state, places, summon, whole))
        yield


@dataclass(slots=True, kw_only=True)
class _Whole:
    """A whole parameter that modules show.

    Attributes:
        parameter: None where it is not shown, but gathered with the other ranks.
        version: that of the shard when it was gathered.
        is_put_back: what was written to it is written to the shard.
    """

    parameter: nn.Parameter | None
    version: Version
    is_put_back: bool = False


@contextmanager
def _one_summoned(
    wrapper: nn.Module, state: WrapperState, entries: list[_Entry], summon: Summon, whole: dict[int, _Whole]
) -> Iterator[None]:
    is_shown = not summon.rank0_only or state.meshes.shard.get_local_rank() == 0
    with torch.no_grad():
        missing = {id(shard): shard for _, _, shard, _ in entries if id(shard) not in whole}
        gathered = _gathered(list(missing.values()), summon, is_shown)
        whole.update(zip(missing, gathered, strict=True))
    state.is_summoned = wrapper._is_summoned = True
    for each, name, shard, _ in entries:
        if (parameter := whole[id(shard)].parameter) is not None:
            each._parameters[name] = parameter
    try:
        yield
    finally:
        state.is_summoned = wrapper._is_summoned = False
        _put_back(entries, summon, whole)


def _entries(wrapper: nn.Module) -> list[_Entry]:
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
                found.append((each, name, param, slot.name))
    return found


def _gathered(shards: Sequence[Tensor], summon: Summon, is_shown: bool) -> list[_Whole]:
    with_grad = [each for each in shards if summon.with_grads and each.grad is not None]
    grads = [each.grad for each in with_grad if each.grad is not None]
    whole_grads = dict(zip(map(id, with_grad), whole_tensors(grads), strict=True))
    found = []
    for shard, full in zip(shards, whole_tensors(shards), strict=True):
        assert isinstance(shard, DTensor)
        whole = _Whole(parameter=None, version=version_of(shard))
        if is_shown:
            shown = full.cpu() if summon.offload_to_cpu else full
            whole.parameter = nn.Parameter(shown, requires_grad=shard.requires_grad)
            setattr(whole.parameter, SUMMONED, True)
            whole.parameter.grad = whole_grads.get(id(shard))
        found.append(whole)
    return found


@torch.no_grad()
def _put_back(entries: list[_Entry], summon: Summon, whole: dict[int, _Whole]) -> None:
    """Makes modules hold shards again, with what was written to the whole parameters.

    Raises:
        ParameterStateError: (a RuntimeError) a shard was changed meanwhile, which the whole parameter would undo.
    """
    changed: list[str] = []
    for each, name, shard, full_name in entries:
        known, full = whole[id(shard)], each._parameters[name]
        if known.parameter is None:
            continue
        each._parameters[name] = shard
        setattr(known.parameter, LAST_SHOWN, full_name)
        if not summon.writeback or full is None or known.is_put_back:
            continue
        known.is_put_back = True
        if version_of(shard) != known.version:
            changed.append(full_name)
            continue
        write_piece(shard, full.detach())
        if summon.with_grads and shard.grad is not None and full.grad is not None:
            write_piece(shard.grad, full.grad)
    if changed:
        raise ParameterStateError(
            f"the shard(s) of parameter(s) {', '.join(changed)} were changed inside summon_full_params(), by "
            "optimizer.step() for instance, and the whole parameters that it shows would undo that; nothing of them is "
            "written back: change shards outside of it, or pass writeback=False"
        )


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
