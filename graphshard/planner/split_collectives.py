"""Splits one collective into several, with a copy that joins their results.

The parts are runs of rows of what a rank sends or, for a reduction, of what it gets. They start where the whole did.
An op joins their results in front of the first node that computes with them. That op moves with no collective:
planners see it as compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import fx

from ..ir import (
    ALL_GATHER,
    ALL_REDUCE,
    JOIN_PARTS,
    PACK,
    REDUCE_SCATTER,
    WAIT,
    GraphEmitter,
    aten,
    call_arguments,
    copy_graph,
    is_wait,
    operands,
    recompute_tags,
)
from ..pipeline import gathered_shard, is_layout


def num_rows(collective: fx.Node) -> int:
    """The most parts into which a collective can be split; 1 if it cannot be split."""
    is_known = collective.target in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
    if not is_known or [*map(is_wait, collective.users)] != [True]:
        return 1
    value = operands(collective)[0] if collective.target is ALL_GATHER else collective
    shape = list(value.meta["val"].shape)
    return shape[0] if shape and all(isinstance(size, int) and size > 0 for size in shape) else 1


def split_graph(
    gm: fx.GraphModule, splits: Mapping[fx.Node, int]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of a graph with some collectives split.

    Args:
        gm: stays as it is.
        splits: collectives, and into how many parts: 2 to :func:`num_rows`.

    Returns:
        The copy, and its node for each node of ``gm`` that is still there.
    """
    copied = copy_graph(gm)
    twin = dict(zip(gm.graph.nodes, copied.graph.nodes, strict=True))
    for node, num_parts in splits.items():
        split_collective(copied.graph, twin[node], num_parts)
    copied.graph.lint()
    left = set(copied.graph.nodes)
    return copied, {node: copy for node, copy in twin.items() if copy in left}


def split_collective(graph: fx.Graph, whole: fx.Node, num_parts: int) -> list[fx.Node]:
    """Splits one collective where it stands; returns its parts.

    Args:
        graph: edited in place.
        whole: erased, with its wait.
        num_parts: 2 to :func:`num_rows`; rows are dealt out as evenly as possible.
    """
    rows, (wait,) = num_rows(whole), whole.users
    _, *settings = call_arguments(whole).values()
    ends = [index * rows // num_parts for index in range(num_parts + 1)]
    with graph.inserting_before(whole):
        emit = GraphEmitter(graph, origin=whole, extra_meta=recompute_tags(whole))
        parts = [
            emit(whole.target, _piece(emit, whole, start, end), *settings) for start, end in pairwise(ends)
        ]
    chain, reader = _until_read(wait)
    with graph.inserting_before(wait):
        waited = [emit(WAIT, part) for part in parts]
    with graph.inserting_before(reader):
        joined = emit(JOIN_PARTS, waited, settings[0] if whole.target is ALL_GATHER else 1)
        result = emit(aten.view.default, joined, list(wait.meta["val"].shape))
    for node in chain:
        reader.prepend(node)
    wait.replace_all_uses_with(result)
    sent = operands(whole)[0]
    graph.erase_node(wait)
    graph.erase_node(whole)
    if not sent.users and sent.op != "placeholder":  # a cast of the shard: each part is cast by itself
        graph.erase_node(sent)
    return parts


def _piece(emit: GraphEmitter, whole: fx.Node, start: int, end: int) -> fx.Node:
    """What the part with some rows sends."""
    if whole.target is REDUCE_SCATTER:
        (sent,), shape = operands(whole), list(whole.meta["val"].shape)
        num_ranks = call_arguments(whole)["group_size"]
        rows = emit(aten.view.default, sent, [num_ranks, *shape])
        packed = emit(PACK, [emit(aten.slice.Tensor, rows, 1, start, end)], num_ranks)
        return emit(aten.view.default, packed, [num_ranks * (end - start), *shape[1:]])
    sent, cast = gathered_shard(whole) if whole.target is ALL_GATHER else (operands(whole)[0], None)
    rows = emit(aten.slice.Tensor, sent, 0, start, end)
    return rows if cast is None else emit(cast.target, rows, *cast.args[1:], **cast.kwargs)


def _until_read(wait: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The layout nodes made of a result before the first node that computes with it, and that node."""
    graph = wait.graph
    made: dict[fx.Node, None] = {wait: None}
    for node in graph.nodes:
        if any(source in made for source in node.all_input_nodes):
            if not is_layout(node):
                return list(made)[1:], node
            made[node] = None
    return list(made)[1:], graph.output_node()
