"""The units of one model: what they share, and how they and their parameters are named.

:func:`relabel` puts the units below an outermost module into one :class:`Tree` and names units and parameters as seen
from that module. :class:`TreeUnit` declares what this file and
the slots use of a unit, so that neither imports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ..._compat import queue_after_backward
from ...coordination import Steps, StepWords
from ...ir import UNIT, MeshAxis, UnitState
from .saved_parameters import ForwardReads, SavedParameters
from .shard_versions import FullRead
from .unit_settings import UnitSettings

#: Where a module keeps the slots of its sharded parameters.
SLOTS = "_graphshard_slots"

#: Where a module with sharded parameters keeps the module whose ``_parameters`` are its own; see
#: :func:`graphshard.fsdp.state.parameter_slot.stored_parameters`.
STORED = "_graphshard_stored"

#: The label of the outermost unit.
ROOT = "root"

#: Kinds of steps of an uncompiled unit, as errors name them.
GATHER, REDUCE, WRITE_BACK = "gather", "reduce the gradients of", "write back what a forward has changed of"

_RUN_REMEDY = (
    "Every rank must take the same branches of compiled code. If sizes differ between ranks, as the number of tokens "
    "of an expert does, one rank compiles again and the others do not: leave that module out with "
    "torch.compiler.disable"
)

#: The attributes by which ``checkpoint_wrapper``, ``torch.compile`` and ``FullyShardedDataParallel`` hold the module
#: that they wrap; no part of a path in the state dict.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


class TreeSlot(Protocol):
    """The part of a ``ParameterSlot`` that users of a tree read."""

    name: str
    axis: MeshAxis
    replicate: MeshAxis

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter."""

    @property
    def other_axes(self) -> tuple[MeshAxis, ...]:
        """The axes of tensor or expert parallelism that the parameter lies on."""


