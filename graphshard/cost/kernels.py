"""Groups nodes into kernels, and counts what each kernel reads, writes and computes.

Inductor fuses neighbouring pointwise ops and reductions, so values between them never reach memory. A run of fusible
nodes (:func:`graphshard.ir.op_traits.fusion_runs`) is split where nodes cannot share a loop: reductions over rows and
over columns, and domains of different sizes. A cast, a reshape or ``contiguous`` that copies is fusible. Every other op
is a kernel of its own. Views, waits and starts of collectives run no kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._compat import tree_leaves
from ..ir import (
    ALL_REDUCE_HOOK,
    REDUCE_GRAD,
    UNSHARD,
    argument,
    fusion_runs,
    is_collective,
    is_fusible,
    is_point_to_point,
    is_view,
    is_wait,
    schema_call,
    tensor_bytes,
)
from .flops import hinted_numel, hinted_shape

aten = torch.ops.aten

#: Ops that read rows of their first input by an index.
GATHERING = frozenset((
    aten.embedding, aten.gather, aten.index, aten.index_select, aten.take,
    aten._unsafe_index, aten._unsafe_masked_index,
))  # fmt: skip

#: Ops that add or write values into their first input at indexed places. Inductor does it in place, so they move the
#: values and the places that they are added to.
SCATTERING = frozenset((
    aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate,
    aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_,
    aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_, aten.index_reduce, aten.index_reduce_,
))  # fmt: skip

#: Operations per element of pointwise ops without a hardware instruction of their own: a division or root takes a few
#: steps; an exponential is a range reduction and a polynomial.
_STEPS = {
    4: ("div", "reciprocal", "sqrt", "rsqrt", "remainder", "fmod"),
    16: ("exp", "exp2", "expm1", "log", "log2", "log1p", "sigmoid", "silu", "sin", "cos"),
    24: ("erf", "erfc", "tanh", "gelu", "pow", "atan", "atan2", "logit", "erfinv"),
}
STEPS_OF = {name: steps for steps, names in _STEPS.items() for name in names}


@dataclass(slots=True, kw_only=True)
class Kernel:
    """Nodes that run as one kernel.

    Attributes:
        nodes: the nodes, in graph order.
        read_bytes: bytes of the distinct values read from outside, each counted once.
        written_bytes: bytes of the values that nodes outside read.
        vector_flops: pointwise operations; a reduction counts one per element.
        is_fused: whether Inductor generates it from pointwise ops and reductions.
        is_scattered: whether it reads or writes rows by an index.
    """

    nodes: list[fx.Node]
    read_bytes: int = 0
    written_bytes: int = 0
    vector_flops: float = 0.0
    is_fused: bool = True
    is_scattered: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


def kernels_of(order: Sequence[fx.Node]) -> list[Kernel]:
    """The kernels of a graph's nodes, in time linear in their number and edges."""
    busy = [node for node in order if not is_free(node) or is_view(node) or is_collective(node)]
    first, _ = fusion_runs(busy)
    runs: dict[int, list[fx.Node]] = {}
    for position, node in enumerate(busy):
        if not is_free(node):
            runs.setdefault(first[position], []).append(node)
    return [kernel for run in runs.values() for kernel in _kernels_of_run(run)]


def kernels_merged_as(order: Sequence[fx.Node], merged: Sequence[Sequence[str]]) -> list[Kernel]:
    """The kernels of a graph's nodes, merged as in a graph of the same nodes at other sizes.

    Args:
        order: the nodes.
        merged: for each kernel of the other graph the names of its nodes.

    Raises:
        KeyError: a name is that of no node.
    """
    by_name = {node.name: node for node in order}
    runs = ([by_name[name] for name in names] for names in merged)
    return [_fused_kernel(run) if is_fusible(run[0]) else _single_kernel(run[0]) for run in runs]


def is_free(node: fx.Node) -> bool:
    """True for a node that runs no kernel of its own: a view, a wait, a size, a scalar, a collective.

    Shard ops of level 1 count as collectives, which they are lowered to.
    """
    if node.op != "call_function" or is_view(node) or is_wait(node):
        return True
    if (
        is_collective(node)
        or is_point_to_point(node)
        or node.target in (UNSHARD, REDUCE_GRAD, ALL_REDUCE_HOOK)
    ):
        return True
    if node.target in (aten.scalar_tensor.default, aten.sym_size.int):
        return True
    value = node.meta.get("val")
    return not isinstance(value, (torch.Tensor, tuple, list))


def _kernels_of_run(run: list[fx.Node]) -> Iterator[Kernel]:
    if not is_fusible(run[0]):
        yield _single_kernel(run[0])
        return
    for loop in _loops(run):
        yield _fused_kernel(loop)


def _single_kernel(node: fx.Node) -> Kernel:
    if _packet(node) in SCATTERING:
        num_bytes = _scattered_bytes(node)
        return _kernel_alone(node, 2 * num_bytes, num_bytes, is_scattered=True)
    read = sum(_bytes_read(node, source) for source in node.all_input_nodes)
    written = tensor_bytes(node.meta["val"])
    if _packet(node) is aten.embedding_dense_backward:  # zeroes a table, then adds rows to it
        return _kernel_alone(node, 2 * read, written + read, is_scattered=3 * read > written)
    return _kernel_alone(node, read, written, is_scattered=_packet(node) in GATHERING)


