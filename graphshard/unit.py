"""A unit: the parameters of one ``fully_shard`` call, and what of them changes between micro-batches.

Flags (reduce gradients or not, free parameters after the backward or not), parameters that stay
gathered, and gradients that are not reduced yet belong to the unit, not to a graph. Each unit has a
*handle*, an empty tensor: the shard ops take it as an argument, so it reaches every graph that reads
the unit's parameters, and the backward of that graph too, and leads back to the unit. All of it is
read when a graph runs, so flipping a flag between a forward and its backward counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ._compat import queue_after_backward
from .buckets import PACK, UNPACK
from .collectives import ALL_GATHER, WAIT, EagerEmitter, emit_cast, emit_pad
from .errors import ParameterStateError
from .mesh import NO_AXIS, MeshAxis
from .outer_layout import OuterLayout
from .params import ReduceGradCall, UnshardCall, gradient_call, padded_shape
from .versions import Version, version_of

#: Where a module keeps the slots of its sharded parameters, and a unit's modules and handle the unit.
SLOTS = "_graphshard_slots"
UNIT = "_graphshard_unit"


@dataclass(eq=False)
class Tree:
    """What all units of one model share.

    Attributes:
        in_forward: a forward of the model is running.
        roots: the outermost modules.
        is_last_backward: what is left over is reduced at the end of this backward.
        waiting: gradients of some unit wait for their reduction.
    """

    in_forward: bool = False
    roots: list[nn.Module] = field(default_factory=list)
    is_last_backward: bool = True
    waiting: bool = False
    _end_is_queued: bool = False

    def units(self) -> list[Unit]:
        """The units below the roots, outermost first."""
        found = {
            id(module.__dict__[UNIT]): module.__dict__[UNIT]
            for root in self.roots
            for module in root.modules()
            if UNIT in module.__dict__
        }
        return list(found.values())

    def queue_end_of_backward(self) -> None:
        """Has :meth:`_end_backward` run once the backward that is running ends."""
        if self._end_is_queued:
            return
        self._end_is_queued = True
        queue_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._end_is_queued = False
        for unit in self.units():
            if unit.reshard_after_backward:
                unit.reshard()
            if self.is_last_backward:
                unit.reduce_left_over()
        self.waiting = any(unit.unreduced or unit.partial for unit in self.units())


@dataclass(eq=False, kw_only=True)
class ParameterSlot:
    """One sharded parameter: where it lives and how it is gathered and reduced.

    Attributes:
        shape: of what is gathered: the whole parameter, or this rank's piece of a DTensor.
        outer: the DTensor it is while gathered (tensor or expert parallel); None for a plain tensor.
        owners: the modules that hold it, with its name in each; several when it is tied.
        arguments: what follows shard and handle in a call of ``graphshard::unshard``.
        hidden: the sharded parameter, while the owners show the gathered one.
        version: its version when an uncompiled forward last read it.
    """

    unit: Unit
    name: str
    shape: torch.Size
    dim: int
    axis: MeshAxis
    replicate: MeshAxis = NO_AXIS
    outer: OuterLayout | None = None
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    arguments: tuple[Any, ...] = ()
    needs_op: bool = True
    hidden: nn.Parameter | None = None
    version: Version | None = None

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter."""
        owner, name = self.owners[0]
        return self.hidden if self.hidden is not None else owner._parameters[name]

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the whole parameter, over all ranks."""
        return self.shape if self.outer is None else self.outer.shape

    def as_read(self, piece: Tensor) -> Tensor:
        """What a forward reads, made from the gathered tensor."""
        return piece if self.outer is None else self.outer.wrap(piece)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterSlot:
        """The slot of a copied parameter; its copied owners enter themselves."""
        return replace(self, unit=copy.deepcopy(self.unit, memo), owners=[], hidden=None)

    def refresh(self) -> None:
        """Rebuilds ``arguments`` after the name, the unit's label or a setting changed."""
        policy = self.unit.mp_policy
        is_float = self.param.dtype.is_floating_point
        ranks = self.unit.reshard_ranks(self.axis.size)
        call = UnshardCall(
            shard=None,
            handle=None,
            name=self.name,
            unit=self.unit.label,
            shape=list(self.shape),
            dim=self.dim,
            dtype=policy.param_dtype if is_float else None,
            reshard=ranks,
            reshard_group=self.unit.regather.group_name if 1 < ranks < self.axis.size else "",
            axis=self.axis.label,
            group_size=self.axis.size,
            group_name=self.axis.group_name,
            replicate_axis=self.replicate.label,
            replicate_size=self.replicate.size,
            replicate_group=self.replicate.group_name,
            reduce_dtype=policy.reduce_dtype,
            divide_factor=self.unit.divide_factor,
            force_sum=self.unit.force_sum,
        )
        self.arguments = tuple(call[2:])
        is_alone = self.axis.size == 1 and self.replicate.size == 1
        self.needs_op = not is_alone or any(
            setting is not None for setting in (call.dtype, call.reduce_dtype, call.divide_factor)
        )

    def replace(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Puts another parameter in place of this one, in every module that shares it."""
        self.unit.reshard()
        for owner, each in self.owners if param is not None else [(module, name)]:
            owner._parameters[each] = param

    def show(self, full: Tensor) -> None:
        """Makes the owners show the gathered parameter instead of the shard."""
        if self.hidden is None:
            self.hidden = self.param
        shown = nn.Parameter(self.as_read(full.detach()), requires_grad=self.hidden.requires_grad)
        for owner, name in self.owners:
            owner._parameters[name] = shown

    def hide(self) -> None:
        """Makes the owners show the shard again."""
        if self.hidden is not None:
            for owner, name in self.owners:
                owner._parameters[name] = self.hidden
            self.hidden = None


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A full parameter, and the version its shard had when it was gathered."""

    full: Tensor
    version: Version


@dataclass(eq=False, kw_only=True)
class Unit:
    """The parameters claimed by one ``fully_shard`` call.

    Attributes:
        label: path of the unit's module, "root" for the outermost.
        reshard_after_forward: what the user said: True, False, a number of ranks, or None.
        mp_policy: dtypes of compute, reduction, inputs and outputs.
        divide_factor, force_sum: how gradients are averaged; see ``UnshardCall``.
        regather: the axis of ``reshard_after_forward`` ranks, if that is a number.
        input_device: where the root's inputs are moved to; None to leave them.
        reduce_grads: reduce gradients in the backward; False adds them up unreduced.
        all_reduce_grads: with a replicate axis, also sum over it; False keeps the partial sums.
        reshard_after_backward: free kept parameters once a backward has used them.
        unreduced: full gradients by parameter name, in the dtype of the reduction.
        partial: reduce-scattered gradients by parameter name, in the dtype of the reduction.
    """

    tree: Tree
    modules: list[nn.Module]
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    label: str = "root"
    is_root: bool = True
    divide_factor: float | None = None
    force_sum: bool = False
    input_device: torch.device | None = None
    regather: MeshAxis = NO_AXIS
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    slots: list[ParameterSlot] = field(default_factory=list)
    unreduced: dict[str, Tensor] = field(default_factory=dict)
    partial: dict[str, Tensor] = field(default_factory=dict)
    handle: Tensor = field(init=False)
    _gathered: dict[str, _Gathered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handle = torch.empty(0, dtype=torch.int8)
        setattr(self.handle, UNIT, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A unit of the copied modules, which enter themselves; a root until a copied root claims it."""
        fresh: dict[str, Any] = {"slots": [], "unreduced": {}, "partial": {}, "_gathered": {}}
        return replace(self, tree=Tree(), modules=[], label="root", is_root=True, **fresh)

    # -- parameters -------------------------------------------------------------------------------

    @property
    def reshards(self) -> bool:
        """Whether the backward gathers again: what the user said, else all but the root."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward is not False

    def reshard_ranks(self, group_size: int) -> int:
        """Ranks over which a full parameter is spread between forward and backward; 1 keeps it whole."""
        if not self.reshards:
            return 1
        given = self.reshard_after_forward
        return group_size if given is None or given is True else int(given)

    @property
    def keeps_from_forward(self) -> bool:
        """Whether what a forward gathers stays gathered for the forwards after it."""
        return not self.reshards and not self.reshard_after_backward

    def gathered_value(self, name: str) -> Tensor | None:
        """The full parameter if it is gathered, and its shard has not changed since."""
        kept = self._gathered.get(name)
        return kept.full if kept is not None and kept.version == self._version_of(name) else None

    def keep(self, name: str, full: Tensor) -> None:
        """Keeps a gathered parameter until the unit is resharded or its shard changes."""
        self._gathered[name] = _Gathered(full.detach(), self._version_of(name))

    def _version_of(self, name: str) -> Version:
        return version_of(self.slot_of(name).param)

    @property
    def is_gathered(self) -> bool:
        """Whether any parameter of the unit is gathered."""
        return bool(self._gathered)

    def start_unshard(self) -> PendingGather:
        """Starts gathering every parameter that is not gathered: one collective per dtype and group."""
        missing = []
        for slot in self.slots:
            if self.gathered_value(slot.name) is None:
                missing.append((slot, local_shard(slot)))
        return PendingGather.start(self, missing)

    def reshard(self) -> None:
        """Frees the gathered parameters and shows the shards."""
        self._gathered.clear()
        for slot in self.slots:
            slot.hide()

    def refresh(self) -> None:
        """After a setting changed: what the unit's next graphs are traced with."""
        for slot in self.slots:
            slot.refresh()

    # -- gradients that are not reduced yet -------------------------------------------------------

    def slot_of(self, name: str) -> ParameterSlot:
        """The slot of the parameter of this name."""
        return next(slot for slot in self.slots if slot.name == name)

    def add_unreduced(self, name: str, grad: Tensor) -> None:
        """Adds a full gradient to those that wait for a reduction."""
        _add(self.unreduced, name, grad)
        self.tree.waiting = True

    def add_partial(self, name: str, grad: Tensor) -> None:
        """Adds a reduce-scattered gradient to those that wait for an all-reduce."""
        _add(self.partial, name, grad)
        self.tree.waiting = True

    def reduce(self, call: ReduceGradCall) -> Tensor | None:
        """What an uncompiled backward does with a gradient: the shard's gradient, or None for later."""
        self.tree.queue_end_of_backward()
        if not self.reduce_grads:
            self.add_unreduced(call.name, call.grad.to(call.reduce_dtype or call.grad.dtype, copy=True))
            return None
        return self._reduce_now(call)

    def _reduce_now(self, call: ReduceGradCall) -> Tensor | None:
        call = call._replace(
            unreduced=self.unreduced.pop(call.name, None),
            partial=self.partial.pop(call.name, None),
            all_reduce=self.all_reduce_grads or call.replicate_size == 1,
        )
        reduced = torch.ops.graphshard.reduce_grad(*call)
        if call.all_reduce:
            return reduced
        self.add_partial(call.name, reduced)
        return None

    def reduce_left_over(self) -> None:
        """Reduces what earlier micro-batches left for parameters that the last one did not use."""
        if not self.reduce_grads:
            return
        waiting = set(self.unreduced) | (set(self.partial) if self.all_reduce_grads else set())
        for slot in self.slots:
            if slot.name not in waiting:
                continue
            local = local_shard(slot)
            call = UnshardCall(local, self.handle, *slot.arguments)
            grad = self.unreduced.pop(slot.name, None)
            if grad is None:
                grad = self.partial[slot.name].new_zeros(slot.shape)
            reduced = self._reduce_now(gradient_call(call, grad, local.shape, local.dtype))
            if reduced is not None:
                _add_gradient(slot.param, reduced)


class PendingGather:
    """A gather of several parameters of a unit that was started and not waited for."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._parts: list[tuple[list[tuple[ParameterSlot, Tensor]], list[list[int]], Tensor]] = []

    @staticmethod
    def start(unit: Unit, members: list[tuple[ParameterSlot, Tensor]]) -> PendingGather:
        pending = PendingGather(unit)
        emit = EagerEmitter()
        groups: dict[tuple[Any, ...], list[tuple[ParameterSlot, Tensor, Tensor]]] = {}
        for slot, local in members:
            call = UnshardCall(local, None, *slot.arguments)
            piece = emit_pad(emit, local.detach(), padded_shape(call.shape, call.dim, call.group_size))
            piece = emit_cast(emit, piece, call.dtype)
            key = (piece.dtype, call.group_name, call.group_size)
            groups.setdefault(key, []).append((slot, local, piece))
        for (_, group_name, group_size), entries in groups.items():
            pieces = [piece for _, _, piece in entries]
            packed = PACK(pieces, 1)
            gathered = ALL_GATHER(packed, group_size, group_name) if group_size > 1 else packed
            owners = [(slot, local) for slot, local, _ in entries]
            pending._parts.append((owners, [list(piece.shape) for piece in pieces], gathered))
        return pending

    def wait(self) -> None:
        """Waits, copies the parameters out of their buckets, and makes the unit show them."""
        for owners, shapes, gathered in self._parts:
            sizes = [int(torch.Size(shape).numel()) for shape in shapes]
            group_size = owners[0][0].axis.size
            flat = UNPACK(WAIT(gathered) if group_size > 1 else gathered, group_size, sizes)
            for (slot, _), shape, piece in zip(owners, shapes, flat, strict=True):
                by_rank = piece.view(group_size, *shape).unbind(0)
                full = torch.cat(by_rank, slot.dim).narrow(slot.dim, 0, slot.shape[slot.dim]).contiguous()
                self._unit.keep(slot.name, full)
        self._parts.clear()
        for slot in self._unit.slots:
            kept = self._unit.gathered_value(slot.name)
            if kept is not None:
                slot.show(kept)


def unit_of(handle: Tensor | None) -> Unit | None:
    """The unit a handle stands for; None for the stand-in of a handle (while tracing, or in a test)."""
    return getattr(handle, UNIT, None)


def local_shard(slot: ParameterSlot) -> Tensor:
    """This rank's piece of a parameter, as the shard ops take it.

    Raises:
        ParameterStateError: the parameter was replaced by a plain tensor, or is on the meta device.
    """
    param = slot.param
    if not isinstance(param, DTensor):
        raise ParameterStateError(
            f"parameter {slot.name} was replaced by a {type(param).__name__} of shape {tuple(param.shape)}; "
            f"a sharded parameter must stay a DTensor: use distribute_tensor() on the new value"
        )
    local = param.to_local()
    if local.device.type == "meta":
        modules = [module for root in slot.unit.tree.roots for module in root.modules()]
        slots = [each for module in modules for _, each in slots_of(module)]
        names = list(dict.fromkeys(each.name for each in slots if each.param.is_meta))
        raise ParameterStateError(
            f"{len(names)} parameter(s) are still on the meta device: {', '.join(names)}; "
            "call model.to_empty(device=...) and initialise them before the first forward"
        )
    return local


def slots_of(module: nn.Module) -> Iterator[tuple[str, ParameterSlot]]:
    """The sharded parameters that a module holds itself, by attribute name."""
    yield from module.__dict__.get(SLOTS, {}).items()


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    if name in grads:
        grads[name].add_(grad)
    else:
        grads[name] = grad


def _add_gradient(param: nn.Parameter, reduced: Tensor) -> None:
    grad = DTensor(reduced, param._spec, requires_grad=False)
    param.grad = grad if param.grad is None else param.grad + grad