class TreeUnit(UnitState, Protocol):
    """The part of a ``Unit`` that users of a tree or of a slot read and call."""

    tree: Tree
    modules: list[nn.Module]
    settings: UnitSettings
    label: str
    is_root: bool
    reduces_unused: bool
    in_backward: bool
    is_entered: bool
    is_between: bool
    owes_reduction: bool
    between: ForwardReads | None
    successors: list[TreeUnit]
    handle: Tensor

    @property
    def slots(self) -> Sequence[TreeSlot]:
        """The unit's parameters."""

    @property
    def forward_prefetch(self) -> Sequence[TreeUnit]:
        """The units whose gathers start in a forward after this one's."""

    @property
    def backward_prefetch(self) -> Sequence[TreeUnit]:
        """The units whose gathers start in a backward after this one's."""

    @property
    def compute_device(self) -> torch.device | None:
        """Where full parameters are if their shards are kept on the CPU."""

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of the unit wait for a reduction."""

    def reshard_ranks(self, group_size: int) -> int:
        """Ranks over which a full parameter is spread between forward and backward; 1 keeps it whole."""

    def refresh(self) -> None:
        """Rebuilds what the next graphs are traced with."""

    def reshard(self) -> None:
        """Frees the gathered parameters."""

    def write_back(self) -> None:
        """Writes full parameters that an uncompiled forward has changed in place back to the shards."""

    def drop_prefetched(self) -> None:
        """Frees the result of a prefetched gather that no forward has used."""

    def drop_iteration(self) -> None:
        """Forgets gathered parameters and gradients that are not reduced."""

    def drop_gradient(self, name: str) -> None:
        """Forgets the gradient of a parameter that waits for a reduction."""

    def leave_backward(self) -> None:
        """Frees what was gathered for the backward."""

    def prefetch(self) -> None:
        """Starts to gather for the next forward, unless that has started."""

    def prefetch_for_backward(self) -> None:
        """Starts to gather for the backward, if the unit will have to."""

    def end_reads(self, reads: ForwardReads | None) -> None:
        """Frees what a forward of the unit has read, if the backward gathers it again."""

    def end_backward(self) -> None:
        """Frees the gathered parameters at the end of a backward, unless they stay for the next micro-batch."""

    def reduce_left_over(self) -> None:
        """Reduces gradients that wait, at the end of a backward."""

    def finish_gradients(self) -> None:
        """Called when the gradients of a backward are those of the shards."""


@dataclass(eq=False)
class Tree:
    """The state that all units of one model share.

    Attributes:
        forwards: has an item while a forward of the model is running. A list, because Dynamo of torch 2.13 loses what
            is assigned to an attribute a second time if a ``torch.cond`` lies between; it keeps changes of a list.
        running: the units whose uncompiled forwards are running, the outermost first.
        read_alone: full parameters that the forward has read outside of the forwards of their units, by name.
        handed_on: full parameters that compiled parts of the forward have handed to the code behind them.
        reads_ahead: parameters that a forward reads at its begin, for functions given to ``torch.cond`` and the like.
        ahead: these parameters, full, by name while a forward runs.
        saved: the hooks by which an uncompiled backward gathers again.
        between: units of several modules, of which some have run in the running forward.
        gathered_again: the units that the running backward has gathered, and not left.
        prefetched: the units whose gathers were started early, those that were used since among them.
        last_forward: the unit whose forward has ended last, if a backward gathers it again.
        last_gathered: the unit that the running forward has gathered last.
        behind: units whose gathers start once the gradients of another exist, by the label of that.
        roots: the outermost modules.
        may_be_tied: a parameter may have been written into the ``_parameters`` of another module.
        is_last_backward: gradients that wait are reduced at the end of a backward, unless it ``is_finalized_by_hand``.
        waiting: gradients of a unit wait for a reduction.
        iterations: how many backwards have ended that reduce what waits.
        max_reductions: the largest ``max_reductions`` of its units.
        graph_breaks: places where Dynamo has cut a forward of the model into several graphs.
        has_warned: a warning has said that another compiler runs a graph of the model.
        numbers: by process group, the number of this model among those whose graphs were planned there.
    """

    forwards: list[bool] = field(default_factory=list)
    running: list[TreeUnit] = field(default_factory=list)
    read_alone: dict[str, tuple[TreeUnit, FullRead]] = field(default_factory=dict)
    handed_on: list[tuple[TreeUnit, dict[str, FullRead]]] = field(default_factory=list)
    reads_ahead: list[tuple[nn.Module, str]] = field(default_factory=list)
    ahead: dict[str, Tensor] = field(default_factory=dict)
    saved: SavedParameters = field(default_factory=SavedParameters)
    between: list[TreeUnit] = field(default_factory=list)
    gathered_again: list[TreeUnit] = field(default_factory=list)
    prefetched: list[TreeUnit] = field(default_factory=list)
    last_forward: TreeUnit | None = None
    last_gathered: TreeUnit | None = None
    behind: dict[str, TreeUnit] = field(default_factory=dict)
    roots: list[nn.Module] = field(default_factory=list)
    may_be_tied: bool = False
    is_last_backward: bool = True
    is_finalized_by_hand: bool = False
    waiting: bool = False
    iterations: int = 0
    max_reductions: int = 0
    graph_breaks: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    has_warned: bool = False
    _end_is_queued: bool = False
    _begun: set[str] = field(default_factory=set)
    _last_run: str = ""
    _next_run: dict[str, str] = field(default_factory=dict)
    _branches: dict[str, set[str]] = field(default_factory=dict)

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model is running."""
        return bool(self.forwards)

    @property
    def has_begun_backward(self) -> bool:
        """Whether a backward is running, or has raised an exception and no forward has run since."""
        return self._end_is_queued

    def follow(self, group_name: str, run: str, what: str, *, branch: str) -> None:
        """Checks, where that is not certain, that all ranks run the same collectives; called before a graph starts.

        A graph that follows the same graph as the last time is not checked. For any other the ranks meet. All ranks
        have the same past, so if one of them runs another graph, at least one rank comes here. After a graph that
        several branches have followed, the ranks meet each time.

        Args:
            group_name: the process group on which ranks meet.
            run: fingerprint of the graph's collectives.
            what: the graph, for the error.
            branch: tells forward graphs apart independently of the state of their units; "" for a backward.
        """
        branches = self._branches.setdefault(self._last_run, set())
        if branch:
            branches.add(branch)
        is_known = self._next_run.get(self._last_run) == run and len(branches) <= 1
        words = StepWords(f"run {run}", what, _RUN_REMEDY)
        Steps.of_group(group_name).come_to_graph(run, words, is_known=is_known)
        self._next_run[self._last_run] = run
        self._last_run = run

    def come(
        self,
        group_name: str,
        kind: str,
        unit: str,
        names: Sequence[str],
        remedy: str,
        *,
        can_skip: bool = True,
    ) -> None:
        """Called before collectives of an uncompiled model; the ranks meet, unless the step is known.

        Args:
            group_name: the process group.
            kind: what the step does with the unit, in words: "gather", for instance.
            unit: label of the unit.
            names: of the parameters that take part.
            remedy: what to do about a difference between ranks.
            can_skip: this rank will wait for its collectives by ``Steps.wait``.
        """

        def words() -> StepWords:
            return StepWords.of(f"{kind} unit {unit}: {', '.join(names)}", remedy)

        begins = group_name not in self._begun
        if begins:
            self._begun.add(group_name)
        Steps.of_group(group_name).come(
            (kind, unit, *names), words, begins=begins, reduces=kind == REDUCE, can_skip=can_skip
        )

    def write_back(self) -> None:
        """Writes what an uncompiled forward has changed in place back to the shards, before anything gathers them."""
        reads = [*self.read_alone.values(), *self.handed_on]
        for unit in dict.fromkeys([*self.running, *(unit for unit, _ in reads)]):
            unit.write_back()

    def forget_reads(self) -> None:
        """Forgets the full parameters that a forward has read outside of the forwards of their units."""
        self.read_alone.clear()
        self.handed_on.clear()

    def warn_unplanned(self) -> None:
        """Warns, once, that a graph runs gathers and reductions of the model one by one."""
        if self.has_warned:
            return
        self.has_warned = True
        warnings.warn(
            "graphshard: this model was compiled by a backend that does not plan its collectives, so each parameter is "
            'gathered and reduced alone, and nothing overlaps; use torch.compile(model, backend="graphshard")',
            stacklevel=3,
        )

    def reset(self) -> None:
        """Drops the state that an interrupted forward or backward has left."""
        self.running.clear()
        self.between.clear()
        self.forget_reads()
        self.ahead.clear()
        self.saved.clear()
        self.forwards.clear()
        self.waiting = self._end_is_queued = False
        self._last_run = ""
        for unit in self.units():
            unit.drop_iteration()

    def units(self) -> list[TreeUnit]:
        """The units below the roots, outermost first."""
        found = {
            id(module.__dict__[UNIT]): module.__dict__[UNIT]
            for root in self.roots
            for module in root.modules()
            if UNIT in module.__dict__
        }
        return list(found.values())

    def groups(self) -> list[str]:
        """The process groups of more than one rank that the models' collectives are of.

        First those over which parameters are sharded or copied, then the other axes that parameters lie on.
        """
        slots = [slot for unit in self.units() for slot in unit.slots]
        axes = [axis for slot in slots for axis in (slot.axis, slot.replicate)]
        axes += [axis for slot in slots for axis in slot.other_axes]
        return list(dict.fromkeys(axis.group_name for axis in axes if axis.size > 1 and axis.group_name))

    def begin_iteration(self) -> None:
        """Called where a forward of the model begins that is no part of a backward."""
        self.last_forward = self.last_gathered = None
        self.behind.clear()
        self._begun.clear()
        self._end_is_queued = False  # a backward that raised an exception has not come to its end
        self.drop_prefetched()
        for unit in list(self.gathered_again):
            unit.leave_backward()

    def drop_prefetched(self) -> None:
        """Frees the results of gathers that were started for units which did not run."""
        while self.prefetched:
            self.prefetched.pop().drop_prefetched()

    def enter_backward(self, unit: TreeUnit, around: Sequence[TreeUnit]) -> None:
        """Notes that the backward has come to a unit, and frees the units that it is past.

        Args:
            unit: the unit.
            around: the units in whose forwards the unit's was.
        """
        self.queue_end_of_backward()
        for other in list(self.gathered_again):
            if other.is_entered and not other.is_between and other is not unit and other not in around:
                other.leave_backward()
                if other.owes_reduction:
                    other.reduce_left_over()
        unit.is_entered = True

    def queue_end_of_backward(self) -> None:
        """Calls :meth:`_end_backward` once the running backward ends."""
        if self._end_is_queued:
            return
        self._end_is_queued = True
        queue_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self._end_is_queued:  # else the iteration was reset
            self.finish_backward()

    def finish_backward(self, *, by_hand: bool = False) -> None:
        """Frees gathered parameters, and reduces gradients that wait if this is the last backward."""
        is_last = by_hand or (self.is_last_backward and not self.is_finalized_by_hand)
        self._end_is_queued = False
        self.iterations += is_last
        self.write_back()
        self.drop_prefetched()
        units = self.units()
        for unit in units:
            unit.end_backward()
            if is_last or unit.owes_reduction:
                unit.reduce_left_over()
            unit.finish_gradients()
        self.waiting = any(unit.is_waiting for unit in units)
        self.last_forward = None if is_last else self.last_forward


