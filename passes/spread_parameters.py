"""spread_parameters: between forward and backward, keep a full parameter as pieces on few ranks.

For a unit with ``reshard_after_forward=k``, each rank of a group of k neighbours keeps one k-th of the gathered
parameter, and the backward gathers from those. That takes more memory than shards over all ranks, and uses faster
links. All nodes that depend on a gradient read the second gather, through views of their own.

Before (reshard=2 of 4 ranks)::

    %unshard_0: f32[8, 4] = unshard(%primals_1, ..., reshard=2, axis='shard', group_size=4)
    %permute_0: f32[4, 8]@(1,4) = permute(%unshard_0, [1, 0])
    %mm_0: f32[2, 8] = mm(%primals_3, %permute_0)
    %mm_1: f32[2, 4] = mm(%tangents_1, %unshard_0)

After::

    %unshard_0: f32[8, 4] = unshard(%primals_1, ..., reshard=2, axis='shard', group_size=4)
    %keep_piece_0: (f32[8, 4], f32[4, 4]) = keep_piece(%unshard_0, 0, 2, axis=shard/2)
    %getitem_0: f32[8, 4] = getitem(%keep_piece_0, 0)
    %getitem_1: f32[4, 4] = getitem(%keep_piece_0, 1)
    %permute_0: f32[4, 8]@(1,4) = permute(%getitem_0, [1, 0])
    %mm_0: f32[2, 8] = mm(%primals_3, %permute_0)
    %unshard_1: f32[8, 4] = unshard(%getitem_1, ..., reshard=2, axis='shard/2', group_size=2)
    %mm_1: f32[2, 4] = mm(%tangents_1, %unshard_1)

Numerics: bitwise exact.

Does not handle:

- parameters that no gradient needs: they are reported as skipped;
- graphs without a backward: nothing changes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.ir import KEEP_PIECE, UNSHARD, GraphEmitter, UnshardCall
from graphshard.pipeline import Fact, PassContext, PassReport, is_layout


@dataclass(frozen=True, kw_only=True)
class SpreadParameters:
    """See the module docstring; no options: each ``unshard`` node says over how many ranks."""

    name: ClassVar[str] = "spread_parameters"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.MERGED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "spread" parameters; one that no gradient needs is reported as skipped."""
        backward = _after_tangents(gm.graph)
        counts = {"spread": 0}
        skipped = []
        for node in list(gm.graph.find_nodes(op="call_function", target=UNSHARD)):
            call = UnshardCall(*node.args)
            if not call.reshard_group or not backward:
                continue
            if _regather(gm.graph, node, call, backward):
                counts["spread"] += 1
            else:
                skipped.append(f"no gradient needs {call.name}")
        return PassReport(changed=bool(counts["spread"]), counts=counts, skipped=tuple(skipped))


def _after_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a gradient of the outputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents_")
        if is_tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _regather(graph: fx.Graph, first: fx.Node, call: UnshardCall, backward: set[fx.Node]) -> bool:
    views = _views_of(first)
    readers = [
        (view, user) for view in views for user in view.users if user in backward and user.op != "output"
    ]
    if not readers:
        return False
    earliest = min(readers, key=lambda pair: _position(graph, pair[1]))[1]
    with graph.inserting_before(first.next):
        emit = GraphEmitter(graph, origin=first)
        kept = emit(KEEP_PIECE, first, call.dim, call.reshard, call.reshard_group)
        full, piece = emit(operator.getitem, kept, 0), emit(operator.getitem, kept, 1)
    with graph.inserting_before(earliest):
        emit = GraphEmitter(graph, origin=earliest)
        regathered = call._replace(
            shard=piece,
            dtype=None,
            reshard_group="",
            axis=f"{call.axis}/{call.reshard}",
            group_size=call.reshard,
            group_name=call.reshard_group,
            row_offset=-1,
        )
        copies = {first: emit(UNSHARD, *regathered)}
        for view in views[1:]:
            copies[view] = emit(
                view.target, *fx.map_arg(view.args, lambda node: copies.get(node, node)), **view.kwargs
            )
    for view, user in readers:
        user.replace_input_with(view, copies[view])
    first.replace_all_uses_with(full, delete_user_cb=lambda user: user is not kept)
    for view in reversed(views):
        for unused in (copies[view], view):
            if not unused.users and unused is not first:
                graph.erase_node(unused)
    return True


def _views_of(first: fx.Node) -> list[fx.Node]:
    """``first`` and what layout ops make of it alone, inputs first."""
    found = {first: None}
    pending = [first]
    while pending:
        for user in pending.pop(0).users:
            if user not in found and is_layout(user) and all(each in found for each in user.all_input_nodes):
                found[user] = None
                pending.append(user)
    return list(found)


def _position(graph: fx.Graph, node: fx.Node) -> int:
    return next(index for index, each in enumerate(graph.nodes) if each is node)
