"""Checks in front of each run that a half with symbolic sizes keeps the user's memory budget.

Such a half is planned for the sizes that it was compiled with, and runs with others. Its collectives stay where the
plan has them, so the memory model of the planned graph gives what it holds at other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from ..errors import OutgrownBudgetError
from ..ir import copy_graph, is_collective, size_hint, stored_bytes, tensors_of
from ..pipeline import PassContext
from ..planner import held_beside, measured_peak

#: Values of symbols.
Sizes = Mapping[sympy.Symbol, sympy.Integer]


class _Source(NamedTuple):
    """Where the value of a symbol is read: an input and its dim (None for an input that is a number)."""

    position: int
    dim: int | None
    symbol: sympy.Symbol
    planned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSizes:
    """The memory of one planned half, at any sizes.

    Attributes:
        gm: a copy of the half as it was planned; later steps may edit the original.
        context: what passes on it know.
        resident: values of the joint graph's inputs that live through the whole step.
        budget_bytes: the user's budget.
        what: names the half in errors.
        refusing: gives a context that tells the other ranks of an error in it.
    """

    gm: fx.GraphModule
    context: PassContext
    resident: Sequence[Any]
    budget_bytes: int
    what: str
    refusing: Callable[[], AbstractContextManager[None]]
    _sources: list[_Source] = field(init=False)
    _needed: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sources", _sources(self.gm))

    def check(self, args: Sequence[Any]) -> None:
        """Called with the inputs of the half in front of each run; each size is computed once.

        Raises:
            OutgrownBudgetError: the half does not keep the budget at the sizes of these inputs.
        """
        sizes = tuple(
            int(args[source.position] if source.dim is None else args[source.position].shape[source.dim])
            for source in self._sources
        )
        planned = tuple(source.planned for source in self._sources)
        if all(size <= before for size, before in zip(sizes, planned, strict=True)):
            return
        if sizes not in self._needed:
            self._needed[sizes] = self.needed_bytes(sizes)
        if self._needed[sizes] > self.budget_bytes:
            with self.refusing():
                raise OutgrownBudgetError(self.what, self.budget_bytes, self._needed[sizes], sizes, planned)

    def needed_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of the budget that the half needs at some sizes, which are in the order of :func:`_sources`."""
        values = {
            source.symbol: sympy.Integer(size) for source, size in zip(self._sources, sizes, strict=True)
        }
        sized = copy_graph(self.gm)
        for node in sized.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = _sized(node.meta["val"], values)
        resident = sum(stored_bytes(_sized(value, values)) for value in self.resident)
        beside = held_beside(sized, replace(self.context, resident_bytes=resident))
        return beside + measured_peak(
            sized, self.context.device_type or _device_type(self.gm), self.context.scratch
        )


def has_symbolic_sizes(gm: fx.GraphModule) -> bool:
    """Whether a half may run with other sizes than those it was planned for."""
    return bool(_sources(gm))


def _sources(gm: fx.GraphModule) -> list[_Source]:
    """The symbols that are sizes of inputs or inputs themselves, each at its first place. A ragged dim is none."""
    found: dict[sympy.Symbol, _Source] = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        dims = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in dims:
            if (
                isinstance(size, torch.SymInt)
                and size.node.expr.is_Symbol
                and isinstance(size.node.hint, int)
            ):
                source = _Source(position, dim, size.node.expr, size_hint(size))
                found.setdefault(source.symbol, source)
    return list(found.values())


def _sized(value: Any, values: Sizes) -> Any:
    """A value of a graph at given sizes; sizes that depend on data count as in the memory model."""
    if isinstance(value, torch.Tensor):
        shape = [_number(size, values) for size in value.shape]
        strides = [_number(stride, values) for stride in value.stride()]  # an expanded dim is in memory once
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return [_sized(part, values) for part in value]
    return value


def _number(size: int | torch.SymInt, values: Sizes) -> int:
    if isinstance(size, int):
        return size
    known = size.node.expr.xreplace(values)
    return int(known) if known.is_number else size_hint(size)


def _device_type(gm: fx.GraphModule) -> str | None:
    """The type of the device that the collectives of a graph run on."""
    for node in filter(is_collective, gm.graph.nodes):
        return tensors_of(node.meta["val"])[0].device.type
    return None
