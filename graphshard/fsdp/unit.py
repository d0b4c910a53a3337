"""A unit: the parameters of one ``fully_shard`` call, and what of them changes between micro-batches.

Flags (reduce gradients or not, free parameters after the backward or not), parameters that stay
gathered, and gradients that are not reduced yet belong to the unit, not to a graph. Each unit has a
*handle*, an empty tensor: the shard ops take it as an argument, so it reaches every graph that reads
the unit's parameters, and the backward of that graph too, and leads back to the unit. All of it is
read when a graph runs, so flipping a flag between a forward and its backward counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from .._compat import queue_after_backward
from ..coordination import meet
from ..errors import ParameterStateError
from ..ir import (
    COMMS,
    NO_AXIS,
    UNIT,
    MeshAxis,
    ReduceGradCall,
    UnshardCall,
    UserComms,
    gradient_call,
    unit_state_of,
)
from .eager_collectives import StartedGather, reduce_together
from .gather_extensions import calls_before, full_after
from .outer_dtensor import OuterLayout
from .shard_versions import Version, version_of

#: Where a module keeps the slots of its sharded parameters.
SLOTS = "_graphshard_slots"

#: The label of the outermost unit.
ROOT = "root"

_GATHER_REMEDY = (
    "Ranks that use different parts of a model must gather the same parameters: shard the module that holds "
    "all of these parts as one unit, and call set_reduce_scatter_unused_params(True) on it"
)
_REDUCE_REMEDY = (
    "Parameters without a gradient on some ranks need set_reduce_scatter_unused_params(True) on their module"
)
_RUN_REMEDY = "Every rank must take the same branches of compiled code"


@dataclass(eq=False)
class Tree:
    """What all units of one model share.

    Attributes:
        in_forward: a forward of the model is running.
        roots: the outermost modules.
        is_last_backward: what is left over is reduced at the end of this backward.
        waiting: gradients of some unit wait for their reduction.
        max_reductions: the largest that any unit asks for.
        is_broken: Dynamo has cut a forward of the model into several graphs.
        numbers: by process group, the place of this model among those whose graphs were planned there.
    """

    in_forward: bool = False
    roots: list[nn.Module] = field(default_factory=list)
    is_last_backward: bool = True
    waiting: bool = False
    max_reductions: int = 0
    is_broken: bool = False
    numbers: dict[str, int] = field(default_factory=dict)
    _end_is_queued: bool = False
    _last_run: str = ""
    _next_run: dict[str, str] = field(default_factory=dict)
    _branches: dict[str, set[str]] = field(default_factory=dict)

    def follow(self, group_name: str, run: str, what: str, *, branch: str) -> None:
        """Called before a compiled graph whose collectives are ``run`` starts.

        Where it follows what it followed the last time, nothing happens. Elsewhere the ranks meet:
        they have the same past, so if one of them runs something else, at least one gets here. Where
        several branches have followed, all ranks meet each time.

        Args:
            branch: tells forward graphs apart, whatever the state of their units; "" for a backward.
        """
        branches = self._branches.setdefault(self._last_run, set())
        if branch:
            branches.add(branch)
        if self._next_run.get(self._last_run) != run or len(branches) > 1:
            meet(group_name, f"run {run}", what=what, remedy=_RUN_REMEDY)
        self._next_run[self._last_run] = run
        self._last_run = run

    def reset(self) -> None:
        """Drops what a forward or a backward that was cut short has left."""
        self.in_forward = self.waiting = self._end_is_queued = False
        self._last_run = ""
        for unit in self.units():
            unit.drop_iteration()

    def units(self) -> list[Unit]:
        """The units below the roots, outermost first."""
        found = {
            id(module.__dict__[UNIT]): module.__dict__[UNIT]
            for root in self.roots
            for module in root.modules()
            if UNIT in module.__dict__
        }
        return list(found.values())

    def groups(self) -> list[str]:
        """Names of the process groups of more than one rank over which parameters are sharded or copied."""
        axes = (axis for unit in self.units() for slot in unit.slots for axis in (slot.axis, slot.replicate))
        return list(dict.fromkeys(axis.group_name for axis in axes if axis.size > 1 and axis.group_name))

    def queue_end_of_backward(self) -> None:
        """Has :meth:`_end_backward` run once the backward that is running ends."""
        if self._end_is_queued:
            return
        self._end_is_queued = True
        queue_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        if not self._end_is_queued:  # the iteration was reset
            return
        self._end_is_queued = False
        for unit in self.units():
            unit.end_backward()
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
        is_extended: the shard is a tensor subclass that says itself how it is gathered.
        row_offset: where the shard begins in the unit's row; see ``UnshardCall``.
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
    is_extended: bool = False
    row_offset: int = -1

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
            device=self.unit.compute_device,
            reduce_group=self.unit.reduce_group,
            custom=self.unit.comms.names(),
            forward_prefetch=_labels(self.unit.forward_prefetch),
            backward_prefetch=_labels(self.unit.backward_prefetch),
            max_reductions=self.unit.tree.max_reductions,
            reshard_fixed=self.unit.reshard_after_forward is not None,
            row_offset=self.row_offset,
        )
        self.arguments = tuple(call[2:])
        is_alone = self.axis.size == 1 and self.replicate.size == 1
        self.needs_op = (
            not is_alone
            or self.is_extended
            or any(
                setting is not None
                for setting in (call.dtype, call.reduce_dtype, call.divide_factor, call.device)
            )
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
        keeps_between: a planner has them stay gathered for the next micro-batch while gradients are not reduced.
        compute_device: where full parameters are, if their shards are kept on the CPU; else None.
        comms: the collectives the user put in place of the process group's.
        reduce_group: process group of the reduce-scatters, if not the one of the gathers; else "".
        forward_prefetch, backward_prefetch: units whose gathers start right after this one's.
        max_reductions: reductions of the model that may be open at a time; 0 for the schedule's own.
        reduces_unused: reduce zeros for parameters that got no gradient.
        unreduced: full gradients by parameter name, in the dtype of the reduction.
        partial: reduce-scattered gradients by parameter name, in the dtype of the reduction.
        in_use: the full parameters by name, while an uncompiled forward of the unit runs (empty before
            the first of them is read); else None.
    """

    tree: Tree
    modules: list[nn.Module]
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    label: str = ROOT
    is_root: bool = True
    divide_factor: float | None = None
    force_sum: bool = False
    input_device: torch.device | None = None
    regather: MeshAxis = NO_AXIS
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    keeps_between: bool = False
    compute_device: torch.device | None = None
    comms: UserComms = field(default_factory=UserComms)
    reduce_group: str = ""
    forward_prefetch: list[Unit] = field(default_factory=list)
    backward_prefetch: list[Unit] = field(default_factory=list)
    max_reductions: int = 0
    reduces_unused: bool = False
    slots: list[ParameterSlot] = field(default_factory=list)
    unreduced: dict[str, Tensor] = field(default_factory=dict)
    partial: dict[str, Tensor] = field(default_factory=dict)
    handle: Tensor = field(init=False)
    in_use: dict[str, Tensor] | None = None
    _gathered: dict[str, _Gathered] = field(default_factory=dict)
    _prefetched: PendingGather | None = None
    _has_run: bool = False

    def __post_init__(self) -> None:
        self.handle = torch.empty(0, dtype=torch.int8)
        setattr(self.handle, UNIT, self)
        setattr(self.handle, COMMS, self.comms)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A unit of the copied modules, which enter themselves; a root until a copied root claims it."""
        fresh: dict[str, Any] = {"slots": [], "unreduced": {}, "partial": {}, "_gathered": {}, "in_use": None}
        fresh |= {"comms": UserComms(**vars(self.comms)), "_prefetched": None, "_has_run": False}
        fresh |= {"forward_prefetch": [], "backward_prefetch": [], "keeps_between": False}
        return replace(self, tree=Tree(), modules=[], label=ROOT, is_root=True, **fresh)

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
        return self.stays_gathered or (not self.reshards and not self.reshard_after_backward)

    @property
    def stays_gathered(self) -> bool:
        """Whether parameters that are gathered stay so for the next micro-batch."""
        return self.keeps_between and not self.reduce_grads

    def gathered_value(self, name: str) -> Tensor | None:
        """The full parameter if it is gathered, and its shard has not changed since."""
        kept = self._gathered.get(name)
        return kept.full if kept is not None and kept.version == self._version_of(name) else None

    def keep(self, name: str, full: Tensor) -> None:
        """Keeps a gathered parameter until the unit is resharded or its shard changes; none of an inference mode."""
        if full.is_inference():  # no later forward could save it
            return
        self._gathered[name] = _Gathered(full.detach(), self._version_of(name))

    def _version_of(self, name: str) -> Version:
        return version_of(self.slot_of(name).param)

    def held(self) -> Iterator[Tensor]:
        """What the unit holds beside shards: gathered parameters, and gradients that wait for a reduction."""
        yield from (kept.full for kept in self._gathered.values())
        yield from self.unreduced.values()
        yield from self.partial.values()

    @property
    def is_gathered(self) -> bool:
        """Whether any parameter of the unit is gathered."""
        return bool(self._gathered)

    def start_unshard(self, slots: Sequence[ParameterSlot] | None = None) -> PendingGather:
        """Starts gathering parameters (all, or ``slots``) that are not gathered: one collective per dtype."""
        wanted = self.slots if slots is None else slots
        missing = [(slot, local_shard(slot)) for slot in wanted if self.gathered_value(slot.name) is None]
        return PendingGather(self, missing)

    def prefetch(self) -> None:
        """Starts gathering for the forward that comes, unless that was done."""
        if self._prefetched is None:
            self._prefetched = self.start_unshard()

    def gather(self, slots: Sequence[ParameterSlot]) -> list[Tensor]:
        """The full parameters of ``slots``, gathered now where they are not yet; keeps what is to be kept."""
        pending, self._prefetched = self._prefetched or self.start_unshard(slots), None
        fresh = pending.take()
        result = []
        for slot in slots:
            full = fresh.get(slot.name)
            if full is None:
                kept = self.gathered_value(slot.name)
                assert kept is not None, f"{slot.name} is neither gathered nor being gathered"
                full = kept.detach()
            elif self.keeps_from_forward:
                self.keep(slot.name, full)
            result.append(full)
        return result

    def meet_for_gather(self, names: Sequence[str], call: UnshardCall) -> None:
        """Meets the other ranks before they gather the named parameters of this unit."""
        if call.group_size > 1:
            step = f"gather unit {self.label}: {', '.join(names)}"
            meet(call.group_name, step, what=_shortened(step), remedy=_GATHER_REMEDY)

    def begin_forward(self) -> dict[str, Tensor] | None:
        """An uncompiled forward of the unit begins; returns what :meth:`end_forward` takes."""
        outer, self.in_use = self.in_use, {}
        return outer

    def end_forward(self, outer: dict[str, Tensor] | None) -> None:
        """An uncompiled forward of the unit ends: frees its parameters (autograd keeps what it needs)."""
        self.in_use = outer
        if self.reshards and self.is_gathered:
            self.reshard()

    def drop_prefetched(self) -> None:
        """Waits for a gather that nothing has asked for, and frees its result."""
        if self._prefetched is not None:
            self._prefetched.take()
            self._prefetched = None

    def drop_iteration(self) -> None:
        """Forgets gathered parameters and gradients that are not reduced."""
        self.drop_prefetched()
        self.reshard()
        self.unreduced.clear()
        self.partial.clear()
        self.in_use = None
        self._has_run = False

    def mark_run(self) -> None:
        """A forward that will have a backward has run: the unit takes part in its reductions."""
        self._has_run = True

    def reshard(self) -> None:
        """Frees the gathered parameters and shows the shards."""
        self._gathered.clear()
        self.hide()

    def hide(self) -> None:
        """Shows the shards, and keeps what is gathered."""
        for slot in self.slots:
            slot.hide()

    def end_backward(self) -> None:
        """Frees what is gathered, unless it is to stay so."""
        if not self.stays_gathered and (
            self.reshard_after_backward or (self.keeps_between and self.reshards)
        ):
            self.reshard()

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

    def reduce(self, calls: Sequence[ReduceGradCall]) -> list[Tensor | None]:
        """What an uncompiled backward does with gradients: those of the shards, or None for later."""
        self.tree.queue_end_of_backward()
        if self.reduce_grads and not self.reduces_unused:
            return self._reduce_now(calls)
        for call in calls:
            self.add_unreduced(call.name, call.grad.to(call.reduce_dtype or call.grad.dtype, copy=True))
        return [None] * len(calls)

    def _reduce_now(self, calls: Sequence[ReduceGradCall]) -> list[Tensor | None]:
        calls = [
            call._replace(
                unreduced=self.unreduced.pop(call.name, None),
                partial=self.partial.pop(call.name, None) if call.replicate_size > 1 else None,
                all_reduce=self.all_reduce_grads or call.replicate_size == 1,
            )
            for call in calls
        ]
        for group_name in _groups_of(calls):
            step = f"reduce the gradients of unit {self.label}: {', '.join(call.name for call in calls)}"
            meet(group_name, step, what=_shortened(step), remedy=_REDUCE_REMEDY)
        result: list[Tensor | None] = []
        for call, reduced in zip(calls, reduce_together(calls), strict=True):
            if call.all_reduce:
                result.append(reduced)
            else:
                self.add_partial(call.name, reduced)
                result.append(None)
        return result

    def reduce_left_over(self) -> None:
        """Reduces what no backward has: of earlier micro-batches, or zeros for unused parameters."""
        if not self.reduce_grads:
            return
        waiting = set(self.unreduced) | (set(self.partial) if self.all_reduce_grads else set())
        if self.reduces_unused:
            trainable = [slot for slot in self.slots if slot.param.requires_grad]
            if self._has_run:
                waiting.update(slot.name for slot in trainable)
            else:
                _fill_with_zeros(slot.param for slot in trainable if slot.name not in waiting)
            self._has_run = False
        slots, calls = [], []
        for slot in self.slots:
            if slot.name not in waiting:
                continue
            local = local_shard(slot)
            call = UnshardCall(local, self.handle, *slot.arguments)
            grad = self.unreduced.pop(slot.name, None)
            if grad is None:
                dtype = call.reduce_dtype or call.dtype or local.dtype
                grad = torch.zeros(slot.shape, dtype=dtype, device=call.device or local.device)
            slots.append(slot)
            calls.append(gradient_call(call, grad, local.shape, local.dtype, local.device))
        for slot, reduced in zip(slots, self._reduce_now(calls) if calls else (), strict=True):
            if reduced is not None:
                _add_gradient(slot.param, reduced)


class PendingGather:
    """A gather of several parameters of a unit that was started and not waited for."""

    def __init__(self, unit: Unit, members: list[tuple[ParameterSlot, Tensor]]) -> None:
        self._unit = unit
        self._members = members
        self._calls = [UnshardCall(local, unit.handle, *slot.arguments) for slot, local in members]
        # What each member gathers: itself, or what its extension makes of it.
        self._parts: list[tuple[int, Any]] = []
        parts: list[UnshardCall] = []
        for (slot, _), call in zip(members, self._calls, strict=True):
            own, metadata = _extended_calls(slot, call) if slot.is_extended else ([call], None)
            parts += own
            self._parts.append((len(own), metadata))
        if parts:
            unit.meet_for_gather([call.name for call in self._calls], self._calls[0])
        self._started = StartedGather(parts)

    def take(self) -> dict[str, Tensor]:
        """Waits; the full parameters by name."""
        gathered = self._started.wait() if self._members else []
        fulls = {}
        for (slot, local), call, (num_parts, metadata) in zip(
            self._members, self._calls, self._parts, strict=True
        ):
            own, gathered = gathered[:num_parts], gathered[num_parts:]
            fulls[slot.name] = full_after(local, own, metadata, call) if slot.is_extended else own[0]
        return fulls

    def wait(self) -> None:
        """Waits, and makes the unit keep and show its full parameters."""
        for name, full in self.take().items():
            self._unit.keep(name, full)
        self._members, self._calls, self._parts = [], [], []
        for slot in self._unit.slots:
            kept = self._unit.gathered_value(slot.name)
            if kept is not None:
                slot.show(kept)


def unit_of(handle: Tensor | None) -> Unit | None:
    """The unit a handle stands for; None for the stand-in of a handle (while tracing, or in a test)."""
    state = unit_state_of(handle)
    return state if isinstance(state, Unit) else None


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
    if slot.unit.compute_device is not None and local.device.type not in ("cpu", "meta"):
        found = [
            f"({each.name}, {each.param.to_local().device})"
            for unit in slot.unit.tree.units()
            for each in unit.slots
            if unit.compute_device is not None and each.param.to_local().device.type != "cpu"
        ]
        raise ParameterStateError(
            f"with CPUOffloadPolicy parameters stay on the CPU, but these do not: {', '.join(found)}; load them "
            'there, or call model.to_empty(device="cpu") and initialise them'
        )
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
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(param)


def _fill_with_zeros(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)


def _extended_calls(slot: ParameterSlot, call: UnshardCall) -> tuple[list[UnshardCall], Any]:
    param = slot.param
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    shard_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
    shard = call.shard.detach()
    if call.device is not None:
        shard = shard.to(call.device)
    owner, _ = slot.owners[0]
    policy = slot.unit.mp_policy
    return calls_before(call._replace(shard=shard), shard_mesh, param.stride(), owner, policy)


def _groups_of(calls: Sequence[ReduceGradCall]) -> list[str]:
    """The process groups that reductions run on."""
    groups = [call.group_name for call in calls if call.group_size > 1]
    groups += [call.replicate_group for call in calls if call.replicate_size > 1 and call.all_reduce]
    return list(dict.fromkeys(groups))


def _labels(units: Sequence[Unit]) -> str:
    return ",".join(unit.label for unit in units)


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."
