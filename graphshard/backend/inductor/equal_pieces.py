"""Cuts a placed half into pieces, so that Inductor compiles equal ones once: those of a model's repeated blocks.

A plan differs from block to block, since it starts collectives where there is time for them; whole blocks are seldom
equal. The ops between two matrix products mostly are. So a half is cut in front of each product, which Inductor calls
from a library and fuses with nothing in front of it. Pieces that only ever follow one another are joined again: that
compiles no op more often, and the step makes fewer calls.

What a later piece reads is a result of its piece; views are made anew where they are read.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from ...ir import is_collective, is_point_to_point, is_view, is_wait, operands, output_values, waits_of

#: Ops that Inductor calls from libraries, and fuses with what follows at most.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"})

#: Ops that a cut would change: Inductor chooses layouts of all convolutions of a graph together.
_UNCUT = frozenset({"convolution", "convolution_backward"})

#: Reads one seed of a vector of seeds; the position differs from block to block.
_SEED = inductor_prims.lookup_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Ops of a half that are compiled together.

    Attributes:
        nodes: the ops, in order.
        inputs: values of the half that they read, made elsewhere, in the order of their first reads.
        outputs: their values that are read elsewhere.
        key: equal for pieces that the same code can run.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    key: tuple[Any, ...]


def cut_in_pieces(gm: fx.GraphModule) -> list[Piece] | None:
    """The pieces of a half in the order in which they run, or None for a half that cannot be cut.

    Not cut are halves with sizes that vary, in-place ops, ops that are no operators of torch, convolutions, or messages
    between two ranks.

    Args:
        gm: a placed half at level 2, not changed.
    """
    if not all(map(_may_be_cut, gm.graph.nodes)):
        return None
    cutter = _Cutter(gm)
    runs = cutter.runs()
    while True:
        pieces = cutter.pieces(runs)
        joined = _join_followers(runs, [piece.key for piece in pieces])
        if len(joined) == len(runs):
            return pieces
        runs = joined


def num_compiled_ops(pieces: Iterable[Piece]) -> int:
    """The number of ops to compile if equal pieces are compiled once."""
    return sum(len(piece.nodes) for piece in {piece.key: piece for piece in pieces}.values())


def _may_be_cut(node: fx.Node) -> bool:
    if node.op == "output":
        return all(value is None or isinstance(value, fx.Node) for value in node.args[0])
    if node.op == "placeholder" and not node.users:
        return True
    value = node.meta.get("val")
    if node.op in ("placeholder", "get_attr"):
        return isinstance(value, Tensor) and _has_numbers_as_sizes(value)
    if node.op != "call_function" or is_point_to_point(node):
        return False
    if node.target is not operator.getitem:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        if not target._schema.returns or target.overloadpacket.__name__ in _UNCUT:
            return False
    if isinstance(value, (list, tuple)):  # attention has numbers and None beside tensors; no node reads those
        return all(_has_numbers_as_sizes(each) for each in value if isinstance(each, Tensor))
    return isinstance(value, Tensor) and _has_numbers_as_sizes(value)


def _has_numbers_as_sizes(value: Tensor) -> bool:
    return all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset()))


class _Cutter:
    """What the pieces of one half are made from.

    Args:
        gm: the half.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._graph = gm.graph
        self._results = [value for value in output_values(gm.graph) if isinstance(value, fx.Node)]

    def runs(self) -> list[list[fx.Node]]:
        """All ops in graph order, cut in front of each product; views of values are left out.

        A result that is a view stands behind the value that it is a view of.
        """
        behind: dict[fx.Node, list[fx.Node]] = {}
        for node in dict.fromkeys(filter(_is_free, self._results)):
            behind.setdefault(source_of(node), []).append(node)
        runs: list[list[fx.Node]] = [[]]
        run_of: dict[fx.Node, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if node.op == "call_function" and not _is_free(node) and not is_seed(node):
                if _is_product(node):
                    runs.append([])
                # An item of a result belongs to the op that gives it.
                run = run_of[node.args[0]] if node.target is operator.getitem else runs[-1]
                run_of[node] = run
                run += [node, *behind.get(node, ())]
            elif node.op in ("placeholder", "get_attr"):
                runs[0] += behind.get(node, ())
        return [run for run in runs if run]

    def pieces(self, runs: Sequence[Sequence[fx.Node]]) -> list[Piece]:
        """One piece a run."""
        number = {node: index for index, run in enumerate(runs) for node in run}
        pieces = [self._piece(run) for run in runs]
        read = [set(piece.inputs) for piece in pieces]
        leaving = set(self._results).union(*read)
        leaving |= {node.args[0] for node in leaving if is_seed(node)}
        # A collective in flight reads its operands until its wait: their piece must not write over them.
        for node in filter(is_collective, number):
            if any(number[wait] != number[node] for wait in waits_of(node) if wait in number):
                leaving.update(source for each in operands(node) if (source := source_of(each)) in number)
        return [
            _with_outputs(piece, leaving.intersection(run)) for run, piece in zip(runs, pieces, strict=True)
        ]

    def _piece(self, run: Sequence[fx.Node]) -> Piece:
        own = set(run)
        nodes: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}

        def read(node: fx.Node) -> None:
            if node in nodes or node in inputs:
                return
            if node in own or _is_free(node) or (is_seed(node) and node.args[0] in own):
                for source in node.all_input_nodes:
                    read(source)
                nodes[node] = None
            else:
                inputs[node] = None

        for node in run:
            read(node)
        return Piece(nodes=tuple(nodes), inputs=tuple(inputs), outputs=(), key=())


