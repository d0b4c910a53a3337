"""What autograd saves of full parameters in an uncompiled forward: where they are to be found again, not their values.

Autograd saves the full parameters that a forward reads, or views of them, for the backward. It would keep each until
then. So hooks of saved tensors replace what lies in the memory of a full parameter by a :class:`_Token`. After the
forward the unit may free the full parameters. A backward that needs one has the unit gathered again, and takes the same
view of the new memory.

The hooks leave all other tensors as they are. Autograd does not check versions of tensors that go through hooks, so the
hooks check them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat import get_proxy_mode, storage_id, transforms_active
from ..._compat_autograd import (
    HooksOf,
    hooks_are_enabled,
    hooks_in_force,
    is_of_checkpoint,
    unseen_by_checkpoint,
)
from ...errors import ParameterStateError, UnsupportedShardingError
from ...ir import unit_state_of
from .shard_versions import FullRead, Version, version_of


class HoldsShard(Protocol):
    """The part of a ``ParameterSlot`` that saved tensors need."""

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter."""


class GathersAgain(Protocol):
    """The part of a ``Unit`` that saved tensors need."""

    @property
    def label(self) -> str:
        """Path of the unit's module."""

    def gathered_value(self, name: str) -> Tensor | None:
        """The full parameter if it is gathered and its shard has not changed since; else None."""

    def gather_for_backward(self) -> None:
        """Gathers all parameters, and keeps them until the backward has left the unit."""

    def forget(self, gathers: Sequence[GatheredOnce]) -> None:
        """Ends the forward that some gathers were for."""


def can_hook() -> bool:
    """Whether hooks of saved tensors may be set here: no transform of ``torch.func`` runs, and nothing is traced."""
    return hooks_are_enabled() and not transforms_active() and get_proxy_mode() is None


def refuse_transform(label: str) -> None:
    """Refuses ``torch.func.grad`` and its relatives inside a forward, with the way out; called as the forward ends.

    Raises:
        UnsupportedShardingError: such a transform has ended the forward of unit ``label``.
    """
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and "don't yet support saved tensor hooks" in str(error):
        raise UnsupportedShardingError(
            f"the forward of unit {label} calls torch.func.grad, vjp, jacrev or hessian, which do not work under hooks "
            "of saved tensors, and an uncompiled backward gathers by such hooks: call set_unshard_in_backward(False) "
            "on the module of this unit, so that autograd keeps its full parameters, or compile the model"
        ) from error


