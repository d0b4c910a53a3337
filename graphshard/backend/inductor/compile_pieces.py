"""Compiles a half in pieces, equal ones once, and runs them in a row."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch._inductor.config as inductor_config
from torch import fx
from torch._guards import TracingContext, tracing

from ..._compat import make_graph_module
from ...ir import copy_graph, is_collective, operands, output_values, waits_of
from .equal_pieces import Piece, is_seed, source_of
from .inductor_config import compile_fx_inner

#: Arguments of Inductor's inner compiler that count inputs of the whole half.
_OF_WHOLE_HALF = ("static_input_idxs",)

#: Settings of Inductor with which a half stays whole: code that reuses the memory of what the graph reads no more,
#: also that of a collective in flight, and CUDA graphs.
_WHOLE_IF = ("allow_buffer_reuse", "triton.cudagraphs")

#: Compiled code in AOTAutograd's boxed convention.
Code = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One piece of a half: which code runs it, and the places of its values in the half's list of values.

    Attributes:
        code: the position of its code.
        reads: of each input the place; of a seed that of its vector, and the position of the seed in it.
        drops: places whose values nobody reads later.
        writes: places of the outputs.
    """

    code: int
    reads: tuple[tuple[int, int | None], ...]
    drops: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PieceRow:
    """How the pieces of a half follow one another.

    Attributes:
        calls: the pieces, in order.
        results: places of the half's results; None for a result that is None.
        constants: the half's attributes; their places follow those of the inputs.
        num_made: how many values the pieces make; their places come last.
    """

    calls: tuple[Call, ...]
    results: tuple[int | None, ...]
    constants: tuple[Any, ...]
    num_made: int

    def runner(self, codes: Sequence[Code]) -> Code:
        """Code for the half; ``codes`` are those of its kinds of pieces."""
        calls = [(codes[call.code], call.reads, call.drops, call.writes) for call in self.calls]

        def run(args: list[Any]) -> list[Any]:
            values = [*args, *self.constants, *(None for _ in range(self.num_made))]
            args.clear()
            for code, reads, drops, writes in calls:
                given = [values[at] if seed is None else values[at][seed] for at, seed in reads]
                for at in drops:
                    values[at] = None
                for at, value in zip(writes, code(given), strict=True):
                    values[at] = value
                value = None
            return [None if at is None else values[at] for at in self.results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def may_be_in_pieces() -> bool:
    """Whether a half that is compiled with the settings that Inductor has now may be compiled in pieces."""
    return not any(operator.attrgetter(name)(inductor_config) for name in _WHOLE_IF)


def compile_in_pieces(
    gm: fx.GraphModule, pieces: Sequence[Piece], arguments: Mapping[str, Any]
) -> tuple[PieceRow, list[tuple[fx.GraphModule, Any]]]:
    """The row of a half's pieces, and its kinds of pieces: of each the graph, and what Inductor compiled.

    Args:
        gm: the half.
        pieces: all its pieces, in order.
        arguments: keyword arguments of Inductor's inner compiler for the whole half.
    """
    arguments = {name: value for name, value in arguments.items() if name not in _OF_WHOLE_HALF}
    kinds: dict[Any, int] = {}
    compiled: list[tuple[fx.GraphModule, Any]] = []
    for piece in pieces:
        if piece.key not in kinds:
            graph = piece_graph(gm, piece)
            planned = copy_graph(graph)  # Inductor edits what it is given
            with compiled_alone():
                code = compile_fx_inner(graph, [node.meta["val"] for node in piece.inputs], **arguments)
            kinds[piece.key] = len(compiled)
            compiled.append((planned, code))
    return _row(gm, pieces, [kinds[piece.key] for piece in pieces]), compiled


def piece_graph(gm: fx.GraphModule, piece: Piece) -> fx.GraphModule:
    """A piece as a graph of its own; its names tell nothing of its place in the half."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(piece.inputs):
        copies[node] = graph.placeholder(f"arg{index}")
        copies[node].meta["val"] = node.meta["val"]
    for node in piece.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        copies[node].meta = dict(node.meta)
    output = graph.output(tuple(copies[node] for node in piece.outputs))
    # Pieces that follow were cut with these layouts.
    output.meta["user_visible_output_idxs"] = list(range(len(piece.outputs)))
    return make_graph_module(gm, graph)


@contextlib.contextmanager
def compiled_alone() -> Iterator[None]:
    """A context in which Inductor takes a graph for itself: what AOTAutograd knows of the half is hidden."""
    known = TracingContext.try_get()
    own = TracingContext(known.fake_mode if known is not None else None)
    with tracing(own):
        yield


def _row(gm: fx.GraphModule, pieces: Sequence[Piece], kinds: Sequence[int]) -> PieceRow:
    inputs = gm.graph.find_nodes(op="placeholder")
    constants = gm.graph.find_nodes(op="get_attr")
    made = [node for piece in pieces for node in piece.outputs]
    place = {node: index for index, node in enumerate((*inputs, *constants, *made))}
    calls = []
    drops = _drops(gm, pieces, place)
    for piece, kind, dropped in zip(pieces, kinds, drops, strict=True):
        reads = tuple(
            (place[node.args[0]], node.args[1]) if is_seed(node) else (place[node], None)
            for node in piece.inputs
        )
        calls.append(Call(kind, reads, dropped, tuple(place[node] for node in piece.outputs)))
    results = (place[value] if isinstance(value, fx.Node) else None for value in output_values(gm.graph))
    attributes = (operator.attrgetter(node.target)(gm) for node in constants)
    return PieceRow(tuple(calls), tuple(results), tuple(attributes), len(made))


def _drops(
    gm: fx.GraphModule, pieces: Sequence[Piece], place: Mapping[fx.Node, int]
) -> list[tuple[int, ...]]:
    """For each piece, the places of the values that nobody reads after it."""
    made_by = {node: index for index, piece in enumerate(pieces) for node in piece.nodes}
    last = {node: 0 for node in place if node not in made_by}
    for index, piece in enumerate(pieces):
        for node in piece.inputs:
            last[node.args[0] if is_seed(node) else node] = index
    for collective in filter(is_collective, made_by):
        waited = max((made_by[wait] for wait in waits_of(collective) if wait in made_by), default=0)
        for source in map(source_of, operands(collective)):
            if source in place:
                last[source] = max(last.get(source, 0), waited)
    kept = set(output_values(gm.graph))
    drops: list[list[int]] = [[] for _ in pieces]
    for node, index in last.items():
        if node not in kept:
            drops[index].append(place[node])
    return [tuple(each) for each in drops]
