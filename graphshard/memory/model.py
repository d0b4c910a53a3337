"""The memory model: how many bytes are live at each node of one FX graph, in a given order.

Live ranges are exact for a given order:

- Views, items of tuples, waits and ops in place share the memory of their base. A conditional view (``reshape``,
  ``to``) counts as a copy where its values show one.
- A value is freed after its last reader. Outputs live to the end.
- Inputs that the caller keeps (shards of parameters, inputs of a forward) are counted apart. Other inputs (saved
  activations, tangents) die after their last reader. Tangents live to the end where autograd holds the arguments of a
  backward (:data:`graphshard._compat.gradients_are_boxed`); a gradient passed to ``Tensor.backward`` is the caller's.
- A collective holds its input, its output and the copies of its backend (``BACKEND_COPIES``) until its wait.

The inner compiler decides later about fusion, so three rules approximate it:

1. A pointwise value that only generated kernels read, computed from at most ``MAX_INLINED_READS`` buffers, is
   recomputed by its readers and never stored.
2. A value that only its own run of fusible nodes reads is never stored.
3. A run of fusible nodes allocates its results together.

A generated kernel writes over an input that dies there, where that is certain (:meth:`MemoryModel._overwritten`);
otherwise both are counted. Memory that library kernels allocate for themselves is in :mod:`graphshard.memory.scratch`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .._compat import gradients_are_boxed
from .._compat_gloo import MAX_RANKS_IN_PLACE
from ..ir import (
    ALL_GATHER,
    REDUCE_SCATTER,
    TANGENT_INPUT,
    aliased_inputs,
    aten,
    call_arguments,
    functional_form,
    fusion_runs,
    is_alias,
    is_collective,
    is_elementwise,
    is_fusible,
    is_point_to_point,
    is_pointwise,
    is_view,
    is_wait,
    lies_as,
    operands,
    readers_through_aliases,
    stored_bytes,
    tensor_bytes,
    tensors_of,
    viewed,
    waits_of,
    writes_over,
)
from .kept_inputs import kept_bytes
from .scratch import UNMEASURED, KernelScratch
from .scratch_calls import device_of
from .timeline import LiveValue, MemoryTimeline

#: Copies that a collective holds while it runs, by device type: multiples of its input and of its output. Gloo (cpu)
#: reduces a clone of the input; the exchange that replaces a reduction in compiled graphs receives as much. It gathers
#: into a flat buffer of its own in groups of more than ``MAX_RANKS_IN_PLACE`` ranks. NCCL (cuda) works in place.
#: tests/ranks/test_memory_model.py measures these.
BACKEND_COPIES: dict[str, dict[Any, tuple[int, int]]] = {
    "cpu": {ALL_GATHER: (0, 1), REDUCE_SCATTER: (1, 0)},
    "cuda": {},
}

#: A pointwise value with several readers is recomputed in each if it reads at most this many buffers, else stored
#: (Inductor's ``realize_reads_threshold``). With one reader the limit is twice as high.
MAX_INLINED_READS = 4

#: Products; a generated kernel may write over their results.
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}

#: Marks inputs that Inductor may write over (:mod:`graphshard.memory.donations`).
DONATED = "donated"

#: Too expensive to recompute on the CPU in several kernels.
_DEAR = {aten.exp.default, aten.sigmoid.default}


def memory_timeline(
    gm: fx.GraphModule,
    *,
    kept: Iterable[fx.Node],
    order: Sequence[fx.Node] | None = None,
    device_type: str | None = None,
    scratch: KernelScratch = UNMEASURED,
) -> MemoryTimeline:
    """Live bytes of a forward, inference or backward graph.

    Args:
        gm: a graph whose values carry ``meta["val"]``; symbolic sizes count with their hints.
        kept: placeholders that the caller keeps alive (see :func:`kept_inputs`).
        order: an order of its nodes in which inputs precede their readers; default the graph's own.
        device_type: where it will run, for what collectives copy there; default where its values are.
        scratch: what kernels allocate there for themselves.
    """
    return MemoryModel(gm, kept=kept, device_type=device_type, scratch=scratch).timeline(
        list(gm.graph.nodes) if order is None else order
    )


def copied_bytes(collective: fx.Node, device_type: str | None = None) -> int:
    """Bytes of the copies that the backend makes while the collective runs.

    Args:
        collective: its node.
        device_type: where it will run ("cuda"); None for where its result is, which is wrong for a graph
            that was captured on fake CPU tensors for another device.
    """
    output = collective.meta["val"]
    device = device_type or device_of(collective)
    if device == "cpu" and _is_in_place(collective):
        return 0
    of_input, of_output = BACKEND_COPIES.get(device, {}).get(functional_form(collective.target), (0, 0))
    input_bytes = sum(tensor_bytes(arg.meta["val"]) for arg in operands(collective))
    return of_input * input_bytes + of_output * tensor_bytes(output)


def _is_in_place(collective: fx.Node) -> bool:
    """Whether gloo receives straight into the result."""
    return collective.target is ALL_GATHER and call_arguments(collective)["group_size"] <= MAX_RANKS_IN_PLACE


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one value, of a kernel's scratch or of a collective's copies.

    Attributes:
        producer: the input, kernel or collective that it belongs to.
        part: the item of a tuple, " (copy)" or " (scratch)"; else "".
        num_bytes: its size.
        readers: the nodes after whose last it is freed.
    """

    producer: fx.Node
    part: str
    num_bytes: int
    readers: list[fx.Node] = field(default_factory=list)


