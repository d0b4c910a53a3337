"""The static methods of ``FullyShardedDataParallel`` that concern state dicts of models and optimizers."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictSettings, StateDictType

from . import optimizer_state as optimizers
from .optimizer_state import State, parameters_of
from .state_dict_settings import change_settings, read_settings, settings_for_a_while, warn_of_types
from .wrapper_state import wrappers_in

_FULL = StateDictType.FULL_STATE_DICT


class StateMethods:
    """State dicts: which kind, and those of optimizers. Call what returns states on all ranks."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings | None:
        """Sets what ``state_dict()`` and ``optim_state_dict()`` return; deprecated, as in torch.

        FULL_STATE_DICT, the default: whole tensors. SHARDED_STATE_DICT: DTensors. LOCAL_STATE_DICT: DTensors that share
        memory with the model.

        Returns:
            The settings before; None for a module without wrappers.

        Raises:
            OptionTypeError: (a TypeError) a config is not one of the type.
        """
        warn_of_types()
        return change_settings(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """What ``state_dict()`` and ``optim_state_dict()`` return; None for a module without wrappers.

        Raises:
            TrainingStateError: (an AssertionError) wrappers have different settings.
        """
        return read_settings(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> AbstractContextManager[None]:
        """A context with other settings; see :meth:`set_state_dict_type`."""
        warn_of_types()
        return settings_for_a_while(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Any, optim_state_dict: State | None = None, group: Any = None
    ) -> State:
        """The optimizer's state with clean names as keys, of the kind that is set.

        Args:
            model: the module whose parameters the optimizer got.
            optim: the optimizer.
            optim_state_dict: a state of it; None: its present one.
            group: ranks on which ``rank0_only`` counts; None: those of the model.
        """
        settings = read_settings(model)
        config = settings.optim_state_dict_config if settings is not None else None
        return optimizers.by_names(
            model,
            parameters_of(model, optim, None),
            optim.state_dict() if optim_state_dict is None else optim_state_dict,
            settings.state_dict_type if settings is not None else _FULL,
            to_cpu=getattr(config, "offload_to_cpu", True),
            is_kept=not getattr(config, "rank0_only", False) or _is_first(model, group),
            group=_gathering_group(model, group),
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Any,
        optim_state_dict: State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> State:
        """A state from :meth:`optim_state_dict`, of any kind, as one that ``optim.load_state_dict()`` takes.

        With the setting ``rank0_only``, the first rank's is loaded on all ranks.

        Args:
            model: the module whose parameters the optimizer got.
            optim: the optimizer.
            optim_state_dict: the state; also one that FSDP1 has made, or one of an unsharded model with names as keys.
            is_named_optimizer: the optimizer's own keys are names.
            load_directly: also load it into the optimizer.
            group: the ranks that get the first rank's state; None: those of the model.

        Raises:
            ParameterStateError: (a RuntimeError) the state has other names or shapes.
        """
        settings = read_settings(model)
        config = settings.optim_state_dict_config if settings is not None else None
        if getattr(config, "rank0_only", False):
            optim_state_dict = optimizers.from_first_rank(optim_state_dict, _groups(model, group))
        result = optimizers.to_optimizer(
            model,
            parameters_of(model, optim, None),
            optim.state_dict()["param_groups"],
            optim_state_dict,
            keeps_names=is_named_optimizer,
        )
        if load_directly:
            optim.load_state_dict(result)
        return result

    # -- the older names, deprecated in torch too -------------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Any, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> State:
        """:meth:`optim_state_dict` with whole tensors; an empty dict on other ranks than the first."""
        _warn_of_legacy("full_optim_state_dict", "optim_state_dict", optim_input)
        is_kept = not rank0_only or _is_first(model, group)
        params = parameters_of(model, optim, optim_input)
        return optimizers.by_names(
            model,
            params,
            optim.state_dict(),
            _FULL,
            to_cpu=True,
            is_kept=is_kept,
            group=_gathering_group(model, group),
        )

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Any, group: Any = None) -> State:
        """:meth:`optim_state_dict` with DTensors."""
        _warn_of_legacy("sharded_optim_state_dict", "optim_state_dict")
        kind, params = StateDictType.SHARDED_STATE_DICT, parameters_of(model, optim, None)
        return optimizers.by_names(
            model,
            params,
            optim.state_dict(),
            kind,
            to_cpu=False,
            is_kept=True,
            group=_gathering_group(model, group),
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: State, model: nn.Module, optim_input: Any = None, optim: Any = None
    ) -> State:
        """:meth:`optim_state_dict_to_load` of a whole state that each rank has."""
        _warn_of_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _load(model, optim, optim_input, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: State, model: nn.Module, optim: Any
    ) -> State:
        """:meth:`optim_state_dict_to_load` of a sharded state."""
        _warn_of_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _load(model, optim, None, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: State | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Any = None,
        group: Any = None,
    ) -> State:
        """:meth:`optim_state_dict_to_load` of a whole state that the first rank has."""
        _warn_of_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        state = optimizers.from_first_rank(full_optim_state_dict, _groups(model, group))
        return _load(model, optim, optim_input, state)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Any = None,
    ) -> State:
        """A whole state with names as keys, or with the numbers of an unsharded model's optimizer.

        Raises:
            OptionError: (a ValueError) the keys are not those of the model.
        """
        _warn_of_input(optim_input)
        params = parameters_of(model, optim, optim_input)
        return optimizers.rekey(optim_state_dict, optim_state_key_type, model, params)


def _load(model: nn.Module, optim: Any, optim_input: Any, state: State) -> State:
    params = parameters_of(model, optim, optim_input)
    given = list(optim_input or ())
    if optim is not None:
        groups = optim.state_dict()["param_groups"]
    elif given and isinstance(given[0], dict):
        groups = [{"params": list(group["params"])} for group in given]
    else:
        groups = [{"params": params}]
    return optimizers.to_optimizer(model, params, groups, state)


def _groups(model: nn.Module, group: Any) -> list[Any]:
    """The process groups, one after the other, by which something goes from the first rank of a model to all.

    That is the given group, or those of the axes of the model's wrappers; None, all ranks, without wrappers.
    """
    first = next((state for _, state in wrappers_in(model)), None)
    if group is not None or first is None:
        return [group]
    mesh = first.meshes.whole
    return [mesh.get_group(dim) for dim in reversed(range(mesh.ndim))]


def _gathering_group(model: nn.Module, group: Any) -> Any:
    """The process group of the ranks that gather whole values: the shards of one copy of the model."""
    return _groups(model, group)[0]


def _is_first(model: nn.Module, group: Any) -> bool:
    return all(dist.get_rank(each) == 0 for each in _groups(model, group))


def _warn_of_legacy(name: str, new: str, optim_input: Any = None) -> None:
    warnings.warn(f"FSDP.{name}() is deprecated: use FSDP.{new}()", FutureWarning, stacklevel=3)
    _warn_of_input(optim_input)


def _warn_of_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn(
            "FSDP: the `optim_input` argument is deprecated: pass the optimizer", FutureWarning, stacklevel=4
        )
