"""A block that is compiled by itself: ``block.compile()``, or ``torch.compile(block)`` before ``fully_shard``.

Its unit runs in Python, as without a compiler: it is gathered as a whole before the compiled code, and the next unit is
gathered meanwhile. The compiled code takes the full parameters as inputs. So equal blocks share one graph, and the
first call takes as long for many blocks as for one.

While that code runs, the modules of the block are plain ones: they have the classes that they had before
``fully_shard``, and ``_parameters`` holds the full parameters. Dynamo finds nothing in them that names the unit.

A model that is compiled as a whole does not come here, nor does a block with units inside: their collectives are in
the graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._compat import in_recomputation
from ..errors import ParameterStateError
from ..ir import UNIT
from .read_parameter import read_parameter
from .state import SLOTS, FullParameter, Unit, owner_of, slots_of

#: Attribute of what ``torch.compile`` makes of a function: that function.
_COMPILED_FROM = "_torchdynamo_orig_callable"

#: Attribute of what ``torch.compiler.disable`` makes of a function.
_DISABLED = "_torchdynamo_disable"

#: Attribute of a forward that stands in the place of a module's own one: that one.
RUNS = "_graphshard_runs"

#: Attribute of the class of a sharded module: its class before ``fully_shard``.
PLAIN_CLASS = "_graphshard_plain_class"

_SET_CLASS = vars(object)["__class__"].__set__


def is_compiled_alone(unit: Unit, module: nn.Module, method: Callable[..., Any]) -> bool:
    """Whether ``method`` is compiled code of a unit that is a block of a larger model, with no other unit inside."""
    if unit.is_root or not _is_compiled(method):
        return False
    return all(each.__dict__.get(UNIT, unit) is unit for each in module.modules())


def _is_compiled(function: Any) -> bool:
    """Whether a function, or what a partial calls, is compiled code; ``torch.compiler.disable`` marks its own alike."""
    function = function.func if isinstance(function, functools.partial) else function
    return hasattr(function, _COMPILED_FROM) and not hasattr(function, _DISABLED)


def wrap_compiled_forward(module: nn.Module) -> None:
    """Makes a compiled forward of a module inside of a unit take full parameters while the unit runs.

    It is the module's own, as that of the wrapper that ``torch.compile`` returns, or that of its class.
    """
    if _is_compiled(module.forward):
        put_around(module, call_part, module.forward)


def put_around(module: nn.Module, run: Callable[..., Any], forward: Callable[..., Any]) -> None:
    """Sets a forward on the module itself that calls ``run`` with the module, ``forward``, and its arguments."""
    # A partial, unlike a closure, is deep-copied with the module that it is bound to.
    wrapped: Any = functools.update_wrapper(functools.partial(run, module, forward), forward)
    setattr(wrapped, RUNS, forward)
    module.__dict__["forward"] = wrapped


def uncompiled_forward(forward: Any) -> Any:
    """What a forward that is set on a module itself runs, without what units and ``torch.compile`` put around it."""
    while inner := getattr(forward, RUNS, None) or getattr(forward, _COMPILED_FROM, None):
        forward = inner
    # Around a forward of torch.nn, torch.compile has a closure of its own.
    is_closure = getattr(forward, "__globals__", {}).get("__name__", "").startswith("torch._dynamo.")
    return forward.__wrapped__ if is_closure else forward


def call_part(module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls compiled code of a module inside of a unit."""
    if torch.compiler.is_compiling() or not _is_part_of_running(module):
        return compiled(*args, **kwargs)
    return run_on_full_parameters(module, compiled, *args, **kwargs)


def _is_part_of_running(module: nn.Module) -> bool:
    """Whether all sharded parameters inside a module are those of one unit, whose forward runs uncompiled.

    A checkpointed region that runs again does as it did in the forward.
    """
    units = {owner_of(slot) for each in module.modules() for _, slot in slots_of(each)}
    return len(units) == 1 and (units.pop().in_use is not None or in_recomputation())


def run_on_full_parameters(module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls compiled code of a module whose unit's forward runs; it finds plain modules with full parameters.

    Raises:
        ParameterStateError: the code has put another parameter in the place of one.
    """
    with _plain_modules(module):
        return compiled(*args, **kwargs)


def runs_compiled_block() -> bool:
    """Whether compiled code of a block runs, or is compiled as it is called."""
    frame = sys._getframe().f_back
    while frame is not None and frame.f_code is not run_on_full_parameters.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def _plain_modules(module: nn.Module) -> Iterator[None]:
    # In a compiled block that a graph break cuts, what is around this module has made its modules plain.
    sharded = [each for each in module.modules() if PLAIN_CLASS in vars(type(each))]
    found = [(each, type(each), each.__dict__["_parameters"], _read_all(each)) for each in sharded]
    fulls = [value for *_, read in found for value in read.values() if type(value) is FullParameter]
    try:
        for value in fulls:
            value.__class__ = nn.Parameter  # Dynamo does not know the other class
        for each, cls, stored, read in found:
            each.__dict__["_parameters"] = {**stored, **read}
            _SET_CLASS(each, vars(cls)[PLAIN_CLASS])
            if isinstance(each, nn.RNNBase) and SLOTS in each.__dict__:
                each.__dict__["_flat_weights"] = [read.get(name) for name in each._flat_weights_names]
        yield
        for each, _, _, read in found:
            _refuse_replaced(each, read)
    finally:
        for value in fulls:
            value.__class__ = FullParameter
        for each, cls, stored, read in found:
            _SET_CLASS(each, cls)
            _keep_unsharded(stored, each.__dict__["_parameters"], read)
            each.__dict__["_parameters"] = stored
            if isinstance(each, nn.RNNBase) and SLOTS in each.__dict__:
                each.__dict__.pop("_flat_weights", None)


def _read_all(module: nn.Module) -> dict[str, Any]:
    """The full parameters of a module's own sharded ones, by attribute name."""
    return {name: read_parameter(module, name) for name in module.__dict__.get(SLOTS, ())}


def _refuse_replaced(module: nn.Module, read: dict[str, Any]) -> None:
    now = module.__dict__["_parameters"]
    for name, slot in module.__dict__.get(SLOTS, {}).items():
        if now.get(name) is not read[name]:
            raise ParameterStateError(
                f"parameter {slot.name} is replaced in the forward of a compiled block, and the new one would be lost: "
                "write to it under torch.no_grad(), or leave the block out of torch.compile"
            )


def _keep_unsharded(stored: dict[str, Any], now: dict[str, Any], read: dict[str, Any]) -> None:
    """Keeps what the code has made of the parameters that are not sharded: new ones, too."""
    for name in stored.keys() - now.keys() - read.keys():
        del stored[name]
    stored.update({name: value for name, value in now.items() if name not in read})
