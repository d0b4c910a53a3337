"""``FSDPModule``: the methods that ``fully_shard`` gives a module.

Names, arguments and meaning are those of ``torch.distributed.fsdp.FSDPModule``. Setters take effect at once: between a
forward and its backward, and between two micro-batches. Setters of what a graph is traced with have compiled graphs
traced again; their docstrings say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from .._compat import group_by_name
from .._compat_composable import StateForTorch
from ..errors import (
    ConflictingCommError,
    NotRootError,
    OptionError,
    OptionTypeError,
    ShardingError,
    TrainingStateError,
    UnsupportedShardingError,
)
from ..ir import UNIT
from .compiled_block import PLAIN_CLASS
from .eager_autograd import UnshardHandle, untraced
from .regroup import copy_sharded
from .shard_parameter import changed_only, refuse_unsharded_state, units_read_in
from .state import GradientReductionHandle, Unit, slots_of, zero_gradients


def refuse_state(unit: Unit, what: str) -> NoReturn:
    """Refuses access to the private state of torch's FSDP2, which units do not have."""
    raise UnsupportedShardingError(
        f"unit {unit.label} was sharded by graphshard, and has no {what} of torch.distributed.fsdp: import "
        "register_fsdp_forward_method, share_comm_ctx and the like from graphshard, not from torch.distributed.fsdp"
    )


def state_for_torch(unit: Unit) -> StateForTorch:
    """What ``torch.distributed.fsdp.fully_shard.state(module)`` returns for a module of the unit."""
    return StateForTorch(
        unit=unit,
        refuse_access=lambda unit, name: refuse_state(unit, f"state.{name}"),
        refuse_sharding=lambda unit: refuse_torch_sharding(unit.modules[0]),
    )


def refuse_torch_sharding(module: nn.Module) -> NoReturn:
    """Refuses torch's ``fully_shard`` on, around or inside a module that graphshard has sharded."""
    unit: Unit | None = module.__dict__.get(UNIT)
    slots = unit.slots if unit is not None else [slot for _, slot in slots_of(module)]
    names = ", ".join(slot.name for slot in slots) or type(module).__name__
    raise ShardingError(
        f"torch.distributed.fsdp cannot shard {names}, which graphshard has sharded: one model is sharded by one "
        "library. Import fully_shard from graphshard for all of its modules"
    )


