"""Memory that a graph does not free: inputs that its caller keeps, and tensors that its module holds."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from ..ir import GATHERED_INPUT, TANGENT_INPUT, stored_bytes


def kept_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a half whose memory the caller keeps.

    In a forward or inference graph these are all placeholders. In a backward (which has tangents) these are the inputs
    of the forward, ``primals_*``, and parameters that units may keep gathered. Saved activations and tangents are the
    graph's own.
    """
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    if any(node.name.startswith(TANGENT_INPUT) for node in inputs):
        return [node for node in inputs if node.name.startswith(("primals_", GATHERED_INPUT))]
    return inputs


def kept_bytes(gm: fx.GraphModule, kept: Iterable[fx.Node]) -> int:
    """Bytes of the inputs that the caller keeps and of the tensors that the module holds (:func:`held_tensors`)."""
    inputs = sum(stored_bytes(node.meta.get("val")) for node in kept)
    return inputs + sum(map(stored_bytes, held_tensors(gm).values()))


def held_tensors(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors of its module that a graph reads, by name: constants, and parameters in a graph of ``make_fx``."""
    names = dict.fromkeys(node.target for node in gm.graph.find_nodes(op="get_attr"))
    found = {name: operator.attrgetter(name)(gm) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
