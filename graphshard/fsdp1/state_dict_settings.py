"""What ``state_dict()`` and ``optim_state_dict()`` of a model return: set, read, and set for a while."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .._compat_fsdp1 import of_dtensors
from ..errors import OptionTypeError, StateDictConfigError, TrainingStateError
from .wrapper_state import wrappers_in

_CONFIGS: dict[StateDictType, tuple[type[Any], type[Any]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
_ARGUMENTS = ("state_dict_config", "optim_state_dict_config")


def read_settings(module: nn.Module) -> StateDictSettings | None:
    """The settings of the wrappers in a module; None if there are none.

    Raises:
        TrainingStateError: (an AssertionError) wrappers have different settings.
    """
    found = [state.settings for _, state in wrappers_in(module)]
    if any(each != found[0] for each in found):
        kinds = ", ".join(sorted({each.state_dict_type.name for each in found}))
        raise TrainingStateError(
            f"FullyShardedDataParallel: the wrappers of this model have different state-dict settings ({kinds}); call "
            "set_state_dict_type on the outermost module"
        )
    return replace(found[0]) if found else None


def change_settings(
    module: nn.Module, kind: StateDictType, config: Any = None, optimizer_config: Any = None
) -> StateDictSettings | None:
    """Sets what the wrappers in a module return; returns what they had.

    Raises:
        OptionTypeError: (a TypeError) ``kind`` is no type of state dict.
        StateDictConfigError: (a TypeError and a RuntimeError) a config is not one of the type of state dict.
    """
    if not isinstance(kind, StateDictType):
        raise OptionTypeError(f"set_state_dict_type: {kind!r} is no torch.distributed.fsdp.StateDictType")
    given = [config, optimizer_config]
    for place, wanted in enumerate(_CONFIGS[kind]):
        if given[place] is None:
            given[place] = wanted()
        if type(given[place]) is not wanted:
            raise StateDictConfigError(
                f"set_state_dict_type: {kind.name} goes with another config. Expected {_ARGUMENTS[place]} of type "
                f"{wanted.__name__}, got a {type(given[place]).__name__}"
            )
    before = read_settings(module)
    configs = [of_dtensors(each) for each in given]
    settings = StateDictSettings(
        state_dict_type=kind, state_dict_config=configs[0], optim_state_dict_config=configs[1]
    )
    for _, state in wrappers_in(module):
        state.settings = settings
    return before


@contextmanager
def settings_for_a_while(
    module: nn.Module, kind: StateDictType, config: Any = None, optimizer_config: Any = None
) -> Iterator[None]:
    """Sets what the wrappers in a module return, until the context ends."""
    before = change_settings(module, kind, config, optimizer_config)
    try:
        yield
    finally:
        if before is not None:
            change_settings(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )


def warn_of_types() -> None:
    """FSDP1's warning: these methods are deprecated."""
    warnings.warn(
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated: get_state_dict() and set_state_dict() "
        "of torch.distributed.checkpoint.state_dict serve all kinds of parallelism",
        FutureWarning,
        stacklevel=3,
    )
