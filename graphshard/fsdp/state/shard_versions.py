"""Whether a shard or a full parameter has changed in place.

Of a shard this is asked when a backward gathers again what its forward gathered. An in-place op on a DTensor moves the
version counter of the DTensor only. One on its local tensor moves that of the local tensor only. A foreach or fused
optimizer moves neither (torch 2.13). So both counters are read, and a hook moves the second one after every optimizer
step on DTensors (:mod:`~graphshard.fsdp.state.watched_optimizers`).

Of a full parameter it is asked at the end of an uncompiled forward, which then writes the change back to the shards
(:func:`~graphshard.fsdp.state.eager_collectives.write_back`). A write through ``.data`` moves no counter, so a full
parameter is a :class:`FullParameter`, which notes that ``.data`` was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._compat import no_torch_function, storage_id
from ...errors import ParameterStateError

Version = tuple[int, int]

#: Attribute of a shard: its id and its storage.
_STORAGE = "_graphshard_storage"

#: Attribute of a gradient of a shard: its id, its storage, and the name of the parameter.
_GRADIENT = "_graphshard_gradient"


class _KeptStorage:
    """The storage of a DTensor, which has no memory. No other storage gets its number while it is kept.

    Copied or saved with its tensor it becomes an empty set, which torch.load takes.
    """

    def __init__(self, value: DTensor) -> None:
        self._storage = value.untyped_storage()

    def is_of(self, value: DTensor) -> bool:
        return self._storage._cdata == storage_id(value)

    def __reduce__(self) -> tuple[type[set[None]], tuple[()]]:
        return set, ()


def version_of(param: DTensor) -> Version:
    """A value that differs from an earlier one if the parameter was changed in place in between."""
    return param._version, param._local_tensor._version


def note_storage(param: DTensor, *, anew: bool = True) -> None:
    """Notes the storage of a shard, for :func:`refuse_lost_data`; unless ``anew``, only if it has no note."""
    # A copy of the shard gets the attribute, too: so the id.
    if anew or vars(param).get(_STORAGE, (None,))[0] != id(param):
        vars(param)[_STORAGE] = id(param), _KeptStorage(param)


def refuse_lost_data(param: DTensor, name: str) -> None:
    """Refuses a shard to whose ``.data`` something was assigned, which leaves its local tensor as it was."""
    noted = vars(param).get(_STORAGE)
    if noted is not None and noted[0] == id(param) and not noted[1].is_of(param):
        raise ParameterStateError(
            f"parameter {name or f'of shape {tuple(param.shape)}'}: its .data was assigned to outside of a forward, "
            "which changes no DTensor; write to the parameter with copy_() under torch.no_grad(), or assign a new one "
            "to the module's attribute (torch.nn.utils.vector_to_parameters assigns .data)"
        )


def note_gradient(grad: Tensor | None, name: str) -> None:
    """Notes the storage of a gradient that a backward has given to a shard, for the next step of an optimizer."""
    if type(grad) is DTensor and vars(grad).get(_GRADIENT, (None,))[0] != id(grad):
        vars(grad)[_GRADIENT] = id(grad), _KeptStorage(grad), name


def gradients_of_lost_data(params: Sequence[Tensor]) -> list[str]:
    """Names of parameters to the ``.data`` of whose gradients something was assigned."""
    notes = [(grad, vars(grad).get(_GRADIENT)) for param in params if type(grad := param.grad) is DTensor]
    return [note[2] for grad, note in notes if note and note[0] == id(grad) and not note[1].is_of(grad)]


class FullParameter(Tensor):
    """A full parameter as an uncompiled forward reads it. Results of ops on it are plain tensors.

    Attributes:
        before: its values when ``.data`` was first asked for; None before that.
    """

    __torch_function__ = no_torch_function

    before: Tensor | None = None

    @property
    def data(self) -> Tensor:
        """``Tensor.data``: a tensor in the same memory, without gradients and with a version counter of its own."""
        if self.before is None:
            self.before = self.detach().clone()
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.before is None:
            self.before = self.detach().clone()
        Tensor.data.__set__(self, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRead:
    """A full parameter that an uncompiled forward has read, and what it was like then.

    Attributes:
        full: the full parameter, or this rank's piece of a DTensor.
        shown: what the forward reads: ``full``, or the DTensor around it.
        versions: version counters of both.
        storages: the storages of both; an assignment to ``.data`` gives a tensor another one. They are kept, so that
            no other gets their number.
        source: the autograd node that made ``shown``.
        shard: the version of the shard that was gathered.
    """

    full: Tensor
    shown: Tensor
    versions: Version
    storages: tuple[torch.UntypedStorage, torch.UntypedStorage]
    source: Any
    shard: Version

    @staticmethod
    def of(full: Tensor, shown: Tensor, shard: Version, *, in_graph: bool = False) -> FullRead:
        """The record of a full parameter that was just gathered; one gathered in a graph stays a plain tensor."""
        if not in_graph and type(full) is Tensor and full is shown:
            full.__class__ = FullParameter
        return FullRead(
            full=full,
            shown=shown,
            versions=(full._version, shown._version),
            storages=(full.untyped_storage(), shown.untyped_storage()),
            source=shown.grad_fn,
            shard=shard,
        )

    def renewed(self, shard: Version) -> FullRead:
        """The record once the changes are written back, of which ``shard`` is the version."""
        if isinstance(self.full, FullParameter):
            self.full.before = None
        return replace(
            self,
            versions=(self.full._version, self.shown._version),
            storages=(self.full.untyped_storage(), self.shown.untyped_storage()),
            shard=shard,
        )

    @property
    def is_changed(self) -> bool:
        """Whether the forward has written to it, or has asked for ``.data``, by which it may have."""
        return self._has_moved or self.before is not None

    @property
    def _has_moved(self) -> bool:
        if (self.full._version, self.shown._version) != self.versions:
            return True
        full, shown = self.storages
        if storage_id(self.full) != full._cdata:
            return True
        return self.shown is not self.full and storage_id(self.shown) != shown._cdata

    @property
    def is_lost(self) -> bool:
        """Whether ``.data`` of a DTensor was assigned to: its local tensor has not changed."""
        return self.shown is not self.full and storage_id(self.shown) != self.storages[1]._cdata

    @property
    def before(self) -> Tensor | None:
        """Its values before ``.data`` was asked for."""
        return getattr(self.full, "before", None)

    @property
    def is_written(self) -> bool:
        """Whether the forward has written to it; compares the values if only ``.data`` was asked for."""
        before = self.before
        if (self.full._version, self.shown._version) != self.versions or (before is None and self._has_moved):
            return True
        return before is not None and not (
            before.shape == self.full.shape and torch.equal(before, self.full.detach())
        )
