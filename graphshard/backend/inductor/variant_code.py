"""What runs a placed half: graphs that Inductor has compiled, and how they are called. It can be kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.aot_autograd_result import (
    BundledOutputCodeLoadable,
)  # checked: 2.11 to 2.14
from torch._inductor.output_code import CompiledFxGraph

from ...ir import output_values
from .compile_pieces import Code, PieceRow, compiled_alone
from .group_aliases import named
from .host_copies import waiting


@dataclass(frozen=True, slots=True)
class EmptyResults:
    """Stands for the code of a graph that is compiled ahead: memory for its results, which nobody writes.

    Attributes:
        results: of each tensor its shape, stride, dtype and device, or which input it is; another result as it is.
    """

    results: tuple[Any, ...]

    @staticmethod
    def of(gm: fx.GraphModule) -> EmptyResults | None:
        """That of a half whose sizes do not vary; None if a result has no fake value, as those of ``linearize``."""
        outputs = output_values(gm.graph)
        if any(isinstance(value, fx.Node) and "val" not in value.meta for value in outputs):
            return None
        inputs = gm.graph.find_nodes(op="placeholder")
        given = {node.name: _Input(position) for position, node in enumerate(inputs)}
        return EmptyResults(tuple(given.get(str(value)) or _layout_of(value) for value in outputs))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        given = list(inputs)  # the handles of units among them: the backward asks them what is to be done
        inputs.clear()
        return [_result(result, given) for result in self.results]


class _Input(NamedTuple):
    """A result that is an input."""

    position: int


class _Layout(NamedTuple):
    """Where the elements of a tensor lie."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _layout_of(value: Any) -> Any:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    if not isinstance(value, Tensor):
        return value
    return _Layout(tuple(value.shape), value.stride(), value.dtype, value.device)


def _result(result: Any, inputs: list[Any]) -> Any:
    if isinstance(result, _Input):
        return inputs[result.position]
    if isinstance(result, _Layout):
        return torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=result.device)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantCode:
    """The code of one variant of a half.

    Attributes:
        compiled: what Inductor compiled: of a half in pieces each kind of piece, else the half.
        row: how the pieces follow one another; None for a half that was compiled as a whole.
        names: second names of process groups, by their own.
        copied_from: the device that its results are copied from while it runs; None if none are.
        results: stands for it where nothing is computed; None if that is not known.
    """

    compiled: tuple[Any, ...]
    row: PieceRow | None = None
    names: Mapping[str, str]
    copied_from: torch.device | None = None
    results: EmptyResults | None = None

    def run(self, *, is_ahead: bool = False) -> Callable[[list[Any]], Any]:
        """It as a function in AOTAutograd's boxed convention; ``is_ahead``: one that does not compute."""
        if is_ahead and self.results is not None:
            return self.results
        run: Code = self.compiled[0] if self.row is None else self.row.runner(self.compiled)
        if self.copied_from is not None:
            run = waiting(run, self.copied_from)
        return named(run, self.names)

    @property
    def can_be_kept(self) -> bool:
        """Whether Inductor would keep each of its graphs in its own cache, and it holds no tensor."""
        cached = (
            isinstance(code, CompiledFxGraph) and code._fx_graph_cache_key is not None
            for code in self.compiled
        )
        return all(cached) and not (self.row is not None and self.row.constants)

    def for_disk(self) -> VariantCode:
        """A copy that can be pickled, and does not run."""
        written = tuple(map(copy, self.compiled))
        for code in written:
            code.prepare_for_serialization()
        return replace(self, compiled=written)

    def loaded(self, arguments: Mapping[str, Any]) -> VariantCode:
        """One that runs, of a copy that was pickled; ``arguments`` are those that torch gives to kept code.

        Raises:
            RuntimeError: Inductor cannot load it.
        """
        with compiled_alone():
            return replace(self, compiled=tuple(_loaded(copy(code), arguments) for code in self.compiled))


def _loaded(code: CompiledFxGraph, arguments: Mapping[str, Any]) -> Any:
    loadable = BundledOutputCodeLoadable(result=code)
    loadable.load([])
    return loadable.post_compile(code, dict(arguments))