class MemoryModel:
    """The part of the memory model that does not depend on the order of nodes: buffers and their readers.

    Args:
        gm: as in :func:`memory_timeline`.
        kept: as in :func:`memory_timeline`.
        device_type: as in :func:`memory_timeline`.
        scratch: as in :func:`memory_timeline`.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        *,
        kept: Iterable[fx.Node],
        device_type: str | None = None,
        scratch: KernelScratch = UNMEASURED,
    ) -> None:
        kept = set(kept)
        self._device_type = device_type
        self.kept_bytes = kept_bytes(gm, kept)
        self._made: list[Buffer] = []
        self._seen: dict[fx.Node, tuple[Buffer, ...]] = {}
        for node in gm.graph.nodes:
            self._seen[node] = () if node in kept else tuple(dict.fromkeys(self._look(node)))
        for node in gm.graph.nodes:
            if not (is_view(node) or self._is_inlined(node)):
                for buffer in self._read(node):
                    buffer.readers.append(node)
            if is_collective(node) or is_point_to_point(node):
                self._hold_until_waited(node)
            if num_bytes := scratch.bytes_of(node, device_type or device_of(node)):
                self._made.append(Buffer(node, " (scratch)", num_bytes))
        self._written_over = {
            buffer: found
            for buffer in self._made
            if not buffer.part and (found := self._overwritten(buffer.producer)) is not None
        }

    def timeline(self, order: Sequence[fx.Node]) -> MemoryTimeline:
        """Live bytes over an order of all nodes in which inputs precede their readers."""
        changes = [0] * (len(order) + 1)
        ranges = self.ranges(order)
        for start, end, buffer in ranges:
            changes[start] += buffer.num_bytes
            changes[end + 1] -= buffer.num_bytes
        live_bytes, live = [], 0
        for change in changes[:-1]:
            live += change
            live_bytes.append(live)
        peak = live_bytes.index(max(live_bytes)) if live_bytes else 0
        at_peak = [
            LiveValue(node=buffer.producer, part=buffer.part, num_bytes=buffer.num_bytes)
            for start, end, buffer in ranges
            if start <= peak <= end and buffer.num_bytes
        ]
        return MemoryTimeline(
            nodes=tuple(order),
            live_bytes=tuple(live_bytes),
            kept_bytes=self.kept_bytes,
            live_at_peak=tuple(sorted(at_peak, key=lambda value: -value.num_bytes)),
        )

    def lifetimes(self, order: Sequence[fx.Node]) -> list[tuple[int, int, int]]:
        """(first position, last position, bytes) of each value in an order."""
        return [(start, end, buffer.num_bytes) for start, end, buffer in self.ranges(order)]

    def buffers_of(self, node: fx.Node) -> tuple[Buffer, ...]:
        """The buffers that a node's value occupies; none for an input that the caller keeps."""
        return self._seen[node]

    def is_written_over_another(self, node: fx.Node) -> bool:
        """Whether a node's value is written over one that dies there."""
        return any(buffer in self._written_over for buffer in self._seen[node] if buffer.producer is node)

    def ranges(self, order: Sequence[fx.Node]) -> list[tuple[int, int, Buffer]]:
        """(first position, last position, buffer) of each stored buffer in an order."""
        first, last = fusion_runs(order)
        ranges = []
        position = {node: index for index, node in enumerate(order)}
        for buffer in self._made:
            start = first[position[buffer.producer]]
            end = max([last[position[reader]] for reader in buffer.readers], default=last[start])
            if is_fusible(buffer.producer) and buffer.readers and end == last[start]:
                continue  # lives inside one generated kernel
            if buffer.producer.op == "placeholder":
                start = 0
                if buffer.producer.name.startswith(TANGENT_INPUT) and not gradients_are_boxed:
                    end = len(order) - 1
            ranges.append((start, end, buffer))
        return self._without_overwritten(ranges)

    def _without_overwritten(self, ranges: list[tuple[int, int, Buffer]]) -> list[tuple[int, int, Buffer]]:
        """Ends the range of each overwritten buffer where its successor begins."""
        begun = {buffer: start for start, _, buffer in ranges}
        ends = {
            before: begun[after] - 1
            for after, before in self._written_over.items()
            if after in begun and before in begun and begun[before] < begun[after]
        }
        return [(start, ends.get(buffer, end), buffer) for start, end, buffer in ranges]

    def held_bytes(self, collective: fx.Node) -> int:
        """Bytes that a collective holds until its wait besides its output: its input and copies.

        The output is left out, since the output of a reduction outlives the wait. An input that the caller keeps counts
        nothing.
        """
        own = sum(buffer.num_bytes for buffer in set(self._read(collective)))
        return own + copied_bytes(collective, self._device_type)

    def _look(self, node: fx.Node) -> Iterator[Buffer]:
        """The buffers of a node's value; those that the node allocates are made here."""
        if node.op == "get_attr" or node.op == "output":
            return
        if node.target is operator.getitem and node.args[0].op == "call_function":
            source, index = node.args[:2]
            if is_collective(source) or not is_alias(source):
                yield from self._items(source, index)
                return
        if is_alias(node):
            for source in aliased_inputs(node):
                yield from self._seen[source]
            return
        if self._is_inlined(node):
            yield from self._read(node)
            return
        for index, value in enumerate(tensors_of(node.meta.get("val"))):
            is_tuple = isinstance(node.meta["val"], (tuple, list))
            num_bytes = stored_bytes(value) if node.op == "placeholder" else tensor_bytes(value)
            buffer = Buffer(node, f"[{index}]" if is_tuple else "", num_bytes)
            self._made.append(buffer)
            yield buffer

    def _items(self, source: fx.Node, index: Any) -> Iterable[Buffer]:
        is_flat = len(self._seen[source]) == len(source.meta["val"])
        return (self._seen[source][index],) if is_flat and isinstance(index, int) else self._seen[source]

    def _read(self, node: fx.Node) -> Iterator[Buffer]:
        for source in node.all_input_nodes:
            yield from self._seen[source]

    def _is_inlined(self, node: fx.Node) -> bool:
        """True for a pointwise value that its readers recompute."""
        if not is_pointwise(node) or node.target is aten.cat.default:
            return False
        readers = list(readers_through_aliases(node))
        if not readers or not all(is_fusible(reader) or writes_over(reader, node) for reader in readers):
            return False
        num_read = len(set(self._read(node)))
        if len(readers) > 1:
            return num_read <= MAX_INLINED_READS and node.target not in _DEAR
        return num_read <= 2 * MAX_INLINED_READS

    def _overwritten(self, result: fx.Node) -> Buffer | None:
        """The value that dies where a generated kernel stores ``result``, and whose memory ``result`` takes; else None.

        Inductor writes over a value that is read only at the place that is written. That is certain, whatever it fuses
        and recomputes, if:

        1. a chain of elementwise ops with one reader each leads from the value to the result;
        2. all of them are contiguous and have one shape;
        3. no generated kernel reads the result, since it could recompute it from the value.
        """
        if not self._seen[result] or any(map(is_fusible, readers_through_aliases(result))):
            return None
        return self._end_of_chain(result, result)

    def _end_of_chain(self, node: fx.Node, result: fx.Node) -> Buffer | None:
        for source in node.all_input_nodes if is_elementwise(node) else ():
            if list(source.users) != [node] or not lies_as(source, node):
                continue
            found = (
                self._end_of_chain(source, result)
                if self._is_inlined(source)
                else self._to_write_over(viewed(source), result)
            )
            if found is not None:
                return found
        return None

    def _to_write_over(self, node: fx.Node, result: fx.Node) -> Buffer | None:
        is_made = node.op == "call_function" and (is_fusible(node) or node.target in _PRODUCTS)
        if not (is_made or node.meta.get(DONATED)) or is_alias(node) or self._is_inlined(node):
            return None
        before, after = node.meta["val"], result.meta["val"]
        is_same = (before.dtype, before.device) == (after.dtype, after.device)
        return self._seen[node][0] if is_same and self._seen[node] else None

    def _hold_until_waited(self, collective: fx.Node) -> None:
        waits = [
            reader for reader in readers_through_aliases(collective, through_waits=False) if is_wait(reader)
        ]
        waits = waits or waits_of(collective)
        for buffer in self._read(collective):
            buffer.readers.extend(waits)
        if num_bytes := copied_bytes(collective, self._device_type):
            self._made.append(Buffer(collective, " (copy)", num_bytes, waits))
