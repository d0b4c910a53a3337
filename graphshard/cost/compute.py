"""Seconds of compute at each node of a graph: a roofline for each kernel.

A kernel takes the longer of two times, plus a fixed overhead: its FLOPs at the peak times the efficiency of its class,
and its bytes at the memory bandwidth times the efficiency of streaming (Williams, Waterman and Patterson, "Roofline",
CACM 52(4), 2009). Only ``meta["val"]`` is read.
"""

from __future__ import annotations

import torch
from torch import fx

from ..errors import CardError
from ..ir import argument, schema_call, tensor_bytes
from .cards import HardwareCard
from .flops import executed_flops, kernel_class
from .kernels import Kernel, kernels_of

#: Ops that may move a tensor between host and device.
_MOVING = (torch.ops.aten._to_copy, torch.ops.aten.to, torch.ops.prims.device_put)

#: Names in schemas of the first operand of a product that is added to another value.
_OPERANDS = ("mat1", "batch1", "mat")


def compute_seconds(gm: fx.GraphModule, card: HardwareCard) -> dict[fx.Node, float]:
    """Seconds of compute of every node of a decomposed forward, backward or inference graph.

    Args:
        gm: values carry ``meta["val"]``, fake or real; symbolic sizes count with their hints.
        card: the hardware.

    Returns:
        The seconds of each node, in graph order. Views, waits, inputs, the output and collectives have 0. The nodes of
        a fused kernel have equal shares of its seconds. The sum is the compute time of the graph.

    Raises:
        CardError: the card has no peak for the dtype of a product; see :meth:`HardwareCard.peak`.
    """
    seconds = dict.fromkeys(gm.graph.nodes, 0.0)
    for kernel in kernels_of(list(gm.graph.nodes)):
        share = kernel_seconds(kernel, card) / len(kernel.nodes)
        for node in kernel.nodes:
            seconds[node] = share
    return seconds


def missing_peaks(gm: fx.GraphModule, card: HardwareCard) -> list[str]:
    """The dtypes of a graph's products for which a card has no peak, by name, sorted."""
    nodes = (node for node in gm.graph.nodes if node.op == "call_function" and kernel_class(node) is not None)
    missing = set()
    for name in set(map(_dtype_name, nodes)):
        try:
            card.peak(name)
        except CardError:
            missing.add(name)
    return sorted(missing)


def kernel_seconds(kernel: Kernel, card: HardwareCard) -> float:
    """Seconds of one kernel by its roofline."""
    node = kernel.nodes[0]
    kind = None if kernel.is_fused else kernel_class(node)
    memory = memory_seconds(kernel.moved_bytes, card, scattered=kernel.is_scattered)
    if kind is not None:
        flops: float = executed_flops(node)
        arithmetic = flops / (card.peak(_dtype_name(node)) * card.efficiency[kind].at(flops))
    else:
        flops = kernel.vector_flops
        arithmetic = flops / (card.vector_flops * card.efficiency["vector"].at(flops))
    return card.kernel_overhead_seconds + max(arithmetic, memory, _transfer_seconds(kernel, card))


def memory_seconds(num_bytes: int, card: HardwareCard, *, scattered: bool = False) -> float:
    """Seconds to move ``num_bytes``, reads and writes added up."""
    efficiency = card.efficiency["gather" if scattered else "memory"].at(num_bytes)
    return num_bytes / (card.memory_bandwidth * efficiency)


def copy_seconds(num_bytes: int, card: HardwareCard) -> float:
    """Seconds of one copy that reads ``num_bytes`` and writes as many."""
    return card.kernel_overhead_seconds + memory_seconds(2 * num_bytes, card)


def _transfer_seconds(kernel: Kernel, card: HardwareCard) -> float:
    """Seconds of the transfer between host and device, for ops that make one."""
    moved = 0
    for node in kernel.nodes:
        value = node.meta.get("val")
        if getattr(node.target, "overloadpacket", None) in _MOVING and isinstance(value, torch.Tensor):
            source = schema_call(node)[1][0].meta["val"]
            moved += tensor_bytes(value) if source.device.type != value.device.type else 0
    return moved / card.host_bandwidth


def _dtype_name(node: fx.Node) -> str:
    """Dtype of a product: of the first operand by its name in the schema, else of the first tensor."""
    named = (argument(node, name) for name in _OPERANDS)
    for source in (*named, *schema_call(node)[1]):
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(value, torch.Tensor):
            return str(value.dtype).removeprefix("torch.")
    return str(node.meta["val"].dtype).removeprefix("torch.")
