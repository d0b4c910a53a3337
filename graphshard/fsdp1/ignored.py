"""The modules and parameters that a wrapper leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import OptionTypeError, ShardingError
from .options import Options
from .wrapper_state import state_of, wrappers_in


def ignored_in(module: nn.Module, options: Options) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules and the parameters that the arguments name, and those that inner wrappers ignore.

    Raises:
        OptionTypeError: (a TypeError) an argument is no iterable.
        ShardingError: (a ValueError) its elements are of several types, or a module is a wrapper.
    """
    name = "ignored_states" if options.ignored_states is not None else "ignored_modules"
    given = _elements(options.ignored_states or options.ignored_modules or (), name)
    takes_parameters = name == "ignored_states"
    are_modules = all(isinstance(each, nn.Module) for each in given)
    are_parameters = all(isinstance(each, nn.Parameter) for each in given)
    if not (are_modules or (takes_parameters and are_parameters)):
        kinds = ", ".join(sorted({type(each).__name__ for each in given}))
        wanted = "all parameters or all modules" if takes_parameters else "modules"
        raise ShardingError(f"FullyShardedDataParallel: {name} must be {wanted}, but holds: {kinds}")
    if any(state_of(each) is not None for each in given):
        raise ShardingError(
            f"FullyShardedDataParallel: {name} holds a FullyShardedDataParallel, whose parameters are sharded "
            "already; name the module before it is wrapped"
        )
    if module in given:
        warnings.warn(
            f"FullyShardedDataParallel: {name} holds the module that is wrapped, so nothing is sharded; name modules "
            "inside of it, or leave out the wrapper",
            stacklevel=5,
        )
    modules = {child for each in given if isinstance(each, nn.Module) for child in each.modules()}
    modules = {each for each in modules if state_of(each) is None}
    params = {each for each in given if isinstance(each, nn.Parameter)}
    params.update(param for each in modules for param in each.parameters())
    for _, inner in wrappers_in(module):
        modules |= inner.ignored_modules
        params |= inner.ignored_params
    return modules, params


def _elements(given: Iterable[Any], name: str) -> list[Any]:
    try:
        return list(given)
    except TypeError as error:
        raise OptionTypeError(
            f"FullyShardedDataParallel: {name} is a {type(given).__name__}; give an iterable"
        ) from error
