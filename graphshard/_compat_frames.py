"""Frames that Dynamo leaves to Python, and calls that it writes into graphs; private torch names, as in ``_compat``."""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import fx
from torch._C._dynamo.eval_frame import set_code_exec_strategy  # checked: 2.13
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback  # checked: 2.11, 2.13
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError  # checked: 2.13
from torch._dynamo.exc import UnspecializeRestartAnalysis  # checked: 2.13
from torch._dynamo.symbolic_convert import InstructionTranslator  # checked: 2.13
from torch._dynamo.types import FrameAction, FrameExecStrategy  # checked: 2.13

#: Calls of Dynamo's graphs that give no result (checked: 2.13). The first leaves the mode of torch alone.
LOG_USAGE = torch._C._log_api_usage_once
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast

#: Operators that trace the functions that they are given as graphs of plain tensors.
_OPERATORS = frozenset(
    {"cond", "while_loop", "scan", "associative_scan", "map", "map_impl", "flex_attention"}
)


#: The functions of torch's pipeline schedules that compute the gradients of inputs, and those of parameters.
_HALVES = {"stage_backward_input": "input", "stage_backward_weight": "weight"}

#: Whether they count a gradient once that reaches the parameters of a unit on several paths, as in graphshard's
#: uncompiled units, whose parameters are gathered by one node (checked: 2.11 and 2.12 count it again for each node on
#: a path that another path begins at, 2.13 does not).
HALVES_ADD_UP = torch.__version__ >= "2.13"


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Inside, torch does not log the traceback of an op that fails on fake tensors; the error is raised as ever."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # checked: 2.13, 2.14

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@torch.compiler.assume_constant_result
def operator_traced() -> str:
    """The operator whose function is traced, ``cond`` for instance; "" in other code.

    Dynamo calls it when it traces a call of it (checked: 2.13).
    """
    tracer = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if str(tracer.source_target) in _OPERATORS:
            return str(tracer.source_target)
        tracer = tracer.parent
    return ""


def inline_regions(gm: fx.GraphModule) -> None:
    """Puts the bodies of regions (``torch.compiler.nested_compile_region``) in place of their calls (checked: 2.13).

    Dynamo does so itself for a body of one call. A body of several calls would be one graph for the parameters of all.
    """
    with suppress(ImportError):  # older torch
        from torch._higher_order_ops.passes.inline_invoke_subgraph import inline_invoke_subgraph

        inline_invoke_subgraph(gm)


def trace_again() -> NoReturn:
    """Has Dynamo start to trace the frame anew; called when it traces (checked: 2.13)."""
    raise UnspecializeRestartAnalysis


def place_run_in_python(forward: types.CodeType) -> str | None:
    """Where Python runs a part of a compiled model, called as Dynamo compiles what that part calls (checked: 2.13).

    Args:
        forward: the code that runs a forward of a unit; Python runs it only if Dynamo could not trace it.

    Returns:
        The line that Python runs, innermost, outside of torch and of graphshard; None if no such forward is running
        inside of the compiled function.
    """
    packages = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    frame: types.FrameType | None = sys._getframe()
    place = None
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        if frame.f_code is forward:
            return place
        if place is None and not frame.f_code.co_filename.startswith(packages):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def leave_frame_to_python(code: types.CodeType) -> None:
    """Makes Dynamo skip a function where it starts at its frame, but not what the function calls (checked: 2.13).

    Code that Dynamo traces may still call the function: it is traced with its caller then.
    """
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT))


@functools.cache
def leave_frames_to_python(package: str) -> None:
    """Makes Dynamo skip every function of the package's loaded modules, and what they call, where it starts there.

    Dynamo starts at a frame of the package after a graph break, or in a hook or a backward that compiled code calls.
    Such code is not written to be traced: it communicates and changes the state of units. Code that Dynamo traces may
    still call a function of the package: it is traced with its caller then (checked: 2.13).

    Done once for each name of a package.
    """
    skipped = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for code in _codes_in(module, module):
                set_code_exec_strategy(code, skipped)


def _codes_in(owner: types.ModuleType | type, module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of all functions that a module, or a class of it, defines."""
    for value in vars(owner).values():
        if isinstance(value, type):
            if value.__module__ == module.__name__:
                yield from _codes_in(value, module)
            continue
        for function in _functions_of(value):
            if function.__module__ == module.__name__:
                yield from _with_inner(function.__code__)


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The functions of a global name or of an attribute of a class: under decorators, and those of a property."""
    if isinstance(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from _functions_of(each)
        return
    value = getattr(value, "__func__", value)
    while value is not None:
        if isinstance(value, types.FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def is_counting_hook(frame: types.FrameType) -> bool:
    """Whether a frame is the hook by which ``CommDebugMode`` lists a module's parameters before it runs.

    It cannot count a collective that starts in this hook: it fails with a KeyError (checked: 2.13).
    """
    is_hook = frame.f_code.co_name == "_fw_pre_hook"
    return is_hook and frame.f_globals.get("__name__") == "torch.distributed.tensor.debug._comm_mode"


def half_of_backward(frame: types.FrameType) -> str:
    """Which half of a backward a pipeline schedule splits, if a frame is ``parameters()`` and it lists them for that.

    Returns:
        "input" for the gradients of inputs, "weight" for those of parameters, "" for any other frame (checked: 2.13).
    """
    caller = frame.f_back
    if caller is None or caller.f_globals.get("__name__") != "torch.distributed.pipelining._backward":
        return ""
    return _HALVES.get(caller.f_code.co_name, "")


#: Whether Dynamo takes an attribute of a module from ``_parameters`` alone, and does not find what a subclass of dict
#: holds (checked: 2.11 and 2.12 do, 2.13 does not).
_MISSES_SUBCLASSES = torch.__version__ < "2.13"


def misses_subclasses(frame: types.FrameType) -> bool:
    """Whether a frame is Dynamo's, which asks whether ``_parameters`` is a dict that it may look into.

    If it is none, Dynamo traces ``nn.Module.__getattr__``.
    """
    asks = _MISSES_SUBCLASSES and frame.f_code.co_name == "var_getattr"
    return asks and frame.f_globals.get("__name__") == "torch._dynamo.variables.user_defined"
