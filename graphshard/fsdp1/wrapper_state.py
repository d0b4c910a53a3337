"""What a wrapper knows of itself, and how the wrappers of a model are found.

The files of this room find wrappers by their state, so that none of them imports the class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .._compat_fsdp1 import WRAPPED
from ..fsdp import FSDPModule
from .meshes import Meshes
from .options import Options

#: Attribute of a wrapper that holds its :class:`WrapperState`.
STATE = "_graphshard_fsdp1"

#: Attributes by which modules hold a module that they wrap.
_WRAPPERS = frozenset({WRAPPED, "_checkpoint_wrapped_module", "_orig_mod"})


def _default_settings() -> StateDictSettings:
    return StateDictSettings(
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(),
        optim_state_dict_config=FullOptimStateDictConfig(),
    )


@dataclass(eq=False, kw_only=True)
class WrapperState:
    """The state of one wrapper.

    Attributes:
        options: the arguments of the constructor.
        meshes: the ranks of the model.
        unit: the wrapped module, if it was given to ``fully_shard``; None for a container without a forward.
        is_root: no other wrapper holds this one.
        ignored_modules, ignored_params: what is not sharded, that of inner wrappers too.
        settings: what ``state_dict()`` returns.
        buffer_dtypes: the dtypes of the wrapper's buffers before ``buffer_dtype`` changed them, by plain name.
        is_summoned: ``summon_full_params`` shows full parameters.
        no_sync_depth: how many ``no_sync`` contexts are open.
        has_comm_hook: ``register_comm_hook`` was called.
        is_precise_in_eval: in eval mode, ``mixed_precision`` is left out.
        is_precise: it is left out at present.
    """

    options: Options
    meshes: Meshes
    unit: FSDPModule | None = None
    is_root: bool = True
    ignored_modules: set[nn.Module] = field(default_factory=set)
    ignored_params: set[nn.Parameter] = field(default_factory=set)
    settings: StateDictSettings = field(default_factory=_default_settings)
    buffer_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    is_summoned: bool = False
    no_sync_depth: int = 0
    has_comm_hook: bool = False
    is_precise_in_eval: bool = False
    is_precise: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapperState:
        """The state of a copied wrapper, which runs on the same ranks."""
        return replace(
            self,
            unit=copy.deepcopy(self.unit, memo),
            ignored_modules={copy.deepcopy(each, memo) for each in self.ignored_modules},
            ignored_params={copy.deepcopy(each, memo) for each in self.ignored_params},
            settings=copy.copy(self.settings),
            buffer_dtypes=dict(self.buffer_dtypes),
        )


def state_of(module: Any) -> WrapperState | None:
    """The state of a wrapper; None for any other module."""
    return module.__dict__.get(STATE) if isinstance(module, nn.Module) else None


def wrappers_in(module: nn.Module) -> Iterator[tuple[nn.Module, WrapperState]]:
    """The wrappers in a module, itself included, outermost first, with their states."""
    for each in module.modules():
        state = state_of(each)
        if state is not None:
            yield each, state


def own_modules(
    module: nn.Module, prefix: str = "", *, at_every_path: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """The modules below ``module``, itself included, down to the next wrappers, with their paths.

    With ``at_every_path`` a module that has several parents comes once for each, as in the keys of state dicts.
    """
    seen: set[int] = set()

    def visit(path: str, each: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(each) in seen and not at_every_path:
            return
        seen.add(id(each))
        yield path, each
        for name, child in each._modules.items():
            if child is not None and state_of(child) is None:
                yield from visit(f"{path}.{name}" if path else name, child)

    yield from visit(prefix, module)


def clean_name(name: str) -> str:
    """A name without the attribute by which wrappers hold their modules."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def plain_name(name: str) -> str:
    """A name as if no module had been wrapped, by a wrapper, ``checkpoint_wrapper`` or ``torch.compile``."""
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)
