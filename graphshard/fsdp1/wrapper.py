"""``FullyShardedDataParallel``: the wrapper of FSDP1, over ``fully_shard``.

A wrapper holds a module and makes it a unit. It computes nothing itself: arguments become those of ``fully_shard``, and
methods those of ``FSDPModule``. The other files of this room do one of these translations each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from .._compat_frames import leave_frame_to_python, leave_frames_to_python
from .._compat_fsdp1 import WRAPPED, is_asked_by_checkpoint_helpers, without_activation_wrapper
from ..errors import FlatParameterError, TrainingStateError
from ..fsdp import mesh_device
from ..fsdp.state import zero_gradients
from ..tensor_trees import cast_tensors
from .auto_wrap import auto_wrap
from .comm_hooks import register_hook
from .ignored import ignored_in
from .materialize import materialize, move_to_device, sync_states
from .meshes import Meshes
from .norms import clip_gradients
from .options import Options
from .precision import (
    cast_buffers,
    follow_mode,
    input_dtype,
    is_precise_in_eval,
    keep_low_precision_gradients,
    run_in_full_precision,
)
from .state_dicts import register_hooks
from .state_methods import StateMethods
from .summon import Summon, summoned
from .training_state import check_idle, check_root, without_sync
from .wrapped_unit import earlier_state, shard_module
from .wrapper_state import STATE, WrapperState, clean_name, wrappers_in

#: Private attributes of FSDP1 that code for it reads.
_OF_FLAT_PARAMETERS = frozenset({"_flat_param", "_handle", "_all_handles", "_fully_sharded_module_to_handle"})


class FullyShardedDataParallel(StateMethods, nn.Module):
    """A module whose parameters are sharded, with the arguments and methods of torch's FSDP1.

    Parameters are DTensors of their own shapes, whatever ``use_orig_params`` says: there is no flat parameter. Names of
    parameters carry ``_fsdp_wrapped_module.`` where FSDP1's do; those in state dicts do not.

    Args:
        module: the module to wrap.
        process_group: the ranks; for the hybrid strategies a tuple (shard group, replicate group). None: all ranks.
        sharding_strategy: FULL_SHARD frees gathered parameters after the forward, except those of the root.
            SHARD_GRAD_OP keeps them until the backward. NO_SHARD keeps whole parameters and all-reduces gradients. The
            hybrid ones shard over one axis and all-reduce over the other. None: FULL_SHARD.
        cpu_offload: whether shards, gradients and so the optimizer's state are kept on the CPU.
        auto_wrap_policy: chooses the modules below that get wrappers of their own.
        backward_prefetch, forward_prefetch: when the next wrapper is gathered. The defaults leave it to the schedule.
            BACKWARD_POST and None start no gather in a backward before the gradients of the wrapper before exist.
            True gathers one wrapper ahead in a forward. Compiled, those of the outermost wrapper hold, and a plan
            keeps them. The backend's options of the same names come first.
        limit_all_gathers: has no effect; set the backend's option of the same name.
        mixed_precision: dtypes of compute, reductions and buffers, and which inputs are cast.
        ignored_modules, ignored_states: what is not sharded, not moved and not reduced.
        param_init_fn: initialises what a module on the meta device itself holds.
        device_id: the device of the shards; it must be the one that the process group computes on.
        sync_module_states: copies parameters and buffers of the first rank to the others before they are sharded.
        use_orig_params: has no effect; see above.
        device_mesh: the ranks, instead of ``process_group``: 1-D, or 2-D (replicate, shard) for the hybrid strategies.

    Raises:
        ShardingError: (a ValueError) arguments contradict each other, or a parameter cannot be sharded.
        OptionTypeError: (a TypeError) an argument has the wrong type.
        ParameterStateError: (a RuntimeError) parameters are on other devices, or were left on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        options = Options(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            auto_wrap_policy=auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
        )
        super().__init__()
        self._wrap(module, options, Meshes.of(options))

    def _wrap(
        self, module: nn.Module, options: Options, meshes: Meshes, *, keeps_precision: bool = False
    ) -> None:
        """Shards the module; what an auto-wrap policy chooses below it, first."""
        options = options.for_world(meshes.world_size)
        if (earlier := earlier_state(module, options)) is not None:
            return self._hold(
                module,
                replace(earlier, is_root=True, is_summoned=False, no_sync_depth=0),
                keeps_precision=keeps_precision,
            )
        ignored_modules, ignored_params = ignored_in(module, options)
        if options.auto_wrap_policy is not None:
            auto_wrap(module, options, ignored_modules, ignored_params, _inner_wrapper(options, meshes))
        state = WrapperState(
            options=options, meshes=meshes, ignored_modules=ignored_modules, ignored_params=ignored_params
        )
        mesh, ignored = meshes.mesh_for(options), (ignored_modules, ignored_params)
        device = mesh_device(mesh)
        materialize(module, options, device, *ignored)
        move_to_device(module, options, device, *ignored)
        if options.sync_module_states:
            sync_states(module, options, meshes, *ignored)
        shard_module(module, state, mesh)
        cast_buffers(module, state)
        state.is_precise_in_eval = options.mixed_precision is not None and is_precise_in_eval()
        keep_low_precision_gradients(module, options.mixed_precision)
        self._hold(module, state, keeps_precision=keeps_precision)

    def _hold(self, module: nn.Module, state: WrapperState, *, keeps_precision: bool) -> None:
        self._fsdp_wrapped_module = module
        self.__dict__[STATE] = state
        self._keeps_precision = keeps_precision
        self._is_summoned = False
        self._follows_mode = state.is_precise_in_eval
        register_hooks(self)
        _make_root(self)
        _leave_frames()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module; floating-point inputs are cast if ``mixed_precision`` asks for it.

        Raises:
            TrainingStateError: (a ValueError) ``summon_full_params`` shows full parameters.
        """
        if self._is_summoned:
            raise refuse_forward(self)
        if self._follows_mode and not torch.compiler.is_compiling():
            follow_mode(self)
        if self._keeps_precision:
            return run_in_full_precision(self._fsdp_wrapped_module, args, kwargs)
        if self._input_dtype is not None:
            args, kwargs = cast_tensors((args, kwargs), self._input_dtype)
        return self._fsdp_wrapped_module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """``nn.Module.train``. With ``FSDP_USE_FULL_PREC_IN_EVAL=1`` the dtypes follow the mode."""
        super().train(mode)
        if self._follows_mode:
            follow_mode(self)
        return self

    # -- the wrapped module -----------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module; inside ``checkpoint_wrapper``, if that was applied to it."""
        return without_activation_wrapper(self._modules[WRAPPED])

    def __getattr__(self, name: str) -> Any:
        """An attribute of the wrapper, or else of the wrapped module; not the special methods of the latter."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            if name in _OF_FLAT_PARAMETERS:
                raise FlatParameterError(
                    f"FullyShardedDataParallel has no {name}: there are no flat parameters; parameters() are DTensors "
                    "of their own shapes, and summon_full_params() shows whole ones"
                ) from None
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        """An item of the wrapped module, a ``Sequential`` for instance."""
        return self._modules[WRAPPED][key]

    def check_is_root(self) -> bool:
        """Whether no other wrapper holds this one."""
        return self._state.is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in a module, itself included.

        Args:
            module: a wrapper, or a module around wrappers.
            root_only: leave out wrappers inside others.
        """
        found = [
            (each, state) for each, state in wrappers_in(module) if isinstance(each, FullyShardedDataParallel)
        ]
        return [each for each, state in found if state.is_root or not root_only]

    def _unshard(self, async_op: bool = False) -> Any:
        """FSDP1's private name of ``unshard``, for this wrapper's parameters; with ``async_op`` returns a handle."""
        unit = self._state.unit
        return None if unit is None else unit.unshard(async_op)

    # -- training ---------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``nn.Module.zero_grad``, on the shards; gradients that wait for a reduction are dropped."""
        zero_gradients(self, set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backwards do not reduce gradients; the first one after it reduces the sum.

        Gradients that wait are in no ``.grad``.

        Raises:
            NotRootError: (a RuntimeError) on an inner wrapper.
            TrainingStateError: (a ValueError) in a forward or a backward.
        """
        return without_sync(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm, as of one vector, is ``max_norm`` at most; returns it.

        Args:
            max_norm: the largest norm that is left alone.
            norm_type: the p of the norm; ``inf`` for the largest magnitude.

        Raises:
            NotRootError: (a RuntimeError) on an inner wrapper.
            TrainingStateError: (a ValueError) in a forward or a backward.
        """
        check_root(self, "clip_grad_norm_")
        check_idle(self, "clip_grad_norm_")
        # Ranks compare norms on the device of their process group, also if gradients are kept on the CPU.
        norm = clip_gradients(self.parameters(), max_norm, norm_type, self.compute_device)
        return norm.cpu() if self._state.options.offloads else norm

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which modules hold whole parameters, in their own dtype; call it on all ranks.

        Names of parameters are clean in it. A forward of a wrapper whose parameters are shown is refused; one of the
        module inside computes with what is shown, and trains nothing.

        Args:
            module: a wrapper, or a module around wrappers.
            recurse: show the parameters of inner wrappers too.
            writeback: keep what each rank writes to its own piece of a parameter.
            rank0_only: show them on the first rank only.
            offload_to_cpu: show them on the CPU.
            with_grads: show whole gradients too.

        Raises:
            TrainingStateError: (an AssertionError) in a forward, a backward, or such a context.
            UnsupportedShardingError: (a NotImplementedError) arguments contradict each other.
        """
        summon = Summon(
            writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        )
        return summoned(module, summon, recurse=recurse)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Makes ``hook(state, gradient, piece)`` reduce gradients, those of inner wrappers too.

        It gets the flat gradients of a unit and dtype, one chunk for each rank, writes the reduced chunk of this rank
        to ``piece``, and averages. Hooks of ``torch.distributed.algorithms._comm_hooks`` are such functions.

        Raises:
            ConflictingCommError: (an AssertionError) an inner wrapper, a second hook, or a hybrid strategy.
            OptionError: (a ValueError) the hook cannot be called.
            UnsupportedShardingError: (a NotImplementedError) NO_SHARD on several ranks.
        """
        register_hook(self, state, hook)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """``nn.Module.apply``, on whole parameters; what ``fn`` writes to them is kept."""
        with summoned(self, Summon(), recurse=False):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """``nn.Module.named_parameters``; names are clean while ``summon_full_params`` shows whole parameters."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean_name(name) if self._is_summoned else name, param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """``nn.Module.named_buffers``, with names as :meth:`named_parameters` has them."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name) if self._is_summoned else name, buffer

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """``nn.Module.named_modules``; torch's checkpoint helpers get clean names."""
        is_clean = is_asked_by_checkpoint_helpers(1)
        for name, module in super().named_modules(*args, **kwargs):
            yield clean_name(name) if is_clean else name, module

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch's checkpoint helpers that names in state dicts are without the attribute of the module."""
        return {"": WRAPPED}

    # -- what FSDP1 shows as attributes -----------------------------------------------------------

    @property
    def _state(self) -> WrapperState:
        return self.__dict__[STATE]

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in use: NO_SHARD on one rank."""
        return self._state.options.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes in use."""
        return self._state.options.mixed_precision or MixedPrecision()

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards are kept on the CPU."""
        return self._state.options.cpu_offload or CPUOffload()

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The argument of the constructor, as the next two."""
        return self._state.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """See above."""
        return self._state.options.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """See above."""
        return self._state.options.limit_all_gathers

    @property
    def process_group(self) -> Any:
        """The ranks over which parameters are sharded."""
        return self._state.meshes.shard.get_group()

    @property
    def rank(self) -> int:
        """This rank among those over which parameters are sharded."""
        return self._state.meshes.shard.get_local_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks over which parameters are sharded."""
        return self._state.meshes.shard.size()

    @property
    def compute_device(self) -> torch.device:
        """The device of gathered parameters."""
        return mesh_device(self._state.meshes.shard)


def refuse_forward(wrapper: nn.Module) -> TrainingStateError:
    """The error for a forward while whole parameters are shown."""
    return TrainingStateError(
        f"FullyShardedDataParallel({type(wrapper._modules[WRAPPED]).__name__}): a forward inside summon_full_params() "
        "would train nothing; call the model outside of it, or, to compute without gradients, the module inside "
        "(summon_full_params(model, recurse=False), then model.module(...))"
    )


def _inner_wrapper(outer: Options, meshes: Meshes) -> Callable[..., FullyShardedDataParallel]:
    def wrap(module: nn.Module, options: Options, keeps_precision: bool) -> FullyShardedDataParallel:
        wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        nn.Module.__init__(wrapper)
        is_same = options.process_group is outer.process_group and options.device_mesh is outer.device_mesh
        wrapper._wrap(
            module, options, meshes if is_same else Meshes.of(options), keeps_precision=keeps_precision
        )
        return wrapper

    return wrap


def _make_root(wrapper: nn.Module) -> None:
    """Makes the newest wrapper the root of those below it, and sets what each casts its inputs to."""
    for each, state in wrappers_in(wrapper):
        state.is_root = each is wrapper
        each._input_dtype = input_dtype(state)


def _leave_frames() -> None:
    """Makes Dynamo start at the forwards of units, below a wrapper's, and at no other frame of this room."""
    leave_frames_to_python(__name__.rpartition(".")[0])
    leave_frame_to_python(FullyShardedDataParallel.forward.__code__)
