"""join_pointwise: a pointwise value is made beside the kernel that reads the same, if that holds no more memory.

The backward of a gated MLP makes two values of the same three: one gradient for each of its two products. Autograd
runs the products of the first before it makes the second, and holds the inputs of both until then. Inductor
generates one kernel for both, and puts it where the first stood. This pass puts them side by side before anything is
planned.

Before::

    %mul_0: f32[64, 32] = mul(%grad, %up)
    %mm_0: f32[64, 16] = mm(%mul_0, %t_0)
    %mul_1: f32[64, 32] = mul(%grad, %gate)
    %mm_1: f32[64, 16] = mm(%mul_1, %t_1)

After::

    %mul_0: f32[64, 32] = mul(%grad, %up)
    %mul_1: f32[64, 32] = mul(%grad, %gate)
    %mm_0: f32[64, 16] = mm(%mul_0, %t_0)
    %mm_1: f32[64, 16] = mm(%mul_1, %t_1)

A value moves if elementwise ops compute it from values that exist earlier. What only it is made of moves with it. It
moves to right after the first run of fusible ops that reads one of the same values for a result of as many elements.
It must be written over one of its inputs (``MemoryModel``: no generated kernel reads that input afterwards), so no
more memory is held anywhere.

Numerics: unchanged; ops and their inputs are the same.

Does not handle:

- values that get memory of their own;
- values that read memory which an op of the graph writes to in place;
- symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from graphshard.ir import fusion_runs, is_elementwise, is_view, readers_through_aliases, touches, writes_of
from graphshard.memory import Buffer, MemoryModel, kept_inputs
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class JoinPointwise:
    """See the module docstring; no options."""

    name: ClassVar[str] = "join_pointwise"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts values "joined"."""
        num_joined = _Joins(gm, ctx).move()
        return PassReport(changed=num_joined > 0, counts={"joined": num_joined})


class _Joins:
    """Moves the values of one graph; positions are those before anything moves."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self._order = list(gm.graph.nodes)
        self._position = {node: index for index, node in enumerate(self._order)}
        self._first, self._last = fusion_runs(self._order)
        self._memory = MemoryModel(gm, kept=kept_inputs(gm), device_type=ctx.device_type)
        self._written = writes_of(gm.graph).all

    def move(self) -> int:
        """Moves all values that may move; returns their number."""
        num_moved = 0
        went_to: dict[fx.Node, int] = {}
        last_at: dict[int, fx.Node] = {}
        for value in filter(self._may_move, self._order):
            cone = self._made_of(value)
            place = self._place(value, cone)
            if place is None or self._order[place] in went_to:
                continue
            later = [node for node in cone if self._position[node] > place]
            if any(went_to.get(node, place) != place for node in later):
                continue
            for node in later:
                if node not in went_to:
                    last_at.get(place, self._order[place]).append(node)
                    last_at[place], went_to[node] = node, place
            num_moved += 1
        return num_moved

    def _may_move(self, node: fx.Node) -> bool:
        is_written_over = is_elementwise(node) and self._memory.is_written_over_another(node)
        return is_written_over and _num_elements(node) > 0

    def _made_of(self, value: fx.Node) -> dict[fx.Node, None]:
        """A value, and the elementwise ops of its own run and the views that it is made of, in order."""
        run = self._run_of(value)
        found = {value}
        pending = [value]
        while pending:
            for source in pending.pop().all_input_nodes:
                is_part = is_view(source) or (is_elementwise(source) and self._run_of(source) == run)
                if is_part and source not in found:
                    found.add(source)
                    pending.append(source)
        return dict.fromkeys(sorted(found, key=self._position.__getitem__))

    def _run_of(self, node: fx.Node) -> int:
        return self._first[self._position[node]]

    def _is_read_outside(self, value: fx.Node, cone: Collection[fx.Node]) -> bool:
        """Whether another node reads a stored part of what a value is made of."""
        parts = [node for node in cone if node is not value and is_elementwise(node)]
        stored = [node for node in parts if node in [one.producer for one in self._memory.buffers_of(node)]]
        return any(reader not in cone for node in stored for reader in readers_through_aliases(node))

    def _place(self, value: fx.Node, cone: Collection[fx.Node]) -> int | None:
        """The position after which a value goes; None if it stays."""
        sources = [source for node in cone for source in node.all_input_nodes if source not in cone]
        if self._is_read_outside(value, cone) or any(touches(source, self._written) for source in sources):
            return None
        ready = max(self._position[source] for source in sources)
        read = {buffer for node in cone for buffer in self._read_by(node, _num_elements(value))}
        places = {
            self._last[self._position[reader]]
            for buffer in read
            for reader in buffer.readers
            if buffer in self._read_by(reader, _num_elements(value))
        }
        return min((place for place in places if ready <= place < self._run_of(value)), default=None)

    def _read_by(self, node: fx.Node, num_elements: int) -> set[Buffer]:
        """The buffers of which an elementwise op reads so many elements, to make as many."""
        if not is_elementwise(node) or _num_elements(node) != num_elements:
            return set()
        sources = [source for source in node.all_input_nodes if _num_elements(source) == num_elements]
        return {buffer for source in sources for buffer in self._memory.buffers_of(source)}


def _num_elements(node: fx.Node) -> int:
    """The number of elements of a value; 0 if it is symbolic."""
    value = node.meta.get("val")
    is_static = isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
    return value.numel() if is_static else 0
