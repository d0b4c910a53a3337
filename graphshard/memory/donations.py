"""Donated inputs of a backward: saved values that Inductor may write over.

AOTAutograd donates every saved value that shares no memory with an input, a result of the forward, or a gradient. It
cannot see that a unit may hold a full parameter for the next micro-batch, or that on one rank a full parameter is the
shard. Full parameters, and values that share their memory, are removed from the donated set here. The inputs that
remain are marked for the memory model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx

from .._compat import autograd_metadata, storage_id
from ..ir import KEEP_PIECE, SPREAD, UNSHARD, output_values, tensors_of
from .model import DONATED

#: Ops at level 1 whose results may be held beyond the step.
_HELD = (UNSHARD, KEEP_PIECE, SPREAD)


def outputs_with_parameters(forward: fx.GraphModule) -> frozenset[str]:
    """Names of the outputs of a forward, at level 1, that share memory with full parameters or pieces of them."""
    held = _memory_of(
        node for target in _HELD for node in forward.graph.find_nodes(op="call_function", target=target)
    )
    return frozenset(
        value.name for value in _nodes(output_values(forward.graph)) if _memory_of([value]) & held
    )


def take_back_donations(backward: fx.GraphModule, names: Collection[str]) -> None:
    """Forbids Inductor to write over some inputs of a backward, and marks the inputs that it still may write over.

    Args:
        backward: the graph before passes change it, while AOTAutograd compiles it.
        names: inputs that must not be written over.
    """
    metadata = autograd_metadata()
    if metadata is None:
        return
    inputs = backward.graph.find_nodes(op="placeholder")
    donated = {inputs[index].name for index in donated_inputs()} - set(names)
    _mark(inputs, donated)
    metadata.bw_donated_idxs = [index for index in donated_inputs() if inputs[index].meta.get(DONATED)]


def donated_inputs() -> tuple[int, ...]:
    """Positions of the inputs that AOTAutograd donates to the backward being compiled."""
    metadata = autograd_metadata()
    return tuple(metadata.bw_donated_idxs or ()) if metadata is not None else ()


def mark_donated(forward: fx.GraphModule, backward: fx.GraphModule, num_results: int) -> None:
    """Marks the inputs of a backward that would stay donated after :func:`take_back_donations`, without compiling it.

    Args:
        forward: the forward at level 1; its outputs after the results are saved.
        backward: edited in place.
        num_results: number of outputs of the forward that are results.
    """
    outputs = output_values(forward.graph)
    others = _memory_of(forward.graph.find_nodes(op="placeholder"))
    others |= _memory_of(_nodes(outputs[:num_results])) | _memory_of(_nodes(output_values(backward.graph)))
    spared = outputs_with_parameters(forward)
    donated = {
        value.name
        for value in _nodes(outputs[num_results:])
        if value.name not in spared and not _memory_of([value]) & others
    }
    _mark(backward.graph.find_nodes(op="placeholder"), donated)


def _mark(inputs: Sequence[fx.Node], names: Collection[str]) -> None:
    """Marks the inputs in ``names`` that share memory with no other input."""
    shared = Counter(key for node in inputs for key in _memory_of([node]))
    for node in inputs:
        if node.name in names and all(shared[key] == 1 for key in _memory_of([node])):
            node.meta[DONATED] = True


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _memory_of(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_id(tensor) for node in nodes for tensor in tensors_of(node.meta.get("val"))}