def _with_outputs(piece: Piece, leaving: set[fx.Node]) -> Piece:
    return replace(
        piece,
        outputs=(outputs := tuple(node for node in piece.nodes if node in leaving)),
        key=_key(piece.nodes, piece.inputs, outputs),
    )


def _key(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> tuple[Any, ...]:
    names = {node: f"%{index}" for index, node in enumerate((*inputs, *nodes))}
    calls = tuple(
        (node.target, repr(fx.node.map_arg((node.args, node.kwargs), names.__getitem__))) for node in nodes
    )
    return tuple(map(_layout, inputs)), calls, tuple(names[node] for node in outputs)


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    if is_seed(node):
        return ("seed", value.dtype, value.device)
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


def _join_followers(runs: list[list[fx.Node]], keys: Sequence[Any]) -> list[list[fx.Node]]:
    """Joins neighbours where each run like the first is followed by one like the second, and none else is."""
    counts = Counter(keys)
    pairs = Counter(pairwise(keys))
    joined: list[list[fx.Node]] = []
    for index, run in enumerate(runs):
        pair = (keys[index - 1], keys[index])
        is_joined = index > 0 and pair[0] != pair[1] and pairs[pair] == counts[pair[0]] == counts[pair[1]]
        if is_joined:
            joined[-1] = [*joined[-1], *run]
        else:
            joined.append(run)
    return joined


def _is_product(node: fx.Node) -> bool:
    return node.target is not operator.getitem and node.target.overloadpacket.__name__ in _PRODUCTS


def is_seed(node: fx.Node) -> bool:
    """Whether a node reads one seed of a vector; pieces take it as an input, unless they make the vector."""
    return node.target is _SEED


def _is_free(node: fx.Node) -> bool:
    """Whether a node is a view of one value, which each piece makes for itself."""
    if node.op != "call_function" or is_wait(node) or not is_view(node):
        return False
    if node.target is operator.getitem:
        return _is_free(node.args[0])
    return len(node.all_input_nodes) == 1


def source_of(node: fx.Node) -> fx.Node:
    """The value that a node is a view of; itself if it is none."""
    while _is_free(node):
        node = node.all_input_nodes[0]
    return node