class FSDPModule(TorchFSDPModule):
    """A base class of each module given to :func:`graphshard.fully_shard`.

    The class of the module becomes ``FSDP<Class>``, a subclass of ``FSDPModule`` and of its old class. The object stays
    the same. ``FSDPModule`` is a subclass of torch's, so scripts and trainers that ask for torch's class find it. It
    inherits nothing from it: each of its methods is overridden, and calls of the next class skip it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """With arguments: an object of the plain class, as slices of ``nn.Sequential`` and ``nn.ModuleList`` need.

        Without arguments (copying, unpickling): an empty object of this class.
        """
        plain: Any = getattr(cls, PLAIN_CLASS, None)
        if plain is not None and (args or kwargs):
            return plain(*args, **kwargs)
        return super(TorchFSDPModule, cls).__new__(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A separate model with its own shards, units and forward; without gradients, as for any module."""
        return copy_sharded(self, memo, has_own=hasattr(super(TorchFSDPModule, self), "__deepcopy__"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The method of nn.Module that every ``load_state_dict`` calls; refuses values that are not sharded."""
        refuse_unsharded_state(self, state_dict, prefix)
        super(TorchFSDPModule, self)._load_from_state_dict(state_dict, prefix, *args)

    @untraced
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, not those of units below, and keeps them until :meth:`reshard`.

        Until then ``module.parameters()`` shows the full parameters. Gradients of what is computed from them, also
        outside of a forward, are reduced and added to those of the shards. Writes to them are lost.

        Args:
            async_op: return a handle at once, and gather in the background. A forward or backward of the unit waits
                itself, so the handle may be dropped.
        """
        unit = _unit(self)
        unit.begin_unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @untraced
    def reshard(self) -> None:
        """Frees this unit's gathered parameters; ``module.parameters()`` shows the shards again."""
        _unit(self).reshard()

    @untraced
    def reset_iter_state(self) -> None:
        """Drops the state of an iteration in which a forward or a backward raised an exception.

        Frees gathered parameters, and drops gradients that are not reduced, also those of earlier micro-batches.
        Gradients in ``.grad`` stay: call ``zero_grad()``. Call it on all ranks.

        Raises:
            NotRootError: (a RuntimeError) this is not the outermost unit.
        """
        _outermost(self, "reset_iter_state").tree.reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``nn.Module.zero_grad``, on the shards, shown or not; gradients that wait for a reduction are dropped."""
        assert isinstance(self, nn.Module)
        zero_gradients(self, set_to_none)

    @untraced
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``nn.Module._apply``, which ``.to()`` and the like call: on the shards, never on gathered parameters."""
        for unit in units_read_in(self):
            unit.reshard()
        with changed_only(_unit(self), fn) as apply:
            return super(TorchFSDPModule, self)._apply(apply, recurse)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients. False adds them up unreduced, in the dtype of the reduction.

        The next backward that reduces includes the sum.
        """
        value = _flag(requires_gradient_sync, "requires_gradient_sync")
        for unit in _units(self, recurse):
            unit.reduce_grads = unit.all_reduce_grads = value

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards sum gradients over the replicate axis. False keeps the sum of each shard group."""
        for unit in _units(self, recurse):
            unit.all_reduce_grads = _flag(requires_all_reduce, "requires_all_reduce")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after the forward; compiled graphs are traced again."""
        value = _flag(reshard_after_forward, "reshard_after_forward")
        for unit in _units(self, recurse):
            unit.settings.reshard_after_forward = value
            unit.refresh()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the backward frees what the forward kept or, uncompiled, the backward gathered. False keeps it."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = _flag(reshard_after_backward, "reshard_after_backward")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether gradients that wait are reduced at the end of the backward. Applies to the whole model."""
        _unit(self).tree.is_last_backward = _flag(is_last_backward, "is_last_backward")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether gradients that wait are reduced by :meth:`finalize_backward`, not at the end of the last backward.

        Applies to the whole model, from the next backward on. A method of FSDP2 from torch 2.15 on.

        Raises:
            NotRootError: (a RuntimeError) this is not the outermost unit.
            TrainingStateError: (a RuntimeError) a backward is running.
        """
        tree = _outermost(self, "set_manual_backward_finalization").tree
        if tree.has_begun_backward:
            raise TrainingStateError("set_manual_backward_finalization inside a backward: call it earlier")
        tree.is_finalized_by_hand = _flag(enabled, "enabled")

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduces gradients that wait, and zeros for unused parameters. A method of FSDP2 from torch 2.15 on.

        With ``async_op`` it returns a handle that has nothing to wait for.

        Raises:
            NotRootError: (a RuntimeError) this is not the outermost unit.
            TrainingStateError: (a RuntimeError) a backward is running, or is finalized without this method.
        """
        tree = _outermost(self, "finalize_backward").tree
        if tree.has_begun_backward or not tree.is_finalized_by_hand:
            raise TrainingStateError(
                "finalize_backward: call it after set_manual_backward_finalization(True), once the backwards have ended"
            )
        tree.finish_backward(by_hand=True)
        return GradientReductionHandle() if _flag(async_op, "async_op") else None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refused if enabled: each gather has memory of its own. A method of FSDP2 from torch 2.15 on."""
        if _flag(keep, "keep"):
            raise UnsupportedShardingError(
                "set_keep_unsharded_storage is not supported: each gather has memory of its own; for CUDA graphs use "
                'torch.compile(model, backend="graphshard", options={"inductor": {"triton.cudagraphs": True}})'
            )

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this unit's summed gradients by ``factor``, not by the number of ranks; traces graphs again."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            raise OptionError(f"set_gradient_divide_factor: {factor!r} must be a positive number")
        unit = _unit(self)
        unit.settings.divide_factor = float(factor)
        unit.refresh()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether this unit's gradients are summed and then divided, even if the process group can average."""
        unit = _unit(self)
        unit.settings.force_sum = _flag(enable, "enable")
        unit.refresh()

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the units whose gathers start in a forward once this unit's parameters are copied out.

        They replace the next unit of the compiled schedule; compiled graphs are traced again. Uncompiled, they replace
        the unit that has come next in all forwards so far.

        Raises:
            OptionError: (a ValueError) an entry is not an :class:`FSDPModule`.
        """
        unit = _unit(self)
        unit.forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")
        unit.refresh()

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same for the backward. Uncompiled they replace the unit before this one, which is gathered early."""
        unit = _unit(self)
        unit.backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")
        unit.refresh()

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers this unit's parameters with ``comm``, an object with the interface of FSDP2's ``AllGather``.

        It is called once, with one flat buffer (of bytes, if parameters of several dtypes are sent), and finishes
        before the next op: compiled, it starts where the schedule puts it, but nothing overlaps with it.
        """
        _check_comm(comm, "set_custom_all_gather")
        unit = _unit(self)
        unit.settings.comms.all_gather = comm
        unit.refresh()

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces this unit's gradients with ``comm``, an object with the interface of FSDP2's ``ReduceScatter``."""
        _check_comm(comm, "set_custom_reduce_scatter")
        unit = _unit(self)
        unit.settings.comms.reduce_scatter = comm
        unit.refresh()

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any], *, stream: Any = None) -> None:
        """Lets ``hook(flat)`` change this unit's summed gradients in place, before they are divided and cast.

        Its argument is the result of the reduce-scatter, or with hybrid sharding that of the all-reduce: one flat
        tensor for each dtype, in the same order on all ranks.

        Args:
            hook: may communicate on groups of its own.
            stream: must be None; a hook runs on the stream of the collectives.

        Raises:
            OptionError: (a ValueError) a stream with hybrid sharding.
            UnsupportedShardingError: any other stream.
        """
        unit = _unit(self)
        if not callable(hook):
            raise OptionError(f"set_all_reduce_hook: {hook!r} is not callable")
        if stream is not None and any(slot.replicate.size > 1 for slot in unit.slots):
            raise OptionError(
                "set_all_reduce_hook: with hybrid sharding the hook runs where the all-reduce does; leave stream out"
            )
        if stream is not None:
            raise UnsupportedShardingError(
                "set_all_reduce_hook: stream= is not supported, since a hook is a node of the graph and runs on "
                "its stream; switch streams inside the hook"
            )
        unit.settings.comms.all_reduce_hook = hook
        unit.refresh()

    def set_post_optim_event(self, event: Any) -> None:
        """Makes later work on the current stream wait for ``event``; the next gathers are among it.

        On a CPU, ``torch.cpu.current_stream().record_event()`` gives nothing to wait for: its work is done.
        """
        if event is not None or _unit(self).settings.input_device is not None:
            event.wait()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters without a gradient take part in the reductions, with zeros.

        For models whose ranks use different parameters in one step. Uncompiled, the unit's gradients are then reduced
        together at the end of the backward. Compiled, all ranks run equal graphs, so a parameter is unused on all ranks
        or on none; the gradient of an unused one becomes zeros.
        """
        for unit in _units(self, recurse):
            unit.reduces_unused = _flag(reduce_scatter_unused_params, "reduce_scatter_unused_params")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions of a compiled backward may be open at a time; the largest number in the model counts.

        Raises:
            OptionTypeError: (a TypeError) not an int.
            OptionError: (a ValueError) less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise OptionTypeError(
                f"set_reduce_scatter_max_input_buffers: {max_input_buffers!r} is a "
                f"{type(max_input_buffers).__name__}; give an int"
            )
        if max_input_buffers < 1:
            raise OptionError(f"set_reduce_scatter_max_input_buffers: {max_input_buffers} must be at least 1")
        for unit in _units(self, recurse):
            unit.settings.max_reductions = max_input_buffers
        tree = _unit(self).tree
        tree.max_reductions = max(
            (unit.settings.max_reductions for unit in tree.units()), default=max_input_buffers
        )
        for each in tree.units():
            each.refresh()

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters run on a separate process group, so that gathers do not queue behind them.

        Makes one group for each set of ranks. Call it on all ranks.
        """
        enable = _flag(enable, "enable")
        made: dict[str, str] = {}
        for unit in _units(self, recurse):
            unit.settings.reduce_group = ""
            for slot in unit.slots if enable else ():
                name = slot.axis.group_name
                if name not in made:
                    ranks = dist.get_process_group_ranks(group_by_name(name))
                    made[name] = dist.new_group(ranks, use_local_synchronization=True).group_name
                unit.settings.reduce_group = made[name]
            unit.refresh()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether an uncompiled backward gathers this unit; False has autograd keep full parameters that it needs.

        A compiled backward gathers exactly the parameters that it reads.
        """
        _unit(self).unshards_in_backward = _flag(unshard_in_backward, "unshard_in_backward")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused if enabled, because Inductor allocates the buffers of a compiled graph.

        Raises:
            ConflictingCommError: (an AssertionError) a custom collective was set before.
            UnsupportedShardingError: otherwise.
        """
        if not _flag(enable, "enable"):
            return
        self._refuse_buffers("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused, like :meth:`set_allocate_memory_from_process_group_for_comm`."""
        if backend != "NCCL":
            raise OptionError(f"set_symm_mem_for_comm: backend={backend!r} must be 'NCCL'")
        self._refuse_buffers("set_symm_mem_for_comm")

    def _refuse_buffers(self, method: str) -> NoReturn:
        comms = _unit(self).settings.comms
        if comms.all_gather is not None or comms.reduce_scatter is not None:
            raise ConflictingCommError(
                f"{method}: this unit has a custom collective, which allocates its own buffers; leave out one"
            )
        raise UnsupportedShardingError(
            f"{method} is not supported: the buffers of a compiled graph belong to Inductor; give the unit "
            "set_custom_all_gather / set_custom_reduce_scatter objects whose allocate() uses the memory you want"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility: gathers allocate on the stream of the compute in any case."""
        _flag(async_op, "async_op")

    def _get_fsdp_state(self) -> NoReturn:
        """Refused: functions of torch that are made for FSDP2 alone call it, and methods of later versions of torch."""
        refuse_state(_unit(self), "state")


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted for compatibility: models have no streams of their own to share.

    Raises:
        OptionError: (a ValueError) an entry is not an :class:`FSDPModule`.
    """
    _units_of(modules, "share_comm_ctx")


def _units_of(modules: Iterable[Any], method: str) -> list[Unit]:
    found = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise OptionError(
                f"{method}: a {type(module).__name__} is not an FSDPModule; give it to fully_shard first"
            )
        found.append(_unit(module))
    return found


def _check_comm(comm: Any, method: str) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise OptionError(
            f"{method}: a {type(comm).__name__} is no collective; it needs allocate(size, *, dtype, device) "
            "and __call__(output_tensor=, input_tensor=, group=, ...)"
        )


def _unit(module: Any) -> Unit:
    return module.__dict__[UNIT]


def _outermost(module: Any, method: str) -> Unit:
    unit = _unit(module)
    if not unit.is_root:
        raise NotRootError(
            f"{method} was called on unit {unit.label}; call it on the outermost unit's module"
        )
    return unit


def _units(module: Any, recurse: bool) -> Iterator[Unit]:
    assert isinstance(module, nn.Module)
    found = (each.__dict__.get(UNIT) for each in (module.modules() if recurse else (module,)))
    yield from dict.fromkeys(unit for unit in found if unit is not None)


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be True or False")
    return value
