"""From the graph of whole tensors to the graph of one rank.

The graph is read as a *program* that every rank of an axis runs on whole tensors. Its reshards say where the program
itself has pieces: a parameter before its reshard to ``Replicate``, a gradient behind its reshard to ``Shard``. There
the placement is fixed. Everywhere else a value gets the placement that costs the least communication at hand, and the
program's reshards disappear.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .._compat import detect_fake_mode, tree_leaves
from ..errors import UnsupportedShardingError
from ..ir import (
    KEEP_PIECE,
    REDUCE_GRAD,
    REPLICATE,
    RESHARD,
    SPREAD,
    UNSHARD,
    GraphEmitter,
    ReshardCall,
    aten,
    bytes_sent,
    cut_dim,
    fake_result,
    is_collective,
    is_view,
    is_wait,
    local_shape,
    placement_text,
    recompute_tags,
    tensors_of,
)
from ..units import size_text
from .added_rows import AddedRows, added_rows
from .rules import CASTS, OpRules, Verdict, reads_type_alone
from .sent_bytes import Progress
from .values import PlacedValue

_WHOLE = Replicate()

#: Views without sizes among their arguments.
_TRANSPOSES = (aten.permute.default, aten.transpose.int, aten.t.default)


class LocalGraph:
    """Rewrites one graph in place.

    Args:
        graph: the graph of whole tensors.
        any_call: a reshard of it; axis, group and rank are those of all.
    """

    def __init__(self, graph: fx.Graph, any_call: ReshardCall) -> None:
        self._graph = graph
        self._call = any_call._replace(placed=True)
        self._rules = OpRules(any_call.group_size, any_call.rank)
        self._values: dict[fx.Node, PlacedValue] = {}
        self._moved: dict[tuple[fx.Node, str], fx.Node] = {}
        self._masks: dict[tuple[fx.Node, int, int], tuple[fx.Node, fx.Node]] = {}
        self._gathered: Counter[str] = Counter()
        self._pieces = _pieces_of_program(graph)
        self._sizes = {
            node.meta["val"].node.expr: node
            for node in graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("val"), torch.SymInt)
        }

    def write(self) -> None:
        """Gives each value a placement, in the order of the graph, and makes its call a call on pieces.

        Raises:
            UnsupportedShardingError: a value would be cut along a symbolic size.
        """
        inputs = [node.meta.get("val") for node in self._graph.find_nodes(op="placeholder")]
        with detect_fake_mode(inputs) or nullcontext():
            self._place_all()
        for node in reversed(self._graph.find_nodes(op="call_function", target=RESHARD)):
            if not node.users:
                self._graph.erase_node(node)

    def _place_all(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "output":
                node.args = fx.node.map_arg(node.args, lambda each, at=node: self._of_program(each, at))
            elif _is_declared(node):
                self._values[node] = self._declared(node)
            elif node.op == "call_function":
                self._values[node] = self._compute(node)
            else:
                self._values[node] = self._as_it_is(node)

    def counts(self) -> dict[str, int]:
        """Numbers for the report."""
        nodes = self._graph.find_nodes(op="call_function", target=RESHARD)
        sent = [bytes_sent(ReshardCall(*node.args), node.meta["val"].dtype) or 0 for node in nodes]
        return {"reshards": len(nodes), "bytes": sum(sent), "calls gathered": sum(self._gathered.values())}

    def gathered(self) -> list[str]:
        """The calls whose inputs are gathered for want of a rule, with the reason and the bytes."""
        return [f"{text}, {count} times" if count > 1 else text for text, count in self._gathered.items()]

    def _declared(self, node: fx.Node) -> PlacedValue:
        """A reshard of the program. Its pieces are a placement of the whole tensor, and that is all they are."""
        call = ReshardCall(*node.args)
        value, dst = self._values[call.value], _parsed(call.dst)
        if call.dst == REPLICATE and call.src != REPLICATE:
            return PlacedValue(node=value.node, placement=value.placement, whole=node.meta["val"])
        moved = self._moved_to(value, dst, node)
        return PlacedValue(node=moved, placement=dst, whole=value.whole, is_local=call.dst != REPLICATE)

    def _compute(self, node: fx.Node) -> PlacedValue:
        tensors = {
            source: self._values[source]
            for source in node.all_input_nodes
            if tensors_of(self._values[source].whole)
        }
        if node.target is operator.getitem and node.args[0] in tensors:
            return self._item(node, tensors[node.args[0]])
        if node in self._pieces or _depends_on_rank(node) or any(each.is_local for each in tensors.values()):
            for source in tensors:
                self._replace(node, source, self._of_program(source, node))
            return self._as_it_is(node)
        if (rows := added_rows(node, tensors, self._call.group_size)) is not None:
            return self._add_own(node, tensors, rows)
        if all(each.is_replicated for each in tensors.values()):
            return self._on_whole(node, tensors)
        whole = [each for each, value in tensors.items() if (value.node, REPLICATE) in self._moved]
        verdict = self._rules.verdict(node, tensors, Progress(placed=self._values, whole=whole))
        placed = self._on_pieces(node, tensors, verdict)
        if placed is None:
            verdict = self._rules.gathered(node, tensors, "cannot run on pieces")
            placed = self._on_pieces(node, tensors, verdict)
        assert placed is not None, "an op runs on the whole tensors that it was traced with"
        if verdict.reason:
            self._tell(node, tensors, verdict.reason)
        return placed

    def _on_whole(self, node: fx.Node, tensors: Mapping[fx.Node, PlacedValue]) -> PlacedValue:
        """A call on whole tensors. Those that were gathered may lie in memory otherwise than they were traced."""
        whole = node.meta.get("val")
        for source, value in tensors.items():
            self._replace(node, source, value.node)
        if any(_lies_otherwise(value) for value in tensors.values()) and isinstance(node.target, OpOverload):
            typed = self._retype(node, _WHOLE, whole)
            assert typed, f"{node.target} runs on the whole tensors that it was traced with"
        return PlacedValue(node=node, placement=_WHOLE, whole=whole)

    def _as_it_is(self, node: fx.Node) -> PlacedValue:
        """A value that the program has: whole, or in pieces."""
        value = node.meta.get("val")
        if node not in self._pieces:
            return PlacedValue(node=node, placement=_WHOLE, whole=value)
        call = self._pieces[node]
        if call is None:
            return PlacedValue(node=node, placement=_WHOLE, whole=value, is_local=True)
        shape = fx.node.map_arg(call.shape, lambda size: size.meta["val"])
        return PlacedValue(
            node=node, placement=_parsed(call.src), whole=value.new_empty(shape), is_local=True
        )

    def _item(self, node: fx.Node, of: PlacedValue) -> PlacedValue:
        whole, index = node.meta.get("val"), node.args[1]
        placement = of.placement[index] if isinstance(of.placement, (tuple, list)) else of.placement
        self._replace(node, node.args[0], of.node)
        node.meta["val"] = of.node.meta["val"][index]
        return PlacedValue(
            node=node,
            placement=placement or _WHOLE,
            whole=whole,
            is_local=of.is_local or node in self._pieces,
        )

    def _on_pieces(
        self, node: fx.Node, tensors: Mapping[fx.Node, PlacedValue], verdict: Verdict
    ) -> PlacedValue | None:
        """Makes a call run on pieces; None, and the call as it was, if it cannot."""
        target, args, whole = node.target, node.args, node.meta.get("val")
        given = [each for each in tree_leaves(_plain(args)) if isinstance(each, fx.Node) and each in tensors]
        wanted = [each for each in tree_leaves(_plain(verdict.args)) if isinstance(each, Placement)]
        if reads_type_alone(node):
            moved = iter([self._of_type(tensors[each], node) for each in given])
        else:
            pairs = zip(given, wanted, strict=True)
            moved = iter([self._moved_to(tensors[source], placement, node) for source, placement in pairs])
        placed = fx.node.map_aggregate(
            tuple(verdict.args), lambda each: next(moved) if isinstance(each, Placement) else each
        )
        node.target = verdict.target
        outside = None
        if verdict.masked is not None:
            place = verdict.masked.position
            outside, own = self._own_rows(placed[place], verdict.masked.start, verdict.masked.size, node)
            placed = (*placed[:place], own, *placed[place + 1 :])
        node.args = placed
        for source in [
            each for each in node.kwargs.values() if isinstance(each, fx.Node) and each in tensors
        ]:
            self._replace(node, source, self._moved_to(tensors[source], _WHOLE, node))
        if not self._retype(node, verdict.outputs, whole):
            node.target, node.args, node.meta["val"] = target, args, whole
            return None
        result = node if outside is None else self._without_rows(node, outside)
        return PlacedValue(node=result, placement=verdict.outputs, whole=whole)

    def _retype(self, node: fx.Node, outputs: Any, whole: Any) -> bool:
        """Types a call for its new arguments; False if it rejects them, or gives no piece of what it gave."""
        try:
            value = fake_result(node.target, node.args, node.kwargs)
        except Exception:
            if not is_view(node) or node.args[0].meta["val"].is_contiguous():
                return False
            with self._graph.inserting_before(node):  # strides of a piece may allow no view
                emit = self._emitter(node.args[0])
                copied = emit(aten.clone.default, node.args[0], memory_format=torch.contiguous_format)
            node.args = (copied, *node.args[1:])
            return self._retype(node, outputs, whole)
        if not self._are_pieces(value, outputs, whole):
            return False
        node.meta["val"] = value
        return True

    def _are_pieces(self, value: Any, outputs: Any, whole: Any) -> bool:
        if isinstance(whole, (tuple, list)):
            each = outputs if isinstance(outputs, (tuple, list)) else [outputs] * len(whole)
            return len(value) == len(whole) == len(each) and all(map(self._are_pieces, value, each, whole))
        if not isinstance(whole, torch.Tensor) or not isinstance(outputs, Placement):
            return True
        expected = local_shape(whole.shape, placement_text(outputs), self._call.group_size, self._call.rank)
        pairs = zip(value.shape, expected, strict=True) if value.ndim == len(expected) else ((0, 1),)
        return all(one == other for one, other in pairs if isinstance(one, int) and isinstance(other, int))

    def _add_own(self, node: fx.Node, tensors: Mapping[fx.Node, PlacedValue], rows: AddedRows) -> PlacedValue:
        """Adds rows into what this rank holds of a table."""
        whole, cut = node.meta["val"], Shard(rows.dim)
        cut_values = Shard(rows.values_dim) if rows.values_dim is not None else _WHOLE
        mask = None if rows.mask is None else self._moved_to(tensors[rows.mask], _WHOLE, node)
        indices = self._moved_to(tensors[rows.indices], _WHOLE, node)
        values = self._moved_to(tensors[rows.values], cut_values, node)
        ranks, rank = self._call.group_size, self._call.rank
        shape = local_shape(whole.shape, placement_text(cut), ranks, rank)
        if rows.dim == 0:
            start = rank * -(-whole.shape[0] // ranks)
            outside, indices = self._own_rows(indices, start, shape[0], node)
        with self._graph.inserting_before(node):
            emit = self._emitter(node)
            fill = node.args[0].args[1] if node.args[0].target is aten.full.default else 0
            table = emit(aten.full.default, shape, fill, dtype=whole.dtype, device=whole.device)
            if rows.dim == 0:
                mask, values = self._add_inside(emit, outside, mask, values)
        rest = ([indices], values, True) if mask is None else (mask, [indices], values)
        node.args, zeros = (table, *rest), node.args[0]
        if not zeros.users:
            self._graph.erase_node(zeros)
        typed = self._retype(node, cut, whole)
        assert typed, f"{node.target} adds into pieces of a table as into the whole"
        return PlacedValue(node=node, placement=cut, whole=whole)

    def _add_inside(
        self, emit: GraphEmitter, outside: fx.Node, mask: fx.Node | None, values: fx.Node
    ) -> tuple[fx.Node | None, fx.Node]:
        """Mask and values of rows that are added, without those ``outside``; zeros in their place without a mask."""
        if mask is None:
            outside = _with_dims_of(values, outside, emit)
            return None, emit(aten.where.self, outside, self._zero(emit, values), values)
        inside = _with_dims_of(mask, emit(aten.bitwise_not.default, outside), emit)
        return emit(aten.bitwise_and.Tensor, mask, inside), values

    def _own_rows(self, indices: fx.Node, start: int, size: int, reader: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Where indices are not of this rank's rows, and the indices from its first row on; others become 0."""
        key = (indices, start, size)
        if key not in self._masks:
            with self._graph.inserting_before(reader):
                emit = self._emitter(reader)
                shifted = emit(aten.sub.Tensor, indices, start)
                below, above = emit(aten.lt.Scalar, shifted, 0), emit(aten.ge.Scalar, shifted, size)
                outside = emit(aten.bitwise_or.Tensor, below, above)
                zero = self._zero(emit, shifted)
                self._masks[key] = (outside, emit(aten.where.self, outside, zero, shifted))
        return self._masks[key]

    def _without_rows(self, node: fx.Node, outside: fx.Node) -> fx.Node:
        """Zeros in place of what a call selected by indices of other ranks' rows."""
        emit = self._emitter(node)
        with self._graph.inserting_after(node):
            zero = self._zero(emit, node)
        last = zero
        if node.meta["val"].ndim > outside.meta["val"].ndim:
            with self._graph.inserting_after(last):
                outside = last = emit(aten.unsqueeze.default, outside, -1)
        with self._graph.inserting_after(last):
            return emit(aten.where.self, outside, zero, node)

    def _zero(self, emit: GraphEmitter, like: fx.Node) -> fx.Node:
        value = like.meta["val"]
        return emit(aten.full.default, [], 0, dtype=value.dtype, device=value.device)

    def _moved_to(self, value: PlacedValue, placement: Placement, reader: fx.Node) -> fx.Node:
        """What this rank holds of a value in another placement; one reshard, in front of the first reader."""
        if value.placement == placement or (isinstance(placement, Replicate) and value.is_replicated):
            return value.node
        src, dst = placement_text(value.placement), placement_text(placement)
        if (value.node, dst) not in self._moved and isinstance(placement, Replicate):
            self._gather_in_front(value, reader)
        if (value.node, dst) not in self._moved:
            call = self._call._replace(
                value=value.node, src=src, dst=dst, shape=self._shape(value.whole, src, dst)
            )
            with self._graph.inserting_before(reader):
                self._moved[value.node, dst] = self._emitter(value.node)(RESHARD, *call)
        return self._moved[value.node, dst]

    def _gather_in_front(self, value: PlacedValue, reader: fx.Node) -> None:
        """Gathers in place of a value the one that it is made of, where others read that too or it is smaller."""
        node = value.node
        if not isinstance(value.placement, Shard) or node.target not in (*_TRANSPOSES, *CASTS):
            return
        base = self._values.get(node.args[0])
        if base is None or base.node is not node.args[0] or base.is_local:
            return
        is_wider = value.whole.dtype.itemsize > base.whole.dtype.itemsize
        if is_wider if node.target in CASTS else len(base.node.users) > 1:
            whole = self._moved_to(base, _WHOLE, reader)
            with self._graph.inserting_before(reader):
                again = self._emitter(node)(node.target, whole, *node.args[1:], **node.kwargs)
            self._moved[node, REPLICATE] = again

    def _of_program(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """The value that the program has there: whole, or its own pieces."""
        value = self._values[source]
        return value.node if value.is_local or value.is_replicated else self._moved_to(value, _WHOLE, reader)

    def _of_type(self, value: PlacedValue, reader: fx.Node) -> fx.Node:
        """A tensor of the type of the whole one, for an op that reads nothing else of it."""
        with self._graph.inserting_before(reader):
            emit, whole = self._emitter(reader), value.whole
            shape = self._shape(whole)
            return emit(aten.full.default, shape, 0, dtype=whole.dtype, device=whole.device)

    def _shape(self, whole: torch.Tensor, *placements: str) -> list[Any]:
        """Sizes of a whole tensor as arguments of a call: numbers, and inputs that are symbolic sizes."""
        cut = {cut_dim(each) for each in placements}
        shape: list[Any] = []
        for dim, size in enumerate(whole.shape):
            known = self._sizes.get(size.node.expr) if isinstance(size, torch.SymInt) else size
            if known is None or (dim in cut and not isinstance(size, int)):
                raise UnsupportedShardingError(
                    f"propagate_sharding: dim {dim} of a value of shape {list(whole.shape)} would be cut over "
                    f"{self._call.axis}={self._call.group_size} or computed there, but its size is symbolic: mark it "
                    "as static, or compile with dynamic=False"
                )
            shape.append(known)
        return shape

    def _emitter(self, origin: fx.Node) -> GraphEmitter:
        return GraphEmitter(self._graph, origin=origin, extra_meta=recompute_tags(origin))

    def _replace(self, node: fx.Node, old: fx.Node, new: fx.Node) -> None:
        if old is not new:
            node.replace_input_with(old, new)

    def _tell(self, node: fx.Node, tensors: Mapping[fx.Node, PlacedValue], reason: str) -> None:
        sent = 0
        for value in tensors.values():
            if isinstance(value.placement, (Shard, Partial)) and not reads_type_alone(node):
                src = placement_text(value.placement)
                call = self._call._replace(src=src, dst=REPLICATE, shape=list(value.whole.shape))
                sent += bytes_sent(call, value.whole.dtype) or 0
        place = _module_of(node)
        where = f" in {place}" if place else ""
        self._gathered[f"{node.target}{where} {reason}: its inputs are gathered ({size_text(sent)})"] += 1


def _lies_otherwise(value: PlacedValue) -> bool:
    now, traced = tensors_of(value.node.meta["val"]), tensors_of(value.whole)
    return any(one.stride() != other.stride() for one, other in zip(now, traced, strict=True))


def _is_declared(node: fx.Node) -> bool:
    return node.target is RESHARD and not ReshardCall(*node.args).placed


def _pieces_of_program(graph: fx.Graph) -> dict[fx.Node, ReshardCall | None]:
    """The values that the program has in pieces, with the reshard that reads each.

    They are what a reshard from ``Shard`` or ``Partial`` reads, back to where it comes from; None for what lies before.
    """
    found: dict[fx.Node, ReshardCall | None] = {}
    for node in filter(_is_declared, graph.find_nodes(op="call_function", target=RESHARD)):
        call = ReshardCall(*node.args)
        if call.src == REPLICATE or _is_declared(call.value):
            continue
        found[call.value] = call
        before = [call.value]
        for each in before:  # grows on the way
            if each.op != "call_function" or _depends_on_rank(each):
                continue
            for source in each.all_input_nodes:
                if not _is_declared(source) and source not in found:
                    found[source] = None
                    before.append(source)
    return found


def _depends_on_rank(node: fx.Node) -> bool:
    """Whether a call means the same on every rank only if it stays as it is."""
    return node.target in (UNSHARD, REDUCE_GRAD, SPREAD, KEEP_PIECE) or is_collective(node) or is_wait(node)


def _parsed(placement: str) -> Placement:
    dim = cut_dim(placement)
    if dim is not None:
        return Shard(dim)
    return _WHOLE if placement == REPLICATE else Partial(placement[8:-1])


def _plain(value: Any) -> Any:
    """Immutable lists of FX as plain ones, which pytree knows."""
    return (
        [_plain(each) for each in value]
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )


def _module_of(node: fx.Node) -> str:
    """Path of the module that a call was traced in; "" if that is not known."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("L['self'].").replace("._modules['", ".").replace("']", "")


def _with_dims_of(like: fx.Node, node: fx.Node, emit: GraphEmitter) -> fx.Node:
    """``node`` with dims of size 1 behind its own, as many in all as ``like`` has."""
    while node.meta["val"].ndim < like.meta["val"].ndim:
        node = emit(aten.unsqueeze.default, node, -1)
    return node
