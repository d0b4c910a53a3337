"""Counts the parts of a step that lie outside of one graph, as memory budgets do."""

from __future__ import annotations

from torch import fx

from ..ir import WAITING_INPUTS, stored_bytes, tensor_bytes
from .kept_inputs import kept_bytes, kept_inputs


def resident_bytes(gm: fx.GraphModule) -> int:
    """Bytes that a half takes and that live through the whole step: shards, buffers, inputs of the model, constants."""
    return kept_bytes(gm, kept_inputs(gm))


def step_bytes(gm: fx.GraphModule) -> int:
    """:func:`resident_bytes` for halves and joint graphs, without parameters that units keep gathered."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return sum(stored_bytes(node.meta.get("val")) for node in inputs if node.name.startswith("primals_"))


def waiting_bytes(gm: fx.GraphModule) -> int:
    """Bytes of the inputs that are gradients of earlier micro-batches. FSDP2 holds them too."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return sum(tensor_bytes(node.meta.get("val")) for node in inputs if node.name.startswith(WAITING_INPUTS))
