"""What the inputs of a graph are: the handle of a unit, and the prefixes of the names of a half's inputs.

A handle is how a graph finds the run-time state of the parameters it gathers. It is an empty tensor with the unit as
an attribute. The shard ops take it as an argument, so it reaches every
graph that reads the unit's parameters, and the backward of that graph. The unit itself is defined in
:mod:`graphshard.fsdp.state.unit`; the ops need only what :class:`UnitState` declares.

Under hooks of saved tensors (those around an uncompiled forward, for instance) a backward gets what they return: mostly
another tensor over the same memory, which has no attributes. So a handle is known by its memory, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._compat import storage_id
from .params import ReduceGradCall, UnshardCall

#: The attribute by which a module, or a handle, holds its unit.
UNIT = "_graphshard_unit"

#: The attribute of a DTensor parameter whose forward reads the whole tensor, and no DTensor; of a module: their names.
READ_WHOLE = "_graphshard_read_whole"

#: An input of a backward: the gradient of a result of its forward.
TANGENT_INPUT = "tangents_"

#: A full parameter that its unit keeps gathered (:mod:`graphshard.backend.half`).
GATHERED_INPUT = "gathered_"

#: A gradient of earlier micro-batches: not reduced, or reduced over the shard axis only.
WAITING_INPUTS = ("unreduced_", "partial_")


class UnitState(Protocol):
    """The part of a unit that a running graph reads and changes."""

    @property
    def keeps_from_forward(self) -> bool:
        """Whether parameters that a forward gathers stay gathered for later forwards."""
        ...

    def gathered_value(self, name: str) -> Tensor | None:
        """The full parameter if it is gathered and its shard has not changed since; else None."""
        ...

    def keep(self, name: str, full: Tensor) -> None:
        """Keeps a gathered parameter until the unit is resharded or its shard changes."""
        ...

    def meet_for_gather(self, names: Sequence[str], call: UnshardCall, *, can_skip: bool = False) -> None:
        """Meets the other ranks before they gather the named parameters of the unit."""
        ...

    def warn_unplanned(self) -> None:
        """Warns, once for each model, that a graph runs the shard ops one by one."""
        ...

    def reduce_unplanned(self, call: ReduceGradCall) -> Tensor:
        """Reduces one gradient in a graph that runs the shard ops one by one; zeros if it waits."""
        ...

    def reduce(self, calls: list[ReduceGradCall]) -> list[Tensor | None]:
        """Reduces gradients in an uncompiled backward; None for each that waits for a later micro-batch."""
        ...


def new_handle(**attributes: Any) -> Tensor:
    """An empty tensor with attributes, which :func:`attribute_of` also finds for other tensors over its memory."""
    handle = torch.empty(0, dtype=torch.int8)
    for name, value in attributes.items():
        setattr(handle, name, value)
    _handles_by_memory()[storage_id(handle)] = handle
    return handle


def attribute_of(handle: Tensor | None, name: str) -> Any:
    """An attribute of a handle, or of the handle whose memory a tensor shares; None if there is none."""
    value = getattr(handle, name, None)
    if value is not None or handle is None or type(handle) is not Tensor:
        return value
    if handle.dtype != torch.int8 or handle.numel():
        return None
    return getattr(_handles_by_memory().get(storage_id(handle)), name, None)


@functools.cache
def _handles_by_memory() -> WeakValueDictionary[int, Tensor]:
    return WeakValueDictionary()


def unit_state_of(handle: Tensor | None) -> UnitState | None:
    """The unit of a handle; None for a stand-in (while tracing, or in a test)."""
    state: UnitState | None = attribute_of(handle, UNIT)
    return state
