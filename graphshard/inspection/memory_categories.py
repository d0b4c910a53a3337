"""Categorizes the buffers of a forward or backward graph by its data flow.

The category of a buffer follows from its producer and its readers: full parameters come out of gathers of inputs, full
gradients flow into reductions and nowhere else, activations leave the forward. The only names that are interpreted are
those of the inputs of a backward, which the partitioner gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from ..ir import GATHERS, JOIN_PARTS, UNPACK, is_collective, is_wait, output_values, stored_bytes
from ..memory import Buffer, MemoryModel, held_tensors, kept_inputs
from ..pipeline import PassContext, is_accumulation, is_layout
from ..report import CATEGORIES

Bytes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CategorizedMemory:
    """Live bytes by category over the nodes of one graph.

    Attributes:
        nodes: the nodes, in the order of the graph.
        live: for each node the live bytes by category (in the order of :data:`graphshard.report.data.CATEGORIES`),
            inputs that the caller keeps included.
        kept: the bytes of these inputs.
        outputs: category of each output; "" for an output that is no tensor, or an input.
        output_buffers: a number for the memory of each output, equal for shared memory; -1 for memory of an input, or
            none.
        output_bytes: size of that memory, of which an output may be a view; 0 if there is none.
    """

    nodes: tuple[fx.Node, ...]
    live: tuple[Bytes, ...]
    kept: Bytes
    outputs: tuple[str, ...]
    output_buffers: tuple[int, ...]
    output_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMemory:
    """Memory that a backward takes over from its forward.

    Attributes:
        names: inputs of the backward in this memory; the last of them to be read frees it.
        num_bytes: its size; 0 if it belongs to an input that the caller keeps.
    """

    names: tuple[str, ...]
    num_bytes: int


def categorized_memory(
    gm: fx.GraphModule,
    ctx: PassContext,
    *,
    device_type: str | None,
    saved: Mapping[str, str] | None = None,
    num_results: int | None = None,
    saved_memory: Sequence[SavedMemory] = (),
) -> CategorizedMemory:
    """The memory of a graph in its own order.

    Args:
        gm: a forward, inference or backward graph with collectives.
        ctx: its parameters, the scratch of its kernels and, for a backward, the positions of its gradients.
        device_type: device type that it will run on; None for that of its values.
        saved: for a backward, the category of each saved input, by name.
        num_results: for a forward, the number of outputs that are results; the others are saved for the backward.
        saved_memory: for a backward, the memory of these inputs; an input that is not named has memory of its own.
    """
    kept = kept_inputs(gm)
    model = MemoryModel(gm, kept=kept, device_type=device_type, scratch=ctx.scratch)
    _take_over(gm, model, saved_memory)
    is_whole_forward = ctx.first_gradient is None and bool(ctx.parameters)
    flow = _Flow(gm.graph, set(kept), reduces=not is_whole_forward, held=_held(gm.graph, ctx))
    order = list(gm.graph.nodes)
    category_of: dict[Buffer, str] = {}
    ranges = model.ranges(order)
    for _, _, buffer in ranges:
        category_of[buffer] = flow.category(buffer, saved or {})
    values = output_values(gm.graph)
    gradients = {ctx.gradient_of(binding, values) for binding in ctx.parameters}
    for index, value in enumerate(values):
        if not isinstance(value, fx.Node):
            continue
        is_saved = num_results is not None and index >= num_results
        for buffer in model.buffers_of(value):
            if value in gradients or (not ctx.parameters and flow.is_reduced(value)):
                category_of[buffer] = "gradients"
            elif is_saved and category_of.get(buffer, "temporaries") == "temporaries":
                category_of[buffer] = "activations"
    number = {id(buffer): index for index, (_, _, buffer) in enumerate(ranges)}
    kept_bytes = _kept_bytes(gm, kept, ctx, flow)
    changes = [[0] * (len(order) + 1) for _ in CATEGORIES]
    for start, end, buffer in ranges:
        row = changes[CATEGORIES.index(category_of[buffer])]
        row[start] += buffer.num_bytes
        row[end + 1] -= buffer.num_bytes
    rows = [list(itertools.accumulate(row, initial=base))[1:-1]
            for row, base in zip(changes, kept_bytes, strict=True)]  # fmt: skip
    return CategorizedMemory(
        nodes=tuple(order),
        live=tuple(zip(*rows, strict=True)),
        kept=kept_bytes,
        outputs=tuple(_output_category(value, model, category_of) for value in values),
        output_buffers=tuple(_output_buffer(value, model, number) for value in values),
        output_bytes=tuple(_output_bytes(value, model, number) for value in values),
    )


def kept_bytes_by_category(gm: fx.GraphModule, ctx: PassContext) -> Bytes:
    """Bytes of the inputs that the caller keeps: ``categorized_memory(gm, ctx).kept`` alone."""
    kept = kept_inputs(gm)
    return _kept_bytes(gm, kept, ctx, _Flow(gm.graph, set(kept), reduces=False))


def _kept_bytes(gm: fx.GraphModule, kept: Sequence[fx.Node], ctx: PassContext, flow: _Flow) -> Bytes:
    found = [0] * len(CATEGORIES)
    bound = {binding.placeholder for binding in (*ctx.parameters, *ctx.pieces)} | ctx.held
    for node in kept:
        is_parameter = node.name in bound or (not ctx.parameters and flow.is_gathered(node))
        category = "parameters" if is_parameter else "inputs"
        found[CATEGORIES.index(category)] += stored_bytes(node.meta.get("val"))
    for value in held_tensors(gm).values():
        category = "parameters" if isinstance(value, nn.Parameter) else "inputs"
        found[CATEGORIES.index(category)] += stored_bytes(value)
    return tuple(found)


def _held(graph: fx.Graph, ctx: PassContext) -> set[fx.Node]:
    """The inputs of which gather extensions make what is gathered."""
    names = {name for binding in ctx.parameters for name in binding.held}
    return {node for node in graph.find_nodes(op="placeholder") if node.name in names} if names else set()


def _take_over(gm: fx.GraphModule, model: MemoryModel, memory: Sequence[SavedMemory]) -> None:
    """Joins inputs that share memory into one buffer: the first holds the bytes until all are read."""
    inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    for each in memory:
        known = [inputs[name] for name in each.names if name in inputs]
        buffers = list(dict.fromkeys(buffer for node in known for buffer in model.buffers_of(node)))
        for buffer in buffers:
            buffer.num_bytes = 0
        if buffers:
            buffers[0].num_bytes = each.num_bytes
            buffers[0].readers.extend(reader for buffer in buffers[1:] for reader in buffer.readers)


def _output_buffer(value: object, model: MemoryModel, number: Mapping[int, int]) -> int:
    buffers = model.buffers_of(value) if isinstance(value, fx.Node) else ()
    return number.get(id(buffers[0]), -1) if buffers else -1


def _output_bytes(value: object, model: MemoryModel, number: Mapping[int, int]) -> int:
    is_own = _output_buffer(value, model, number) >= 0
    return model.buffers_of(value)[0].num_bytes if isinstance(value, fx.Node) and is_own else 0


def _output_category(value: object, model: MemoryModel, category_of: Mapping[Buffer, str]) -> str:
    buffers = model.buffers_of(value) if isinstance(value, fx.Node) else ()
    return category_of.get(buffers[0], "") if buffers else ""


class _Flow:
    """The data flow of parameters and gradients: full parameters, values on the way to a reduction, reduced values.

    What is computed of ``held`` inputs alone is a part of a shard. What is computed of gathered parts alone is a full
    parameter.
    """

    def __init__(
        self, graph: fx.Graph, kept: set[fx.Node], *, reduces: bool, held: set[fx.Node] | None = None
    ) -> None:
        self._parts: set[fx.Node] = set(held or ())
        self._of_parts: set[fx.Node] = set(self._parts)
        self._from_inputs: set[fx.Node] = kept | self._parts
        self._gathered: set[fx.Node] = set()
        self._reduced: set[fx.Node] = set()
        self._to_reduction: set[fx.Node] = set()
        nodes = list(graph.nodes)
        for node in nodes:
            self._follow_inputs(node)
        if reduces:
            self._find_reductions(nodes)

    def _follow_inputs(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        if node.target in GATHERS and all(source in self._from_inputs for source in sources):
            self._gathered.add(node)
        elif sources and (is_wait(node) or is_layout(node) or node.target is JOIN_PARTS):
            for found in (self._from_inputs, self._gathered):
                if all(source in found for source in sources):
                    found.add(node)
        if self._parts:
            self._follow_parts(node, sources)

    def _follow_parts(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        if node.op != "call_function" or not sources or not self._of_parts.issuperset(sources):
            return
        self._of_parts.add(node)
        is_part = self._parts.issuperset(sources)
        if is_part and node.target not in GATHERS:
            self._parts.add(node)
            self._from_inputs.add(node)
        elif not is_collective(node):
            self._gathered.add(node)

    def _find_reductions(self, nodes: Sequence[fx.Node]) -> None:
        """Finds reductions whose results reach the outputs through waits, layout nodes and sums with inputs alone."""
        behind: set[fx.Node] = set()
        for node in nodes:
            if is_collective(node) and node.target not in GATHERS:
                behind.add(node)
            elif is_wait(node) or is_layout(node) or is_accumulation(node) or node.target is JOIN_PARTS:
                behind.update([node] if any(source in behind for source in node.all_input_nodes) else [])
        for node in reversed(nodes):
            if node in behind and any(user.op == "output" or user in self._reduced for user in node.users):
                self._reduced.add(node)
        for node in reversed(nodes):
            if node.op == "call_function" and node.users and all(map(self._goes_on, node.users)):
                self._to_reduction.add(node)

    def _goes_on(self, user: fx.Node) -> bool:
        if is_collective(user):
            return user in self._reduced
        return (is_layout(user) or is_wait(user)) and user in self._to_reduction

    def is_gathered(self, node: fx.Node) -> bool:
        """True for an input that flows into gathers through layout nodes alone."""
        pending, found = list(node.users), False
        while pending:
            user = pending.pop()
            if is_collective(user):
                found = found or user in self._gathered
            elif is_layout(user) and user in self._from_inputs:
                pending.extend(user.users)
            else:
                return False
        return found

    def is_reduced(self, node: fx.Node) -> bool:
        """True for the result of a reduction, behind waits and layout nodes too."""
        return node in self._reduced

    def category(self, buffer: Buffer, saved: Mapping[str, str]) -> str:
        node = buffer.producer
        if node.op == "placeholder":
            return (
                "temporaries" if node.name.startswith("tangents_") else saved.get(node.name) or "activations"
            )
        if is_collective(node):
            if buffer.part == " (copy)":
                return "buckets"
            if node in self._gathered:
                return "buckets" if _is_unpacked(node) else "gathered"
            return "buckets" if node in self._reduced else "temporaries"
        if buffer.part == " (scratch)":
            return "temporaries"
        if node in self._gathered:
            return "gathered"
        if node in self._to_reduction:
            return "buckets" if is_layout(node) else "unreduced"
        if node in self._reduced or self._feeds_gathers(node):
            return "buckets"
        return "temporaries"

    def _feeds_gathers(self, node: fx.Node) -> bool:
        """True for casts, pads and packing of shards in front of a gather."""
        pending: Sequence[fx.Node] = [node]
        while pending:
            if not all(each in self._from_inputs for each in pending):
                return False
            users = [user for each in pending for user in each.users]
            if not users:
                return False
            pending = [user for user in users if not is_collective(user)]
        return True


def _is_unpacked(gather: fx.Node) -> bool:
    """True if full parameters are copied out of the result of a gather, or joined from it and others."""
    readers = [reader for wait in gather.users for reader in wait.users]
    return bool(readers) and all(reader.target in (UNPACK, JOIN_PARTS) for reader in readers)


def saved_memory(names: Sequence[str], memory: CategorizedMemory) -> list[SavedMemory]:
    """The memory of saved values, which the backward takes over, by the names of the values."""
    groups: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for name, buffer, num_bytes in zip(names, memory.output_buffers, memory.output_bytes, strict=True):
        if name:
            groups.setdefault(buffer, []).append(name)
            sizes[buffer] = num_bytes
    return [SavedMemory(names=tuple(group), num_bytes=sizes[buffer]) for buffer, group in groups.items()]
