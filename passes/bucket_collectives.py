"""bucket_collectives: one gather and one reduction per unit, dtype and group in each graph.

Gathers of a unit are merged where the first of them stands; reductions where the last gradient of
the unit is ready. All-reduces over copies of the shards are merged on the reduce-scattered bucket
itself. A bucket of one is left alone: its collective reads and writes the parameter's
own layout, with no copy. In a larger bucket the copies are ops of their own: ``pack`` into the
bucket and, after a gather, ``unpack`` out of it. After a reduction the pieces are views of the bucket.

Before (two parameters of one unit)::

    %all_gather_into_tensor_0: f32[8, 4] = all_gather_into_tensor(%primals_1, 2, axis=shard)
    %wait_tensor_0: f32[8, 4] = wait_tensor(%all_gather_into_tensor_0)
    %all_gather_into_tensor_1: f32[8] = all_gather_into_tensor(%primals_2, 2, axis=shard)
    %wait_tensor_1: f32[8] = wait_tensor(%all_gather_into_tensor_1)

After::

    %pack_0: f32[20] = pack([%primals_1, %primals_2], 1)
    %all_gather_into_tensor_0: f32[40] = all_gather_into_tensor(%pack_0, 2, axis=shard)
    %wait_tensor_0: f32[40] = wait_tensor(%all_gather_into_tensor_0)
    %unpack_0: (f32[32], f32[8]) = unpack(%wait_tensor_0, 2, [16, 4])
    %getitem_0: f32[32] = getitem(%unpack_0, 0)
    %view_0: f32[8, 4] = view(%getitem_0, [8, 4])
    %getitem_1: f32[8] = getitem(%unpack_0, 1)

Numerics: bitwise exact for gathers; a reduction keeps each element's operands, and their order as
far as the process group's algorithm does not depend on the size or the position in the buffer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from graphshard.buckets import PACK, UNPACK
from graphshard.collectives import REDUCE_SCATTERS, WAIT, aten, is_collective, is_wait, operands, short_name
from graphshard.context import PassContext
from graphshard.errors import OptionError
from graphshard.facts import Fact
from graphshard.pipeline import PassReport
from graphshard.provenance import KINDS, bucket_keys, is_layout
from graphshard.rewrite import GraphEmitter, stable_topological_sort


@dataclass(frozen=True, kw_only=True)
class BucketCollectives:
    """See the module docstring.

    Attributes:
        by: "unit" merges the collectives of one ``fully_shard`` unit.
    """

    name: ClassVar[str] = "bucket_collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})

    by: str = "unit"

    def __post_init__(self) -> None:
        if self.by != "unit":
            raise OptionError(f"bucket_collectives: by={self.by!r} is unknown; known: 'unit'")

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gather buckets", "reduction buckets", "all-reduce buckets" and, if any, "hook buckets"."""
        keys = bucket_keys(gm, ctx)
        groups: dict[tuple[str, ...], list[fx.Node]] = {}
        for node, key in keys.items():
            groups.setdefault(key, []).append(node)
        skipped = [
            f"{node.name} ({short_name(node)}) serves no single unit"
            for node in gm.graph.nodes
            if is_collective(node) and node not in keys
        ]
        counts = {f"{kind} buckets": 0 for kind in KINDS.values() if kind != "hook"}
        for (kind, *_), members in groups.items():
            if len(members) == 1:
                continue
            (_merge_gathers if kind == "gather" else _merge_reductions)(gm.graph, members)
            counts[f"{kind} buckets"] = counts.get(f"{kind} buckets", 0) + 1
        changed = any(counts.values())
        if changed:
            stable_topological_sort(gm.graph)
        return PassReport(changed=changed, counts=counts, skipped=tuple(skipped))


def _merge_gathers(graph: fx.Graph, members: list[fx.Node]) -> None:
    _, group_size, *rest = members[0].args
    inputs = [_input_of(member) for member in members]
    for moved in _chains_to_shards(inputs):
        members[0].prepend(moved)
    with graph.inserting_before(members[0]):
        emit = GraphEmitter(graph, origin=members[0], extra_meta=_tags(members[0]))
        sizes = [emit.tensor(value).numel() for value in inputs]
        gathered = emit(WAIT, emit(members[0].target, emit(PACK, inputs, 1), group_size, *rest))
        unpacked = emit(UNPACK, gathered, group_size, sizes)
        results = [
            _view(emit, emit(operator.getitem, unpacked, index), list(member.meta["val"].shape))
            for index, member in enumerate(members)
        ]
    _replace(graph, members, results)


def _merge_reductions(graph: fx.Graph, members: list[fx.Node]) -> None:
    _, *arguments = members[0].args
    inputs = [_input_of(member) for member in members]
    target = members[0].target
    num_rows = arguments[1] if target in REDUCE_SCATTERS else 1
    with graph.inserting_before(members[-1]):
        emit = GraphEmitter(graph, origin=members[-1])
        whole = _bucket_of_slices(inputs) if num_rows == 1 else None
        packed = whole if whole is not None else emit(PACK, inputs, num_rows)
        reduced = emit(WAIT, emit(target, packed, *arguments))
        results = []
        end = 0
        for member in members:
            start, end = end, end + member.meta["val"].numel()
            piece = emit(aten.slice.Tensor, reduced, 0, start, end)
            results.append(_view(emit, piece, list(member.meta["val"].shape)))
    _replace(graph, members, results)


def _input_of(member: fx.Node) -> fx.Node:
    (value,) = operands(member)
    return value


def _bucket_of_slices(pieces: list[fx.Node]) -> fx.Node | None:
    """The 1-D bucket that ``pieces`` are slices of, one after the other, and nothing else; else None."""
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


def _tags(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("recompute", "ac_graph_id") if key in node.meta}