def relabel(roots: Iterable[nn.Module]) -> None:
    """Puts all units below ``roots`` into one tree, and names units and parameters as seen from there."""
    roots = list(roots)
    outer: TreeUnit = roots[0].__dict__[UNIT]
    outer.tree.roots = roots
    seen: set[int] = set()
    named: set[int] = set()
    for index, root in enumerate(roots):
        prefix = f"{index}." if len(roots) > 1 else ""
        for wrapped_path, module in root.named_modules():
            path = ".".join(part for part in wrapped_path.split(".") if part not in WRAPPERS)
            unit = module.__dict__.get(UNIT)
            if unit is not None and unit is not outer and id(unit) not in seen:
                seen.add(id(unit))
                unit.tree, unit.is_root, unit.settings.input_device = outer.tree, False, None
            if unit is not None and unit is not outer:
                unit.label = _label(unit, path, module)
            for name, slot in module.__dict__.get(SLOTS, {}).items():
                if id(slot) not in named:  # a tied parameter has its first name, as in named_parameters()
                    named.add(id(slot))
                    slot.name = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
    outer.tree.max_reductions = max(unit.settings.max_reductions for unit in outer.tree.units())
    for root in roots:
        for module in root.modules():
            for slot in module.__dict__.get(SLOTS, {}).values():
                slot.refresh()


def _label(unit: TreeUnit, path: str, module: nn.Module) -> str:
    """The path of the unit's module; for several modules, their paths joined by "+"."""
    if len(unit.modules) == 1 or module is unit.modules[0]:
        return path
    return unit.label if path in unit.label.split("+") else f"{unit.label}+{path}"