class GatheredOnce:
    """Full parameters that a forward has got from one gather, as long as its backward may need them.

    Attributes:
        unit: the unit that gathers them.
        fulls: those that are not freed, by name; without a graph of autograd.
        written: names of those that the forward has written to; they are not freed.
    """

    def __init__(
        self, unit: GathersAgain, fulls: Mapping[str, Tensor], slots: Mapping[str, HoldsShard]
    ) -> None:
        self.unit = unit
        self.fulls = {name: full.detach() for name, full in fulls.items()}
        self._dtypes = {name: full.dtype for name, full in fulls.items()}
        self.written: set[str] = set()
        self._shards: dict[str, tuple[HoldsShard, weakref.ref[Any], Version]] = {}
        for name, slot in slots.items():
            shard = slot.param
            self._shards[name] = (slot, weakref.ref(shard), version_of(shard))

    @property
    def is_freed(self) -> bool:
        """Whether a parameter of the gather is freed."""
        return len(self.fulls) < len(self._shards)

    def free(self) -> None:
        """Frees the full parameters, but those that the forward has written to."""
        self.fulls = {name: full for name, full in self.fulls.items() if name in self.written}

    def valid(self, name: str) -> Tensor | None:
        """The full parameter, if it is not freed, not written to, and its shard has not changed; else None."""
        full = self.fulls.get(name)
        return full if full is not None and name not in self.written and self._is_current(name) else None

    def _is_current(self, name: str) -> bool:
        slot, shard, version = self._shards[name]
        param = slot.param
        return shard() is param and version_of(param) == version

    def gathered_again(self, name: str) -> Tensor:
        """The full parameter, from another gather, in the dtype that the forward has read.

        Raises:
            ParameterStateError: the shard has changed since the forward, or is gathered in a dtype of less precision.
        """
        if not self._is_current(name):
            raise ParameterStateError(
                f"parameter {name} of unit {self.unit.label} changed after the forward whose backward now gathers it "
                "again, so old activations would meet new weights: run backward() before optimizer.step() or "
                "load_state_dict(), or keep the unit gathered with reshard_after_forward=False"
            )
        full = self.unit.gathered_value(name)
        if full is None:
            self.unit.gather_for_backward()
            full = self.unit.gathered_value(name)
        assert full is not None, f"{name} was gathered for a backward and is not there"
        return (
            full if _real_dtype(full.dtype) == _real_dtype(self._dtypes[name]) else self._as_read(name, full)
        )

    def _as_read(self, name: str, full: Tensor) -> Tensor:
        """Casts a full parameter, gathered since the unit's dtypes have changed, to the dtype before the change."""
        dtype = self._dtypes[name]
        if torch.promote_types(full.dtype, dtype) != full.dtype:
            raise ParameterStateError(
                f"parameter {name} of unit {self.unit.label} was read in {dtype} by the forward whose backward now "
                f"gathers it again, and forwards since then gather it in {full.dtype}: run backward() before the next "
                "forward in the other mode"
            )
        return full.to(dtype)


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a complex parameter, that of the reals in which it is gathered."""
    return dtype.to_real() if dtype.is_complex else dtype


@dataclass(frozen=True, slots=True)
class Gathered:
    """A full parameter, its slot, and the shard it was gathered from with the version that this had."""

    full: Tensor
    slot: HoldsShard
    shard: Any
    version: Version


class PendingFulls(Protocol):
    """The part of a ``PendingGather`` that a unit keeps."""

    def take(self) -> dict[str, Tensor]:
        """Waits. Returns the full parameters by name; none if they were taken before."""


class KeptGathered(dict[str, Gathered]):
    """The full parameters that a unit keeps, by name.

    Attributes:
        begun: a gather by ``unshard(async_op=True)`` that nobody has waited for; whoever asks for a value first does.
    """

    begun: PendingFulls | None = None

    def keep(
        self, name: str, full: Tensor, slot: HoldsShard, gathered_from: tuple[Any, Version] | None = None
    ) -> None:
        """Keeps a full parameter as long as its shard is this one in this version; None: as they are now."""
        if full.is_inference():  # not kept: a later forward could not save it for its backward
            return
        full = full.detach() if full.requires_grad else full
        self[name] = Gathered(full, slot, *(gathered_from or _shard_of(slot)))

    def begin(self, pending: PendingFulls, slots: Iterable[tuple[str, HoldsShard]]) -> None:
        """Has :meth:`value` wait for the gather of these parameters."""
        self.begun = pending
        self._shards = {name: (slot, _shard_of(slot)) for name, slot in slots}

    def finish(self) -> bool:
        """Waits for the gather that was begun, if there is one; whether there was."""
        begun, self.begun = self.begun, None
        for name, full in begun.take().items() if begun is not None else ():
            self.keep(name, full, *self._shards[name])
        return begun is not None

    def value(self, name: str) -> Tensor | None:
        """The full parameter if it is gathered and its shard has not changed since; else None."""
        if self.begun is not None:
            self.finish()
        kept = self.get(name)
        if kept is None or (param := kept.slot.param) is not kept.shard or kept.version != version_of(param):
            return None
        return kept.full


def _shard_of(slot: HoldsShard) -> tuple[Any, Version]:
    """The shard of a slot and its version."""
    param = slot.param
    return param, version_of(param)


@dataclass(frozen=True, slots=True)
class _Token:
    """A view of a full parameter.

    Attributes:
        source: the gather that the full parameter is of.
        name: name of the parameter.
        version: version of the full parameter when the view was saved.
        place: byte offset in the full parameter, shape, strides and dtype.
        spec: layout of the DTensor that the view is the local tensor of; None for a plain tensor.
    """

    source: GatheredOnce
    name: str
    version: int
    place: tuple[int, torch.Size, tuple[int, ...], torch.dtype]
    spec: Any

    def restore(self) -> Tensor:
        """The view, of the full parameter or of one that is gathered again."""
        full = self.source.fulls.get(self.name)
        if full is None:
            full = self.source.gathered_again(self.name)
        else:
            _check_version(full, self.version)
        offset, shape, stride, dtype = self.place
        if dtype == full.dtype:  # which has no graph
            view = full.as_strided(shape, stride, full.storage_offset() + offset // dtype.itemsize)
        else:
            view = torch.empty(0, dtype=dtype, device=full.device)
            start = full.storage_offset() * full.element_size() + offset
            with torch.no_grad():
                view.set_(full.untyped_storage(), start // dtype.itemsize, shape, stride)
        return view if self.spec is None else DTensor(view, self.spec, requires_grad=False)


class KeptForBackward:
    """The gathers of a unit in forwards whose graphs autograd still holds."""

    def __init__(self) -> None:
        self._gathers: list[weakref.ref[GatheredOnce]] = []

    def __iter__(self) -> Iterator[GatheredOnce]:
        return filter(None, [reference() for reference in self._gathers])

    def add(self, gathered: GatheredOnce) -> None:
        """Notes a gather, and forgets those whose graphs are gone."""
        self._gathers = [each for each in self._gathers if each() is not None]
        self._gathers.append(weakref.ref(gathered))

    def valid(self, name: str) -> Tensor | None:
        """The full parameter, if a gather has it as its shard is now; else None."""
        for gathered in self:
            full = gathered.valid(name)
            if full is not None:
                return full
        return None

    @property
    def is_freed(self) -> bool:
        """Whether a backward will have to gather again."""
        return any(gathered.is_freed for gathered in self)

    def free(self) -> None:
        """Frees all full parameters, but those that forwards have written to."""
        for gathered in self:
            gathered.free()

    def note_written(self, names: Iterable[str], running: Sequence[GatheredOnce]) -> None:
        """Has parameters that the forwards of ``running`` have written to stay; older forwards lose them.

        Older forwards may share their memory, and must not compute with the new values.
        """
        for gathered in self:
            for name in names:
                if gathered in running and name in gathered.fulls:
                    gathered.written.add(name)
                elif name not in gathered.written:
                    gathered.fulls.pop(name, None)


class Span:
    """How many modules of a unit, in one forward of it, its backward has yet to enter."""

    num_to_enter = 0


class ForwardReads(dict[str, FullRead]):
    """The full parameters that a forward of a unit reads, by name, and the gathers that they are from.

    Attributes:
        to_run: ids of the unit's modules that have not run in this forward.
        span: shared with the hooks of the backward, which must not hold full parameters.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.gathers: list[GatheredOnce] = []
        self.to_run = {id(module) for module in modules}
        self.span = Span()

    def has_more_to_run(self, module: nn.Module) -> bool:
        """Whether another module goes on with these reads after ``module``: not if a parameter was written to."""
        self.to_run.discard(id(module))
        return bool(self.to_run) and not any(gathered.written for gathered in self.gathers)


