"""A unit: the parameters of one ``fully_shard`` call, and their state while a model trains.

Each unit has a *handle*, an empty tensor with the unit as an attribute. The shard ops take it as an argument, so it
reaches every graph that reads the unit's parameters, and the backward of that graph. A graph asks the unit for its
state when it runs. So a switch that a user flips between a forward and its backward takes effect in that backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..._compat import in_backward
from ...ir import COMMS, UNIT, UnshardCall, new_handle, unit_state_of
from .eager_collectives import write_back, write_back_reads
from .parameter_slot import ParameterSlot, refuse_kept, shard_data
from .plain_gathers import Pending, start_gather
from .saved_parameters import ForwardReads, GatheredOnce, KeptForBackward, KeptGathered, refuse_transform
from .shard_versions import FullRead, version_of
from .tree import GATHER, Tree, TreeUnit
from .unit_settings import UnitSettings
from .waiting_gradients import UnitGradients

_GATHER_REMEDY = (
    "Ranks that use different parts of a model must gather the same parameters: shard the module that holds "
    "all of these parts as one unit, and call set_reduce_scatter_unused_params(True) on it"
)


@dataclass(eq=False, kw_only=True)
class Unit(UnitGradients):
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
                            modules show it. Before its wait:           Uncompiled, also the end of a backward that does
                            ``_prefetched``.                            not reshard (:attr:`reshard_after_backward`).
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
        tree, modules: the state that it shares with the other units of its model; the modules given to ``fully_shard``.
        settings: what graphs are traced with; call :meth:`refresh` after a change.
        label, slots: path of the unit's module, "root" for the outermost; its parameters.
        forward_prefetch, backward_prefetch: units whose gathers start after this one's.
        reduce_grads, all_reduce_grads: backwards reduce gradients, and over the replicate axis, too; else they add up.
        reshard_after_backward: whether the backward frees what the forward kept or, uncompiled, itself gathered.
        reduces_unused: whether parameters without a gradient take part in the reductions, with zeros.
        marker: leads to the unit as the handle does, for calls that Dynamo runs as it traces; no graph takes it.
        unshards_in_backward: whether an uncompiled backward gathers again; if not, autograd keeps full parameters.
        successors: the units that uncompiled forwards have gathered right after this one.
        in_backward, is_entered: a backward has gathered the unit, and not left it; it computes gradients of the unit.
        keeps_between: a planner keeps its parameters gathered for the next micro-batch while gradients wait.
        gradients: the gradients that wait for a reduction.
        for_backward: the gathers of forwards whose backwards may come.
        after_forward: the gathers of the last uncompiled forward, if the unit keeps them for a backward.
        may_show_kept, shows_kept: who looks at parameters before that backward is shown these (``show_kept`` in
            :mod:`graphshard.fsdp.eager_autograd`); the modules show these.
        in_use: the full parameters, as read, by name while an uncompiled forward of the unit runs, empty until the
            first one is read; else None.
        between: the same after the forward of one of several modules of the unit, until the next one's in the same
            forward of the model: the unit is gathered and reduced once for all of them.
        is_between: the running backward has entered one of these modules, and not all.
    """

    modules: list[nn.Module]
    settings: UnitSettings = field(default_factory=UnitSettings)
    is_root: bool = True
    forward_prefetch: list[Unit] = field(default_factory=list)
    backward_prefetch: list[Unit] = field(default_factory=list)
    reshard_after_backward: bool = True
    unshards_in_backward: bool = True
    keeps_between: bool = False
    successors: list[TreeUnit] = field(default_factory=list)
    in_backward: bool = False
    is_entered: bool = False
    handle: Tensor = field(init=False)
    marker: Tensor = field(init=False)
    in_use: ForwardReads | None = None
    between: ForwardReads | None = None
    is_between: bool = False
    after_forward: list[GatheredOnce] = field(default_factory=list)
    may_show_kept: bool = False
    shows_kept: bool = False
    for_backward: KeptForBackward = field(default_factory=KeptForBackward)
    _gathered: KeptGathered = field(default_factory=KeptGathered)
    _prefetched: Pending | None = None

    def __post_init__(self) -> None:
        self.handle = new_handle(**{UNIT: self, COMMS: self.settings.comms})
        self.marker = torch.empty(0, dtype=torch.int8)
        setattr(self.marker, UNIT, self)

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
            steps_optimizers=self.steps_optimizers,
            unshards_in_backward=self.unshards_in_backward,
        )

    @property
    def compute_device(self) -> torch.device | None:
        """Where full parameters are if their shards are kept on the CPU; None if they are not."""
        return self.settings.compute_device

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
        return self._gathered.value(name)

    def keep(self, name: str, full: Tensor) -> None:
        """Keeps a gathered parameter until the unit is resharded or its shard changes."""
        self._gathered.keep(name, full, self.slot_of(name))

    def held(self) -> Iterator[Tensor]:
        """The tensors that the unit holds besides shards: gathered parameters, and gradients that wait."""
        yield from (kept.full for kept in self._gathered.values())
        yield from self.gradients.tensors()

    @property
    def is_gathered(self) -> bool:
        """Whether any parameter of the unit is gathered, or ``unshard(async_op=True)`` gathers it."""
        return bool(self._gathered) or self._gathered.begun is not None

    def start_unshard(self, slots: Sequence[ParameterSlot] | None = None) -> Pending:
        """Starts to gather those of ``slots`` (None: of all) that are not gathered, with one collective."""
        wanted = self.slots if slots is None else slots
        wanted = [slot for slot in wanted if slot.hidden is not None or not slot.is_substituted]
        if self.is_gathered or any(gathered.fulls for gathered in self.for_backward):
            wanted = [slot for slot in wanted if self.held_value(slot.name) is None]
        return start_gather(self, [(slot, slot.as_sent(shard_data(slot))) for slot in wanted])

    def held_value(self, name: str) -> Tensor | None:
        """The full parameter, if it is gathered or kept for the backward of a forward."""
        full = self.gathered_value(name)
        return full if full is not None else self.for_backward.valid(name)

    def prefetch(self) -> None:
        """Starts to gather for the next forward, unless that has started."""
        if self._prefetched is None and self._gathered.begun is None:
            self._prefetched = self.start_unshard()
            self.tree.prefetched.append(self)

    def prefetch_for_backward(self) -> None:
        """Starts to gather for the backward, if the unit will have to."""
        if not self.in_backward and self.unshards_in_backward and self.for_backward.is_freed:
            self.prefetch()

    def gather(self, slots: Sequence[ParameterSlot]) -> list[Tensor]:
        """The full parameters of ``slots``. Gathers those that are not gathered, and keeps them if the unit does."""
        fresh = self._take_missing(slots)
        result = []
        for slot in slots:
            full = fresh.get(slot.name)
            if full is None:
                kept = self.held_value(slot.name)
                assert kept is not None, f"{slot.name} is neither gathered nor being gathered"
                full = kept.detach()
                shard_data(slot)  # refuses what was done to the shard since
            elif self.keeps_from_forward:
                self.keep(slot.name, full)
            result.append(full)
        return result

    def _take_missing(self, slots: Sequence[ParameterSlot] | None) -> dict[str, Tensor]:
        """Gathers what is missing: what was prefetched, and the rest of ``slots``."""
        pending, self._prefetched = self._prefetched, None
        fresh = pending.take() if pending is not None else {}
        rest = [slot for slot in (self.slots if slots is None else slots) if slot.name not in fresh]
        if rest:
            fresh.update(self.start_unshard(rest).take())
        return fresh

    def gather_for_backward(self) -> None:
        """Gathers all parameters, and keeps them until the backward has left the unit."""
        with torch.no_grad():
            fresh = self._take_missing(None)
            for slot in self.slots:
                full = fresh[slot.name] if slot.name in fresh else self.held_value(slot.name)
                if full is not None:
                    self._gathered.keep(slot.name, full, slot)
        if not self.in_backward:
            self.in_backward = True
            self.tree.gathered_again.append(self)
            self.tree.queue_end_of_backward()

    def leave_backward(self) -> None:
        """Frees what was gathered for the backward, unless ``unshard()`` shows it or the next forward is to have it."""
        if not self.in_backward:
            return
        self.in_backward = self.is_entered = self.is_between = False
        self.tree.gathered_again.remove(self)
        is_shown = any(slot.hidden is not None for slot in self.slots) and not self.shows_kept
        if not is_shown and self.reshard_after_backward and not self.stays_gathered:
            self._gathered.clear()

    def end_of_gradients(self) -> None:
        """Frees full parameters once a backward has the gradients of all that a forward has read."""
        self.leave_backward()
        self.after_forward.clear()
        if self.reshard_after_backward and not (self.reduces_unused or self.stays_gathered):
            self.for_backward.free()

    def remember(self, gathered: GatheredOnce, own: ForwardReads | None) -> None:
        """Notes a gather of a forward; ``own``: of the unit's own forward."""
        self.for_backward.add(gathered)
        if own is None and not self.tree.running:  # a part of a unit that is checkpointed runs again
            return
        (self.tree.saved.alone if own is None else own.gathers).append(gathered)
        if self.unshards_in_backward:
            self.tree.saved.add(gathered)

    def forget(self, gathers: Sequence[GatheredOnce]) -> None:
        """At the end of the forward of some gathers: frees them, if the backward gathers again."""
        is_freed = self.reshards and not (self.reduces_unused or self.stays_gathered or self.in_backward)
        for gathered in gathers:
            self.tree.saved.remove(gathered)
            if is_freed or not self.unshards_in_backward:
                gathered.free()

    def meet_for_gather(self, names: Sequence[str], call: UnshardCall, *, can_skip: bool = False) -> None:
        """Meets the other ranks before they gather the named parameters of this unit, unless the step is known."""
        if call.group_size > 1:
            self.tree.come(call.group_name, GATHER, self.label, names, _GATHER_REMEDY, can_skip=can_skip)

    def begin_forward(self) -> ForwardReads | None:
        """Begins an uncompiled forward of one of the unit's modules; returns the argument of :meth:`end_forward`."""
        self.write_back()
        if self.shows_kept:
            self.hide()
        if not self.tree.running and not in_backward():
            self.tree.begin_iteration()
        outer, reads = self.in_use, None
        if outer is None and not in_backward():
            reads, self.between = self.between, None
        self.in_use = reads if reads is not None else ForwardReads(self.modules)
        self.tree.running.append(self)
        self.tree.saved.begin(self.unshards_in_backward)
        return outer

    def end_forward(self, outer: ForwardReads | None, module: nn.Module) -> None:
        """Ends an uncompiled forward of one of the unit's modules.

        Once all of them have run, or the outermost forward ends, frees parameters that the backward gathers again.
        """
        self.tree.saved.end()
        reads, self.in_use = self.in_use, outer
        is_alone = outer is not None or len(self.tree.running) < 2 or in_backward()
        if reads is None or is_alone or sys.exc_info()[1] is not None or not reads.has_more_to_run(module):
            self.end_reads(reads)
        else:
            self.between = reads
            self.tree.between.append(self)
        if self.tree.running:  # else the iteration was reset
            self.tree.running.pop()
        if not self.tree.running:
            while self.tree.between:
                unit = self.tree.between.pop()
                reads, unit.between = unit.between, None
                if reads is not None:
                    unit.end_reads(reads)
            for gathered in self.tree.saved.alone:
                gathered.unit.forget([gathered])
            self.tree.forget_reads()
            self.tree.saved.clear()
        refuse_transform(self.label)

    def end_reads(self, reads: ForwardReads | None) -> None:
        """Frees what a forward of the unit has read, if the backward gathers it again."""
        gathers = reads.gathers if reads is not None else []
        self.forget(gathers)
        if not self.reshards and torch.is_grad_enabled() and not in_backward():
            self.after_forward, self.may_show_kept = [*gathers], bool(gathers)
        if self.reshards and self.is_gathered and not self.in_backward:
            self.reshard()

    def write_back(self) -> None:
        """Writes full parameters that an uncompiled forward has changed in place back to the shards.

        Later reads gather them again, except in the forward of the unit that is running. A write that autograd has
        recorded, or to a parameter whose shard has changed as well, is a ParameterStateError.
        """
        mine = {name: read for name, (unit, read) in self.tree.read_alone.items() if unit is self}
        for name in mine:
            del self.tree.read_alone[name]
        handed_on = [reads for unit, reads in self.tree.handed_on if unit is self]
        for reads in (*handed_on, mine, self.in_use or {}, self.between or {}):
            changed = [self.slot_of(name) for name, read in reads.items() if read.is_changed]
            if changed:
                write_back_reads(self.label, changed, reads)
                running = [*(self.in_use.gathers if self.in_use else ()), *self.tree.saved.alone]
                self.for_backward.note_written([slot.name for slot in changed], running)

    def store(self, name: str, full: Tensor, line: str) -> None:
        """Writes a full parameter that a graph has changed back to the shard; later reads gather it again."""
        write_back([self.slot_of(name)], {name: full}, line=line)
        self.tree.read_alone.pop(name, None)
        if self.in_use is not None:
            self.in_use.pop(name, None)

    def note_read(self, name: str, full: Tensor, shown: Tensor) -> None:
        """Notes a full parameter that a compiled part of a forward hands to the code behind it."""
        read = FullRead.of(full, shown, version_of(self.slot_of(name).param), in_graph=True)
        self.tree.handed_on.append((self, {name: read}))

    def begin_unshard(self) -> None:
        """Starts to gather for ``UnshardHandle.wait`` or the next forward or backward, unless that has started."""
        if self._gathered.begun is None and any(self.held_value(slot.name) is None for slot in self.slots):
            pending, self._prefetched = self._prefetched or self.start_unshard(), None
            self._gathered.begin(pending, [(slot.name, slot) for slot in self.slots])

    def finish_unshard(self) -> None:
        """Waits for the gather, unless a forward or backward has, and gathers again what has changed since."""
        if self._gathered.finish():
            for name, full in self.start_unshard().take().items():
                self.keep(name, full)

    def drop_prefetched(self) -> None:
        """Waits for a prefetched gather that no forward has used, and frees its result."""
        if self._prefetched is not None:
            self._prefetched.take()
            self._prefetched = None

    def drop_iteration(self) -> None:
        """Forgets gathered parameters and gradients that are not reduced."""
        self.drop_prefetched()
        self._gathered.finish()
        self.reshard()
        self.drop_gradients()
        self.in_use = self.between = None

    def reshard(self) -> None:
        """Frees the gathered parameters, also those kept for a backward, and shows the shards."""
        self._gathered.clear()
        self.after_forward.clear()
        self.for_backward.free()
        self.hide()

    def hide(self) -> None:
        """Shows the shards, and keeps the gathered parameters."""
        refusal = refuse_kept(self.slots) if self.shows_kept else None
        self.may_show_kept = self.shows_kept = False
        for slot in self.slots:
            slot.hide()
        if refusal is not None:
            raise refusal

    def end_backward(self) -> None:
        """Frees the gathered parameters at the end of a backward, unless they stay for the next micro-batch."""
        self.leave_backward()
        self.after_forward.clear()
        self.may_show_kept = False
        if not self.stays_gathered and (
            self.reshard_after_backward or (self.keeps_between and self.reshards)
        ):
            self.reshard()
        elif self.shows_kept:
            self.hide()

    def set_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Changes dtypes for the next forwards. Frees what is gathered, which has the old dtypes."""
        if policy == self.settings.mp_policy:
            return
        self.drop_prefetched()
        self._gathered.finish()
        self.reshard()
        self.settings.mp_policy = policy
        self.refresh()

    def refresh(self) -> None:
        """Rebuilds what the next graphs are traced with; call it after a change of ``settings``."""
        for slot in self.slots:
            slot.refresh()


def unit_of(handle: Tensor | None) -> Unit | None:
    """The unit of a handle; None for a stand-in (while tracing, or in a test)."""
    state = unit_state_of(handle)
    return state if isinstance(state, Unit) else None


def owner_of(slot: ParameterSlot) -> Unit:
    """The unit of a parameter."""
    assert isinstance(slot.unit, Unit)
    return slot.unit
