"""The call that a node makes, with its arguments where the op's schema has them.

Graphs of other tools give arguments by name or by position as they please; what reads them asks here.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from .._compat import call_of


def schema_call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Op, positional and keyword arguments of a call; of what runs inside a wrapper, those inside.

    What the schema has by position and the node by name moves to its place, with the defaults of what is left out
    in front of it. A target without a schema keeps its arguments as they are.
    """
    target, args, kwargs = call_of(node)
    schema = getattr(target, "_schema", None)
    by_position = [each for each in (schema.arguments if schema else ()) if not each.kwarg_only]
    placed = list(args)
    for expected in by_position[len(args) :]:
        if not any(each.name in kwargs for each in by_position):
            break
        placed.append(kwargs.pop(expected.name, expected.default_value))
    return target, tuple(placed), kwargs


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name in the schema; None if it has none of that name, or its default."""
    target, args, kwargs = schema_call(node)
    if name in kwargs:
        return kwargs[name]
    schema = getattr(target, "_schema", None)
    for index, expected in enumerate(schema.arguments if schema else ()):
        if expected.name == name:
            return args[index] if index < len(args) else None
    return None
