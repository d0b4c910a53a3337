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


def call_arguments(node: fx.Node) -> dict[str, Any]:
    """What an op is called with, by the names of its schema and in their order; without defaults."""
    target, args, kwargs = call_of(node)
    names = _names(target)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given[name] for name in (names or given) if name in given}


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name in the schema, or its default; None if it has none of that name."""
    given = call_arguments(node)
    if name in given:
        return given[name]
    schema = getattr(call_of(node)[0], "_schema", None)
    return next(
        (each.default_value for each in (schema.arguments if schema else ()) if each.name == name), None
    )


def _names(target: Any) -> list[str]:
    schema = getattr(target, "_schema", None)
    return [each.name for each in schema.arguments] if schema else []
