"""Halves that run node by node, in place of Inductor: for tests that are not about what Inductor generates.

The passes, the planner, the agreement of the ranks and the check at each step work as in training. A graph that is
compiled for the first time costs a tenth.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch import fx

import graphshard.backend.entry  # noqa: F401  (loads the modules that are patched)


class InterpretedHalf:
    """Called as Inductor's result is: with a list of inputs, which it empties."""

    source_code = ""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self._boxed_call = True  # of the instance: AOTAutograd's wrappers take over its own attributes only

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        # One for each run: it keeps the values that are not read any more, and so the model.
        return fx.Interpreter(self.gm).boxed_run(inputs)


def interpret_half(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> InterpretedHalf:
    """Takes the arguments of Inductor's inner compiler."""
    return InterpretedHalf(gm)


#: The functions that stand for others, by name, in each module of the backend that imports them.
_STANDINS: dict[str, Any] = {
    "compile_fx_inner": interpret_half,
    "order_difference": lambda planned, emitted: "",  # there is no source whose order could differ
}


@contextlib.contextmanager
def interpreted_halves() -> Iterator[None]:
    """While this is open, what the backend compiles is interpreted."""
    modules = [module for name, module in sys.modules.items() if name.startswith("graphshard.backend")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in _STANDINS.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, _STANDINS[name]))
        yield
