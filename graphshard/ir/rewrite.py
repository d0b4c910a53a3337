"""Edits of FX graphs: how passes add nodes, copy a graph, and order it.

Passes add nodes only through :class:`GraphEmitter`. It appends a call at the graph's insertion point and computes the
fake value, so the fact TYPED holds after every pass.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .._compat import detect_fake_mode, make_graph_module


class GraphEmitter:
    """Appends calls to ``graph`` at its insertion point.

    Args:
        graph: the graph.
        origin: node whose ``stack_trace``, module stack and further safe ``meta`` entries the new nodes copy.
        extra_meta: entries for the ``meta`` of each new node, such as recompute tags.
    """

    def __init__(
        self, graph: fx.Graph, *, origin: fx.Node | None = None, extra_meta: dict[str, Any] | None = None
    ) -> None:
        self.graph = graph
        self._meta = dict(extra_meta or {})
        if origin is not None:
            for key in (
                "stack_trace",
                "nn_module_stack",
                "seq_nr",
                "original_aten",
                "partitioner_tag",
                "custom",
            ):
                if key in origin.meta:
                    self._meta[key] = origin.meta[key]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self._meta)
        node.meta["val"] = fake_result(target, args, kwargs)
        return node

    def tensor(self, value: fx.Node) -> torch.Tensor:
        """The fake tensor of a node's value."""
        return value.meta["val"]


def recompute_tags(node: fx.Node) -> dict[str, Any]:
    """The ``meta`` entries that tell whether a node is recomputed in the backward, for nodes that replace it."""
    return {key: node.meta[key] for key in ("recompute", "ac_graph_id") if key in node.meta}


#: Fake results by op and argument types, inside :func:`remembered_results`; else None.
_REMEMBERED: ContextVar[dict[Any, Any] | None] = ContextVar("remembered results", default=None)


@contextlib.contextmanager
def remembered_results() -> Iterator[None]:
    """Inside, an op on arguments of equal types is typed once. Typing is slow, and the blocks of a model are equal."""
    token = _REMEMBERED.set({})
    try:
        yield
    finally:
        _REMEMBERED.reset(token)


def fake_result(target: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``target`` for the fake values of its arguments."""
    known = _REMEMBERED.get()
    if known is None:
        return _run_on_fakes(target, args, kwargs)
    key = (target, _type_of(args), _type_of(kwargs))
    if key not in known:
        known[key] = _run_on_fakes(target, args, kwargs)
    return known[key]


def _type_of(value: Any) -> Any:
    """A hashable key; arguments with equal keys give results of equal type."""
    if isinstance(value, fx.Node):
        return _type_of(value.meta["val"])
    if isinstance(value, torch.Tensor):
        return type_key(value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_type_of, value))
    if isinstance(value, dict):
        return tuple((name, _type_of(part)) for name, part in value.items())
    return (type(value), value)


def type_key(value: torch.Tensor) -> tuple[Any, ...]:
    """A hashable key of a tensor: shape, strides, dtype, device and storage offset."""
    return (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())


def _run_on_fakes(target: Any, args: Any, kwargs: Any) -> Any:
    fake_args = map_arg(args, lambda node: node.meta["val"])
    fake_kwargs = map_arg(kwargs, lambda node: node.meta["val"])
    mode = detect_fake_mode((fake_args, fake_kwargs))
    if mode is None:
        return target(*fake_args, **fake_kwargs)
    with mode:
        return target(*fake_args, **fake_kwargs)


def output_values(graph: fx.Graph) -> list[Any]:
    """The graph's outputs as a flat list (nodes, constants and None)."""
    values = graph.output_node().args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module: new nodes in the same order, with the same ``meta`` entries."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    graph.output_node().meta.update(gm.graph.output_node().meta)
    return make_graph_module(gm, graph)


def stable_topological_sort(graph: fx.Graph) -> None:
    """Moves nodes behind their inputs and keeps the order otherwise (Kahn's algorithm, lowest position first)."""
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [position[node] for node in nodes if waiting[node] == 0]
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, position[user])
    apply_order(graph, order)


def apply_order(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Puts the graph's nodes into ``order``, a permutation of them."""
    assert len(order) == len(graph.nodes), "an order must name every node once"
    for previous, node in itertools.pairwise(order):
        previous.append(node)
