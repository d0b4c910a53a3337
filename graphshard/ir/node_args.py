"""The call that a node makes, with the arguments where the op's schema has them.

Graphs of other tools pass arguments by name or by position. Code that reads them uses these functions.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from .._compat import call_of


def schema_call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op, the positional and the keyword arguments of a call; for a wrapper, those of the op inside.

    Arguments that the schema has by position and the node has by name move to their position. Arguments left out in
    front of them get their defaults. If the target has no schema, its arguments stay as they are.
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
    """The arguments of a call by their names in the schema, in that order; without defaults."""
    target, args, kwargs = call_of(node)
    names = _names(target)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given[name] for name in (names or given) if name in given}


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name in the schema, or its default; None if the op has no such argument."""
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
