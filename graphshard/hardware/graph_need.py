"""What a graph of Dynamo needs of a card, read from its ops and from the parameters of its models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._compat import group_by_name
from ..cost import DTYPES
from ..fsdp.state import Tree
from .machine_need import GroupNeed, MachineNeed

#: Classes of kernels, by what the names of their functions contain.
_CLASSES = {"attention": "attention", "convolution": "conv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNeed:
    """A need, and where it is.

    Attributes:
        need: what the graph needs of a card.
        groups: the process groups of ``need.groups``, by name.
        device: where this rank computes.
    """

    need: MachineNeed
    groups: tuple[str, ...]
    device: torch.device


def need_of_graph(gm: fx.GraphModule, inputs: Sequence[Any], trees: Sequence[Tree]) -> GraphNeed:
    """The need of a graph; nothing in it depends on the batch.

    Args:
        gm: what Dynamo captured.
        inputs: its inputs.
        trees: its models.
    """
    slots = [(unit, slot) for tree in trees for unit in tree.units() for slot in unit.slots]
    devices = [unit.compute_device or slot.param.device for unit, slot in slots]
    devices += [value.device for value in inputs if isinstance(value, torch.Tensor)]
    device = next((each for each in devices if each.type == "cuda"), torch.device("cpu"))
    groups = tuple(dict.fromkeys(name for tree in trees for name in tree.groups()))
    kinds: dict[str, set[str]] = {name: set() for name in groups}
    num_bytes = dict.fromkeys(groups, 0)
    for _, slot in slots:
        used = [(slot.axis, {"reduce_scatter"}), (slot.replicate, {"all_reduce"})]
        used += [(axis, {"reduce_scatter", "all_reduce"}) for axis in slot.other_axes]
        for axis, reductions in used:
            if axis.group_name in kinds:
                kinds[axis.group_name] |= {"all_gather", *reductions}
                num_bytes[axis.group_name] += slot.param.numel() * slot.param.element_size()
    return GraphNeed(
        need=MachineNeed(
            device_type=device.type,
            groups=tuple(
                GroupNeed.of_parameters(group_by_name(name).size(), tuple(kinds[name]), num_bytes[name])
                for name in groups
            ),
            dtypes=tuple(
                sorted({str(dtype).removeprefix("torch.") for dtype in _dtypes(gm) if dtype in DTYPES})
            ),
            classes=tuple(sorted(_classes(gm))),
        ),
        groups=groups,
        device=device,
    )


def _dtypes(gm: fx.GraphModule) -> Iterator[torch.dtype]:
    yield torch.float32
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            yield value.dtype


def _classes(gm: fx.GraphModule) -> set[str]:
    names = [_name_of(node.target) for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    return {kind for kind, part in _CLASSES.items() if any(part in name for name in names)}


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