class SavedParameters:
    """The hooks of one model.

    Attributes:
        alone: the gathers of parameters that the forward has read outside of the forwards of their units.
    """

    def __init__(self) -> None:
        self.alone: list[GatheredOnce] = []
        self._by_memory: dict[int, tuple[GatheredOnce, str]] = {}
        self._contexts: list[HooksOf | None] = []
        self._hooks = (unseen_by_checkpoint(partial(SavedParameters._pack, self)), self._unpack)

    def add(self, gathered: GatheredOnce) -> None:
        """From now on, what autograd saves of the full parameters is replaced."""
        for name, full in gathered.fulls.items():
            if type(full) is Tensor:  # another class may hold its data elsewhere
                self._by_memory[storage_id(full)] = (gathered, name)

    def remove(self, gathered: GatheredOnce) -> None:
        """From now on, autograd keeps what it saves of the full parameters. Call it before they are freed."""
        for full in gathered.fulls.values():
            if type(full) is Tensor:
                self._by_memory.pop(storage_id(full), None)

    def clear(self) -> None:
        """Forgets all full parameters."""
        self._by_memory.clear()
        self.alone.clear()

    def begin(self, is_replaced: bool) -> None:
        """Begins a forward of a unit; without ``is_replaced`` no hooks of this class are in force in it."""
        context = self._context(is_replaced) if can_hook() else None
        self._contexts.append(context)
        if context is not None:
            context.__enter__()

    def end(self) -> None:
        """Ends the forward that has begun last."""
        context = self._contexts.pop()
        if context is not None:
            context.__exit__()

    def _context(self, is_replaced: bool) -> HooksOf | None:
        outer = hooks_in_force()
        if outer is None:
            return HooksOf(self._hooks) if is_replaced else None
        is_own = isinstance(outer[0], partial) and outer[0].func is SavedParameters._pack
        if not is_replaced:
            return HooksOf(None) if is_own else None
        # A checkpointed region counts what is saved, and saves nothing itself.
        if outer[0] is self._hooks[0] or is_of_checkpoint(outer):
            return None
        return HooksOf(self._inside_of(*outer))

    def _inside_of(
        self, outer_pack: Callable[[Tensor], Any], outer_unpack: Callable[[Any], Tensor]
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Hooks that leave all but full parameters and handles to other hooks, which the user has set."""

        def pack(value: Tensor) -> Any:
            if unit_state_of(value) is not None:
                return value
            token = self._token(value)
            return token if token is not None else (outer_pack(value),)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return packed.restore() if type(packed) is _Token else outer_unpack(packed[0])

        return unseen_by_checkpoint(pack, (outer_pack, outer_unpack)), unpack

    def _pack(self, value: Tensor) -> Any:
        token = self._token(value) if self._by_memory else None
        # The result of an op is given itself: if its own graph held it, nobody could free either.
        return token if token is not None else (value.detach(), value._version)

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is _Token:
            return packed.restore()
        value, version = packed
        _check_version(value, version)
        return value

    def _token(self, value: Tensor) -> _Token | None:
        local: Tensor = value._local_tensor if type(value) is DTensor else value
        if not (type(local) in (Tensor, nn.Parameter) or type(local).__name__ == "FullParameter"):
            return None
        try:
            found = self._by_memory.get(storage_id(local))
        except (RuntimeError, NotImplementedError):  # a tensor without memory, such as one of a vmap
            return None
        if found is None or local.is_conj() or local.is_neg():
            return None
        gathered, name = found
        full = gathered.fulls.get(name)
        if full is None:  # freed while the forward runs, so this is other memory, or what a user of it holds
            return None
        offset = local.storage_offset() * local.element_size() - full.storage_offset() * full.element_size()
        place = (offset, local.shape, local.stride(), local.dtype)
        spec = value._spec if type(value) is DTensor else None
        return _Token(gathered, name, full._version, place, spec)


def _check_version(value: Tensor, version: int) -> None:
    if value._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{value.type()} {list(value.shape)}] is at version {value._version}; expected version {version} instead."
        )
