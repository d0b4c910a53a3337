"""The inputs of a graph that its caller keeps in memory, and the tensors that the module itself holds."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from ..ir import GATHERED_INPUT, TANGENT_INPUT, stored_bytes


def kept_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a half whose memory the caller keeps.

    In a forward or inference graph all of them. In a backward (told by its tangents) those it shares
    with the forward's inputs, ``primals_*``, and parameters that its units may keep gathered; saved activations
    die after their last use, and tangents are counted as the graph's own.
    """
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    if any(node.name.startswith(TANGENT_INPUT) for node in inputs):
        return [node for node in inputs if node.name.startswith(("primals_", GATHERED_INPUT))]
    return inputs


def kept_bytes(gm: fx.GraphModule, kept: Iterable[fx.Node]) -> int:
    """Bytes of inputs that the caller keeps, and of the tensors that the module itself holds (:func:`held_tensors`)."""
    inputs = sum(stored_bytes(node.meta.get("val")) for node in kept)
    return inputs + sum(map(stored_bytes, held_tensors(gm).values()))


def held_tensors(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that a graph reads of its module, by name: parameters in a graph of ``make_fx``, constants."""
    names = dict.fromkeys(node.target for node in gm.graph.find_nodes(op="get_attr"))
    found = {name: operator.attrgetter(name)(gm) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
