"""A unit: the parameters of one ``fully_shard`` call, and their state while a model trains.

Each unit has a *handle*, an empty tensor with the unit as an attribute. The shard ops take it as an argument, so it
reaches every graph that reads the unit's parameters, and the backward of that graph. A graph asks the unit for its
state when it runs. So a switch that a user flips between a forward and its backward takes effect in that backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..coordination import meet
from ..errors import ParameterStateError, UnsupportedShardingError
from ..ir import COMMS, UNIT, ReduceGradCall, UnshardCall, gradient_call, unit_state_of
from .eager_collectives import PendingGather, any_rank, write_back
from .parameter_slot import ParameterSlot, local_shard
from .shard_versions import FullRead, Version, version_of
from .tree import ROOT, Tree
from .unit_settings import UnitSettings
from .waiting_gradients import WaitingGradients, shortened

_GATHER_REMEDY = (
    "Ranks that use different parts of a model must gather the same parameters: shard the module that holds "
    "all of these parts as one unit, and call set_reduce_scatter_unused_params(True) on it"
)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A full parameter, and the version its shard had when it was gathered."""

    full: Tensor
    version: Version


@dataclass(eq=False, kw_only=True)
class Unit:
    """The parameters of one ``fully_shard`` call.

    ``settings`` holds what graphs are traced with. The other fields are read when a graph or an uncompiled forward
    runs. A parameter is in one of the first three states; its gradient may be in the fourth:

    ======================  ==========================================  ==========================================
    State                   Who holds which bytes                       What moves it on
    ======================  ==========================================  ==========================================
    sharded                 The modules' ``_parameters``: this rank's   To gathered: a graph that reads it; the first
                            shard, in the parameter's dtype. Held in    read in an uncompiled forward of the unit, which
                            all states.                                 gathers the whole unit; a prefetch;
                                                                        ``module.unshard()``.
    gathered                The full parameter, in ``param_dtype``.     To sharded: the last read in the graph; the end
                            Compiled: a buffer of the graph, and what   of an uncompiled forward (:meth:`end_forward`)
                            autograd saves if the unit does not         if the unit :attr:`reshards`; the end of the
                            reshard. Uncompiled: ``in_use`` during a    backward (:meth:`end_backward`);
                            forward of the unit, then autograd.         :meth:`reshard`. To kept: the end of a forward
                            After ``unshard()``: ``_gathered``; the     with :attr:`keeps_from_forward`.
                            modules show it. Before its wait:
                            ``_prefetched``.
    kept between            ``_gathered``: the full parameter. The      To sharded: the end of a backward that reduces;
    micro-batches           next graphs take it as an input and do      :meth:`reshard`; a change of the shard, such as
                            not gather it.                              an optimizer step.
    waiting for a           ``gradients.unreduced``: this rank's full   To ``.grad`` of the shard: the next backward
    reduction               gradient, if ``reduce_grads`` is False, or  that reduces adds it to its own gradient; the
                            uncompiled if ``reduces_unused``.           end of a backward reduces the rest
                            ``gradients.partial``: this rank's piece,   (:meth:`reduce_left_over`) if the tree's
                            not summed over the replicate axis, if      ``is_last_backward``. :meth:`drop_iteration`
                            ``all_reduce_grads`` is False. Both in the  drops it.
                            dtype of the reduction.
    ======================  ==========================================  ==========================================

    Attributes:
        tree: the state that it shares with the other units of its model.
        modules: the modules given to ``fully_shard``.
        settings: what graphs are traced with; call :meth:`refresh` after a change.
        label: path of the unit's module, "root" for the outermost.
        slots: its parameters.
        forward_prefetch, backward_prefetch: units whose gathers start after this one's.
        reduce_grads: whether backwards reduce gradients; False adds them up unreduced.
        all_reduce_grads: whether they also sum over the replicate axis; False keeps the partial sums.
        reshard_after_backward: whether the backward frees parameters that the forward kept.
        reduces_unused: whether parameters without a gradient take part in the reductions, with zeros.
        keeps_between: a planner keeps its parameters gathered for the next micro-batch while gradients wait.
        gradients: the gradients that wait for a reduction.
        in_use: the full parameters, as read, by name while an uncompiled forward of the unit runs, empty until the
            first one is read; else None.
    """

    tree: Tree
    modules: list[nn.Module]
    settings: UnitSettings = field(default_factory=UnitSettings)
    label: str = ROOT
    is_root: bool = True
    slots: list[ParameterSlot] = field(default_factory=list)
    forward_prefetch: list[Unit] = field(default_factory=list)
    backward_prefetch: list[Unit] = field(default_factory=list)
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    reduces_unused: bool = False
    keeps_between: bool = False
    handle: Tensor = field(init=False)
    gradients: WaitingGradients = field(default_factory=WaitingGradients)
    in_use: dict[str, FullRead] | None = None
    _gathered: dict[str, _Gathered] = field(default_factory=dict)
    _prefetched: PendingGather | None = None
    _has_run: bool = False

    def __post_init__(self) -> None:
        self.handle = torch.empty(0, dtype=torch.int8)
        setattr(self.handle, UNIT, self)
        setattr(self.handle, COMMS, self.settings.comms)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A unit with the same settings and switches, without modules and without state.

        The copied modules are added later. The unit is a root until a copied root claims it.
        """
        return Unit(
            tree=Tree(),
            modules=[],
            settings=self.settings.copy(),
            reduce_grads=self.reduce_grads,
            all_reduce_grads=self.all_reduce_grads,
            reshard_after_backward=self.reshard_after_backward,
            reduces_unused=self.reduces_unused,
        )

    @property
    def compute_device(self) -> torch.device | None:
        """Where full parameters are if their shards are kept on the CPU; None if they are not."""
        return self.settings.compute_device

    @property
    def unreduced(self) -> dict[str, Tensor]:
        """Full gradients that wait, by parameter name."""
        return self.gradients.unreduced

    @property
    def partial(self) -> dict[str, Tensor]:
        """Reduce-scattered gradients that wait, by parameter name."""
        return self.gradients.partial

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of the unit wait for a reduction."""
        return bool(self.gradients)

    # -- parameters -------------------------------------------------------------------------------

    @property
    def reshards(self) -> bool:
        """Whether the backward gathers again: the user's setting; without one, True for all units but the root."""
        if self.settings.reshard_after_forward is None:
            return not self.is_root
        return self.settings.reshard_after_forward is not False

    def reshard_ranks(self, group_size: int) -> int:
        """Ranks over which a full parameter is spread between forward and backward; 1 keeps it whole."""
        if not self.reshards:
            return 1
        given = self.settings.reshard_after_forward
        return group_size if given is None or given is True else int(given)

    @property
    def keeps_from_forward(self) -> bool:
        """Whether parameters that a forward gathers stay gathered for later forwards."""
        return self.stays_gathered or (not self.reshards and not self.reshard_after_backward)

    @property
    def stays_gathered(self) -> bool:
        """Whether gathered parameters stay so for the next micro-batch."""
        return self.keeps_between and not self.reduce_grads

    def gathered_value(self, name: str) -> Tensor | None:
        """The full parameter if it is gathered and its shard has not changed since; else None."""
        kept = self._gathered.get(name)
        return kept.full if kept is not None and kept.version == self._version_of(name) else None

    def keep(self, name: str, full: Tensor) -> None:
        """Keeps a gathered parameter until the unit is resharded or its shard changes."""
        if full.is_inference():  # not kept: a later forward could not save it for its backward
            return
        self._gathered[name] = _Gathered(full.detach(), self._version_of(name))

    def _version_of(self, name: str) -> Version:
        return version_of(self.slot_of(name).param)

    def held(self) -> Iterator[Tensor]:
        """The tensors that the unit holds besides shards: gathered parameters, and gradients that wait."""
        yield from (kept.full for kept in self._gathered.values())
        yield from self.gradients.tensors()

    @property
    def is_gathered(self) -> bool:
        """Whether any parameter of the unit is gathered."""
        return bool(self._gathered)

    def start_unshard(self, slots: Sequence[ParameterSlot] | None = None) -> PendingGather:
        """Starts to gather those of ``slots`` (None: of all) that are not gathered; one collective for each dtype."""
        wanted = self.slots if slots is None else slots
        wanted = [slot for slot in wanted if slot.hidden is not None or not slot.is_substituted]
        missing = [
            (slot, slot.as_sent(local_shard(slot)))
            for slot in wanted
            if self.gathered_value(slot.name) is None
        ]
        return PendingGather(self, missing)

    def prefetch(self) -> None:
        """Starts to gather for the next forward, unless that has started."""
        if self._prefetched is None:
            self._prefetched = self.start_unshard()

    def gather(self, slots: Sequence[ParameterSlot]) -> list[Tensor]:
        """The full parameters of ``slots``. Gathers those that are not gathered, and keeps them if the unit does."""
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
            meet(call.group_name, step, what=shortened(step), remedy=_GATHER_REMEDY)

    def begin_forward(self) -> dict[str, FullRead] | None:
        """Begins an uncompiled forward of the unit; returns the argument of :meth:`end_forward`."""
        self.write_back()
        outer, self.in_use = self.in_use, {}
        self.tree.running.append(self)
        return outer

    def end_forward(self, outer: dict[str, FullRead] | None) -> None:
        """Ends an uncompiled forward of the unit, and frees its parameters; autograd keeps those it needs."""
        self.in_use = outer
        if self.tree.running:  # else the iteration was reset
            self.tree.running.pop()
        if not self.tree.running:
            self.tree.read_alone.clear()
        if self.reshards and self.is_gathered:
            self.reshard()

    def write_back(self) -> None:
        """Writes full parameters that an uncompiled forward has changed in place back to the shards.

        Later reads gather them again, except in the forward of the unit that is running.

        Raises:
            ParameterStateError: the write was recorded by autograd, or the shard has changed as well.
        """
        alone = self.tree.read_alone
        mine = {name: read for name, (unit, read) in alone.items() if unit is self}
        for name in mine:
            del alone[name]
        for reads in (mine, self.in_use or {}):
            changed = [self.slot_of(name) for name, read in reads.items() if read.is_changed]
            if changed:
                self._write_back(changed, reads)

    def _write_back(self, slots: list[ParameterSlot], reads: dict[str, FullRead]) -> None:
        found = any_rank(slots, [reads[slot.name].is_written for slot in slots])
        written = [slot for slot, is_written in zip(slots, found, strict=True) if is_written]
        for slot in written:
            read = reads[slot.name]
            if read.shown.grad_fn is not read.source:
                raise ParameterStateError(
                    f"parameter {slot.name} is written in place in the forward of unit {self.label} where gradients "
                    "are enabled: write to it under torch.no_grad(), as to any parameter"
                )
            if version_of(slot.param) != read.shard:
                raise ParameterStateError(
                    f"parameter {slot.name} is written in place in a forward, and its shard has changed since it "
                    "was gathered: write to it in a forward, or to the shard outside of it"
                )
        write_back(written, {slot.name: reads[slot.name].full for slot in written})
        for slot in slots:
            reads[slot.name] = reads[slot.name].renewed(version_of(slot.param))

    def store(self, name: str, full: Tensor, line: str) -> None:
        """Writes a full parameter that a graph has changed back to the shard; later reads gather it again."""
        write_back([self.slot_of(name)], {name: full}, line=line)
        self.tree.read_alone.pop(name, None)
        if self.in_use is not None:
            self.in_use.pop(name, None)

    def finish_unshard(self, pending: PendingGather) -> None:
        """Waits for a gather of this unit, and keeps the full parameters."""
        for name, full in pending.take().items():
            self.keep(name, full)

    def drop_prefetched(self) -> None:
        """Waits for a prefetched gather that no forward has used, and frees its result."""
        if self._prefetched is not None:
            self._prefetched.take()
            self._prefetched = None

    def drop_iteration(self) -> None:
        """Forgets gathered parameters and gradients that are not reduced."""
        self.drop_prefetched()
        self.reshard()
        self.gradients.clear()
        self.in_use = None
        self._has_run = False

    def mark_run(self) -> None:
        """Notes that a forward with gradients has run: the unit takes part in the reductions of its backward."""
        self._has_run = True

    def reshard(self) -> None:
        """Frees the gathered parameters and shows the shards."""
        self._gathered.clear()
        self.hide()

    def hide(self) -> None:
        """Shows the shards, and keeps the gathered parameters."""
        for slot in self.slots:
            slot.hide()

    def end_backward(self) -> None:
        """Frees the gathered parameters at the end of a backward, unless they stay for the next micro-batch."""
        if not self.stays_gathered and (
            self.reshard_after_backward or (self.keeps_between and self.reshards)
        ):
            self.reshard()

    def refresh(self) -> None:
        """Rebuilds what the next graphs are traced with; call it after a change of ``settings``."""
        for slot in self.slots:
            slot.refresh()

    # -- gradients that are not reduced yet -------------------------------------------------------

    def slot_of(self, name: str) -> ParameterSlot:
        """The slot of the parameter of this name."""
        return next(slot for slot in self.slots if slot.name == name)

    def add_unreduced(self, name: str, grad: Tensor) -> None:
        """Adds a full gradient to those that wait for a reduction."""
        self.gradients.add_unreduced(name, grad)
        self.tree.waiting = True

    def add_partial(self, name: str, grad: Tensor) -> None:
        """Adds a reduce-scattered gradient to those that wait for an all-reduce."""
        self.gradients.add_partial(name, grad)
        self.tree.waiting = True

    def reduce(self, calls: Sequence[ReduceGradCall]) -> list[Tensor | None]:
        """Reduces gradients in an uncompiled backward; None for each that waits."""
        self.tree.queue_end_of_backward()
        if self.reduce_grads and not self.reduces_unused:
            return self._reduce_now(calls)
        for call in calls:
            self.add_unreduced(call.name, call.grad.to(call.reduce_dtype or call.grad.dtype, copy=True))
        return [None] * len(calls)

    def reduce_unplanned(self, call: ReduceGradCall) -> Tensor:
        """Reduces one gradient in a graph of another compiler.

        Returns:
            The gradient of the shard; zeros if it waits, because a graph cannot return "no gradient".

        Raises:
            UnsupportedShardingError: it waits, and a hook of the parameter would get the zeros.
        """
        waits = not self.reduce_grads or self.reduces_unused
        waits |= call.replicate_size > 1 and not self.all_reduce_grads
        if waits and getattr(self.slot_of(call.name).param, "_post_accumulate_grad_hooks", None):
            raise UnsupportedShardingError(
                f"parameter {call.name} has a post-accumulate-grad hook, and its gradient waits for a reduction: a "
                "compiler other than graphshard would call the hook without a gradient; use "
                'torch.compile(backend="graphshard"), or leave the gradient sync on and '
                "set_reduce_scatter_unused_params off"
            )
        (reduced,) = self.reduce([call])
        if reduced is not None:
            return reduced
        return torch.zeros(call.shard_shape, dtype=call.dtype, device=call.device or call.grad.device)

    def warn_unplanned(self) -> None:
        """Warns, once for each model, that another compiler runs its gathers and reductions one by one."""
        self.tree.warn_unplanned()

    def _reduce_now(self, calls: Sequence[ReduceGradCall]) -> list[Tensor | None]:
        result = self.gradients.reduce(calls, unit=self.label, all_reduce=self.all_reduce_grads)
        self.tree.waiting |= any(reduced is None for reduced in result)
        return result

    def reduce_left_over(self) -> None:
        """Reduces gradients that wait, and zeros for unused parameters, at the end of a backward."""
        if not self.reduce_grads:
            return
        waiting = set(self.unreduced) | (set(self.partial) if self.all_reduce_grads else set())
        if self.reduces_unused:
            trainable = [slot for slot in self.slots if slot.param.requires_grad]
            if self._has_run:
                waiting.update(slot.name for slot in trainable)
            else:
                for slot in trainable:
                    if slot.name not in waiting:
                        slot.fill_gradient()
            self._has_run = False
        slots, calls = [], []
        for slot in self.slots:
            if slot.name not in waiting:
                continue
            local = slot.as_sent(local_shard(slot))
            call = UnshardCall(local, self.handle, *slot.arguments)
            grad = self.unreduced.pop(slot.name, None)
            if grad is None:
                dtype = call.reduce_dtype or call.dtype or local.dtype
                grad = torch.zeros(call.shape, dtype=dtype, device=call.device or local.device)
            slots.append(slot)
            calls.append(gradient_call(call, grad, local.shape, local.dtype, local.device))
        for slot, reduced in zip(slots, self._reduce_now(calls) if calls else (), strict=True):
            if reduced is not None:
                slot.add_gradient(reduced)


def unit_of(handle: Tensor | None) -> Unit | None:
    """The unit of a handle; None for a stand-in (while tracing, or in a test)."""
    state = unit_state_of(handle)
    return state if isinstance(state, Unit) else None


def owner_of(slot: ParameterSlot) -> Unit:
    """The unit of a parameter."""
    assert isinstance(slot.unit, Unit)
    return slot.unit
