"""Merges collectives into one, with the copies into and out of its bucket.

In a bucket of gathers, ``pack`` and ``unpack`` are ops of their own. Gathers of several dtypes are sent as bytes.
Shards that are neighbours in memory are sent in place (``join``), with no copy. The results of a bucket of reductions
are views of it. Reductions of the slices of one bucket are merged on that bucket, with no copy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from ..ir import (
    JOIN,
    PACK,
    REDUCE_SCATTERS,
    UNPACK,
    WAIT,
    GraphEmitter,
    RowPlace,
    are_neighbours,
    aten,
    call_arguments,
    dtypes_text,
    is_wait,
    operands,
    recompute_tags,
    stable_topological_sort,
    tensor_bytes,
)
from ..pipeline import KINDS, gathered_shard, is_layout


def merge_by_unit(
    gm: fx.GraphModule, keys: Mapping[fx.Node, tuple[str, ...]], places: Mapping[fx.Node, RowPlace]
) -> dict[str, int]:
    """Merges the collectives that have equal keys; returns the number of buckets of each kind.

    Args:
        gm: edited in place.
        keys: the unit of each collective, with what else must agree (:func:`graphshard.pipeline.bucket_keys`).
        places: where the shards of gathers lie in memory (:func:`graphshard.pipeline.row_places`).
    """
    groups: dict[tuple[str, ...], list[fx.Node]] = {}
    for node, key in keys.items():
        groups.setdefault(key, []).append(node)
    counts = {f"{kind} buckets": 0 for kind in KINDS.values() if kind != "hook"}
    for (kind, *_), members in groups.items():
        if len(members) == 1:
            continue
        if kind == "gather":
            merge_gathers(gm.graph, members, list(map(places.get, members)))
        else:
            merge_reductions(gm.graph, members)
        counts[f"{kind} buckets"] = counts.get(f"{kind} buckets", 0) + 1
    if any(counts.values()):
        stable_topological_sort(gm.graph)
    return counts


def merge_gathers(graph: fx.Graph, members: list[fx.Node], places: Sequence[RowPlace | None] = ()) -> fx.Node:
    """Merges gathers where the first of ``members`` stands; returns the gather of the bucket.

    Args:
        graph: edited in place.
        members: gathers of one group and settings, of any dtypes.
        places: where the shard of each lies in memory, None if unknown; left out, all are unknown.
    """
    _, group_size, *rest = call_arguments(members[0]).values()
    inputs = [_input_of(member) for member in members]
    for moved in _chains_to_shards(inputs):
        members[0].prepend(moved)
    with graph.inserting_before(members[0]):
        emit = GraphEmitter(graph, origin=members[0], extra_meta=recompute_tags(members[0]))
        bucket, sizes, indices = _joined(emit, members, places) or _packed(emit, inputs)
        dtypes = dtypes_text([emit.tensor(value).dtype for value in inputs])
        started = emit(members[0].target, bucket, group_size, *rest)
        gathered = emit(WAIT, started)
        unpacked = emit(UNPACK, gathered, group_size, sizes, *([dtypes] if dtypes else []))
        results = [
            _view(emit, emit(operator.getitem, unpacked, index), list(member.meta["val"].shape))
            for index, member in zip(indices, members, strict=True)
        ]
    _replace(graph, members, results)
    for value in inputs:
        if not value.users and value.op != "placeholder":  # a cast of one shard: the row is cast as a whole
            graph.erase_node(value)
    return started


def _packed(emit: GraphEmitter, inputs: list[fx.Node]) -> tuple[fx.Node, list[int], list[int]]:
    """The bucket, sizes and indices as :func:`_joined` gives them, made by copies."""
    packed = emit(PACK, inputs, 1)
    itemsize = emit.tensor(packed).dtype.itemsize
    sizes = [tensor_bytes(emit.tensor(value)) // itemsize for value in inputs]
    return packed, sizes, list(range(len(inputs)))


def _joined(
    emit: GraphEmitter, members: list[fx.Node], places: Sequence[RowPlace | None]
) -> tuple[fx.Node, list[int], list[int]] | None:
    """Neighbouring shards joined as they lie in memory, their sizes in that order, and the place of each member in it.

    None if the shards are no neighbours, or are cast in different ways.
    """
    casts = [cast for _, cast in map(gathered_shard, members)]
    ways = {(cast.target, cast.args[1:], *cast.kwargs.items()) if cast else () for cast in casts}
    if not are_neighbours(places) or len(ways) > 1:
        return None
    known = [(place, member) for place, member in zip(places, members, strict=True) if place is not None]
    row = sorted(known, key=lambda item: item[0].first)
    sizes = [place.numel for place, _ in row]
    index = {member: position for position, (_, member) in enumerate(row)}
    shards = [gathered_shard(member)[0] for _, member in row]
    joined = emit(JOIN, shards)
    if (cast := casts[0]) is not None:
        joined = emit(cast.target, joined, *cast.args[1:], **cast.kwargs)
    return joined, sizes, [index[member] for member in members]


def merge_reductions(graph: fx.Graph, members: list[fx.Node]) -> fx.Node:
    """Merges reductions where the last of ``members`` stands; returns the reduction of the bucket."""
    _, *arguments = call_arguments(members[0]).values()
    inputs = [_input_of(member) for member in members]
    target = members[0].target
    num_rows = arguments[1] if target in REDUCE_SCATTERS else 1
    with graph.inserting_before(members[-1]):
        emit = GraphEmitter(graph, origin=members[-1])
        whole = _bucket_of_slices(inputs) if num_rows == 1 else None
        packed = whole if whole is not None else emit(PACK, inputs, num_rows)
        started = emit(target, packed, *arguments)
        reduced = emit(WAIT, started)
        results = []
        end = 0
        for member in members:
            start, end = end, end + member.meta["val"].numel()
            piece = emit(aten.slice.Tensor, reduced, 0, start, end)
            results.append(_view(emit, piece, list(member.meta["val"].shape)))
    _replace(graph, members, results)
    return started


def _input_of(member: fx.Node) -> fx.Node:
    (value,) = operands(member)
    return value


def _bucket_of_slices(pieces: list[fx.Node]) -> fx.Node | None:
    """The 1-D bucket that ``pieces`` cover, in order and without gaps; None if there is none."""
    end = 0
    buckets = []
    for piece in pieces:
        cut = piece.all_input_nodes[0] if piece.target is aten.view.default else piece
        if cut.target is not aten.slice.Tensor or tuple(cut.args[1:3]) != (0, end):
            return None
        buckets.append(cut.args[0])
        end = cut.args[3]
    is_whole = len(set(buckets)) == 1 and list(buckets[0].meta["val"].shape) == [end]
    return buckets[0] if is_whole else None


def _view(emit: GraphEmitter, value: fx.Node, shape: list[int]) -> fx.Node:
    return value if list(emit.tensor(value).shape) == shape else emit(aten.view.default, value, shape)


def _chains_to_shards(values: list[fx.Node]) -> list[fx.Node]:
    """The layout nodes between shards and ``values``, inputs first."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if is_layout(node) and node not in found:
            for source in node.all_input_nodes:
                visit(source)
            found[node] = None

    for value in values:
        visit(value)
    return list(found)


def _replace(graph: fx.Graph, members: list[fx.Node], results: list[fx.Node]) -> None:
    for member, result in zip(members, results, strict=True):
        for wait in [user for user in member.users if is_wait(user)]:
            wait.replace_all_uses_with(result)
            graph.erase_node(wait)
        graph.erase_node(member)