def _kernel_alone(node: fx.Node, read: int, written: int, *, is_scattered: bool) -> Kernel:
    return Kernel(
        nodes=[node], read_bytes=read, written_bytes=written, is_fused=False, is_scattered=is_scattered
    )


def _scattered_bytes(node: fx.Node) -> int:
    """Bytes of the values that are added or written, and of the indices of their places."""
    table, *rest = schema_call(node)[1]
    sources = dict.fromkeys(leaf for leaf in tree_leaves(rest) if isinstance(leaf, fx.Node))
    num_bytes = sum(_bytes_read(node, source) for source in sources)
    if argument(node, "value") is not None:  # a scalar, written at each place
        num_bytes += hinted_numel(argument(node, "index").meta["val"]) * table.meta["val"].element_size()
    return num_bytes


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _fused_kernel(nodes: list[fx.Node]) -> Kernel:
    inside = set(nodes)
    reads: dict[fx.Node, int] = {}
    written = 0
    for node in nodes:
        for value in node.all_input_nodes:
            source = behind_views(value)
            if source not in inside:
                reads[source] = max(reads.get(source, 0), _bytes_read(node, value))
        if any(reader not in inside for reader in readers(node)):
            written += tensor_bytes(node.meta["val"])
    return Kernel(
        nodes=nodes,
        read_bytes=sum(reads.values()),
        written_bytes=written,
        vector_flops=sum(_vector_flops(node) for node in nodes),
        is_scattered=any(_packet(node) in GATHERING for node in nodes),
    )


@dataclass(slots=True)
class _Loop:
    """A loop of a kernel: nodes over ``domain`` elements; reductions keep ``kept`` of them."""

    domain: int
    kept: int
    is_pointwise: bool
    nodes: list[fx.Node] = field(default_factory=list)

    def takes(self, num_elements: int) -> bool:
        return num_elements in (self.domain, self.kept)


def _loops(run: list[fx.Node]) -> list[list[fx.Node]]:
    """Splits a run into loops, from the last node to the first.

    1. A reduction joins the reductions with its domain and direction.
    2. A pointwise node joins the loop of its first reader of its size, else the loop of all such nodes of its size.
    3. At the end a loop of pointwise nodes joins a reduction over rows of its size, or one with as many results.
    """
    loops: dict[tuple[Any, ...], _Loop] = {}
    loop_of: dict[fx.Node, _Loop] = {}
    for node in reversed(run):
        if torch.Tag.reduction in getattr(node.target, "tags", ()):
            key, domain, kept = _reduction_key(node)
            loop = loops.setdefault(key, _Loop(domain, kept, False))
        else:
            size = _num_elements(node)
            loops_of_readers = (loop_of.get(reader) for reader in readers(node))
            fitting = (each for each in loops_of_readers if each is not None and each.takes(size))
            loop = next(fitting, None) or loops.setdefault(("pointwise", size), _Loop(size, size, True))
        loop_of[node] = loop
    over_rows: dict[int, _Loop] = {}
    for size_of in (lambda loop: loop.domain, lambda loop: loop.kept):
        for key, loop in reversed(loops.items()):
            if key[0] == "rows":
                over_rows.setdefault(size_of(loop), loop)
    for node in run:
        loop = loop_of[node]
        if loop.is_pointwise:
            loop = over_rows.get(loop.domain, loop)
        loop.nodes.append(node)
    return [loop.nodes for loop in loops.values() if loop.nodes]


def _reduction_key(node: fx.Node) -> tuple[tuple[Any, ...], int, int]:
    source = node.all_input_nodes[0].meta["val"]
    shape, kept = hinted_shape(source), _num_elements(node)
    domain = hinted_numel(source)
    dims = argument(node, "dims" if node.target.namespace == "prims" else "dim")
    listed = [dims] if isinstance(dims, int) else dims
    over_rows = not listed or any(dim % max(len(shape), 1) == len(shape) - 1 for dim in listed)
    return ("rows" if over_rows else "columns", domain, kept), domain, kept


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a value or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


def behind_views(value: fx.Node) -> fx.Node:
    """The node that made the memory of a value: the value itself, or the base of a view."""
    while is_view(value) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value


def _bytes_read(node: fx.Node, value: fx.Node) -> int:
    """Bytes of ``value`` that a node reads: the elements of a view, the source of an expanded one, or indexed rows."""
    if _packet(node) in GATHERING and value is schema_call(node)[1][0]:
        return tensor_bytes(node.meta["val"])
    return min(tensor_bytes(value.meta.get("val")), tensor_bytes(behind_views(value).meta.get("val")))


def _vector_flops(node: fx.Node) -> float:
    name = str(node.target).split(".")[-2].strip("_")
    sources = [each.meta.get("val") for each in node.all_input_nodes]
    sizes = [hinted_numel(value) for value in sources if isinstance(value, torch.Tensor)]
    if torch.Tag.reduction in getattr(node.target, "tags", ()):
        return max(sizes, default=0) * (3 if name.startswith(("var", "std")) else 1)
    return _num_elements(node) * STEPS_OF.get(name, 1)


def _num_elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    values: Iterable[Any] = value if isinstance(value, (tuple, list)) else (value,)
    return max((hinted_numel(each) for each in values if isinstance(each, torch.Tensor)), default=0)
