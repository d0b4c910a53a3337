"""Values between modules that are to be held in a placement.

A hook of the module marks them. To a graph a mark is a pair of reshards, to the placement and back, so the program
computes what it computed before. ``propagate_sharding`` reads the pair and keeps the value in that placement. A mark of
``Replicate`` is one reshard from ``Replicate`` to itself. Uncompiled code skips the marks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from .._compat import tree_map
from ..errors import ShardingError
from ..ir import REPLICATE, RESHARD

#: Label, size, group name and rank: the arguments of a reshard behind the shape.
Axis: TypeAlias = tuple[str, int, str, int]

#: Of a module: a placement for the first argument (or for each result), or placements by argument name.
Held: TypeAlias = Placement | Mapping[str, Placement]


def hold(value: Any, placement: Placement, axis: Axis, what: str) -> Any:
    """Marks a tensor, or those in tuples, lists, dicts and outputs of Hugging Face, while it is compiled.

    Raises:
        ShardingError: a tensor lacks the dim, uncompiled too; ``what`` names it.
    """
    return tree_map(functools.partial(_held, placement=placement, axis=axis, what=what), value)


def _held(value: Any, placement: Placement, axis: Axis, what: str) -> Any:
    """:func:`hold` for a leaf."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(placement, Shard) and not -value.ndim <= placement.dim < value.ndim:
        if not torch.compiler.is_compiling():
            # Where a hook has raised, Dynamo traces no hook any more: once this is corrected, marks would be left out.
            torch.compiler.reset()
        raise ShardingError(
            f"parallelize: {what} of shape {list(value.shape)} has no dim {placement.dim}: give Shard of a dim that it "
            "has, or Replicate()"
        )
    if not torch.compiler.is_compiling():
        return value
    if isinstance(placement, Replicate):
        return RESHARD(value, REPLICATE, REPLICATE, list(value.shape), *axis)
    assert isinstance(placement, Shard)
    cut = f"Shard({placement.dim % value.ndim})"
    pieces = RESHARD(value, REPLICATE, cut, list(value.shape), *axis)
    return RESHARD(pieces, cut, REPLICATE, list(value.shape), *axis)


def hold_inputs(module: nn.Module, path: str, held: Held, axis: Axis) -> None:
    """Marks what a module takes; ``path`` is its name."""
    by_name = dict(held) if isinstance(held, Mapping) else {argument_names(module)[0]: held}
    names = tuple(argument_names(module))
    hook = functools.partial(_before, path=path, names=names, held=tuple(by_name.items()), axis=axis)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def hold_outputs(module: nn.Module, path: str, placement: Placement, axis: Axis) -> None:
    """Marks what a module returns; ``path`` is its name."""
    module.register_forward_hook(functools.partial(_after, path=path, placement=placement, axis=axis))


def argument_names(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward."""
    return list(inspect.signature(module.forward).parameters)


def _before(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    path: str,
    names: tuple[str, ...],
    held: tuple[tuple[str, Placement], ...],
    axis: Axis,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    placed, by_name = list(args), dict(kwargs)
    for name, placement in held:
        what = f"inputs: argument {name!r} of module {path!r}"
        if name in by_name:
            by_name[name] = hold(by_name[name], placement, axis, what)
        elif (position := names.index(name)) < len(placed):
            placed[position] = hold(placed[position], placement, axis, what)
    return tuple(placed), by_name


def _after(
    module: nn.Module, args: tuple[Any, ...], result: Any, *, path: str, placement: Placement, axis: Axis
) -> Any:
    return hold(result, placement, axis, f"outputs: the result of module {path!r}")
