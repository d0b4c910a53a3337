"""One half of a captured graph, compiled once for each state its units are met in.

Whether gradients are reduced, and which parameters are gathered already, is the units' state when
the half runs (:mod:`graphshard.fsdp.unit`). Dynamo and AOTAutograd never see it: the half is kept at
level 1, and :func:`specialise` rewrites a copy for the state at hand before the passes lower it. A
training that never flips a flag meets one state and compiles each half once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .._compat import below_autograd
from ..errors import UnsupportedShardingError
from ..fsdp import Unit, unit_of
from ..ir import (
    GATHERED_INPUT,
    REDUCE_GRAD,
    UNSHARD,
    WAITING_INPUTS,
    GraphEmitter,
    ReduceGradCall,
    UnshardCall,
    copy_graph,
    emit_cast,
    output_values,
    padded_shape,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one variant of a half does differently; indices count its gathers or its reductions.

    Attributes:
        supplied: gathers that are left out; the full parameter is an input.
        kept: gathers whose result is an output too.
        unreduced: reductions that are left out; the full gradient leaves in the reduction's dtype.
        scattered: reductions without their all-reduce; the partial sum leaves.
        with_unreduced: reductions that add full gradients of earlier micro-batches, an input.
        with_partial: reductions that add partial sums of earlier micro-batches, an input.
    """

    supplied: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    unreduced: tuple[int, ...] = ()
    scattered: tuple[int, ...] = ()
    with_unreduced: tuple[int, ...] = ()
    with_partial: tuple[int, ...] = ()


#: What a half is compiled for: what it does differently, and the bytes that its units hold besides.
State = tuple[Selection, int]

PLAIN = Selection()
PLAIN_STATE: State = (PLAIN, 0)


@dataclass(frozen=True, slots=True)
class Gather:
    """One ``unshard`` of a half: positions of its inputs (-1: not an input), names of parameter and unit."""

    name: str
    unit: str
    handle: int
    shard: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """One ``reduce_grad`` of a half: positions of its handle and of its output (-1: not an output by itself)."""

    name: str
    unit: str
    handle: int
    output: int
    has_replicas: bool


@dataclass
class Variant:
    """A specialised copy of a half, ready for the passes.

    Attributes:
        unreduced_outputs: outputs that are gradients and are not reduced.
        held_bytes: what its units hold while it runs, besides its inputs, where that counts.
        collectives: fingerprint of the collectives, set when it is compiled; "" if there are none, or
            if the ranks do not check each other.
        check: called with the inputs in front of each run, set when it is compiled; None if nothing is to be checked.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    unreduced_outputs: frozenset[int] = frozenset()
    held_bytes: int = 0
    collectives: str = ""
    check: Callable[[list[Any]], None] | None = None


@dataclass
class Half:
    """A callable in AOTAutograd's boxed convention that picks the variant for its units' state.

    Attributes:
        compile_variant: compiles a specialised graph on example inputs.
        pieces: inputs that are pieces of full parameters as they were in the forward, not shards.
        kept_between: of a forward, the units that a planner keeps gathered between micro-batches.
        counts_held: what the units hold besides is a part of a memory budget: a variant is compiled for each amount.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    is_backward: bool
    compile_variant: Callable[[Variant], Callable[[list[Any]], Any]]
    pieces: frozenset[str] = frozenset()
    kept_between: frozenset[str] | None = None
    counts_held: bool = False
    what: str = "a graph"
    _collectives: dict[State, str] = field(default_factory=dict)
    _checks: dict[State, Callable[[list[Any]], None] | None] = field(default_factory=dict)
    _compiled: dict[State, Callable[[list[Any]], Any]] = field(default_factory=dict)
    _boxed_call: bool = True

    def __post_init__(self) -> None:
        self._gathers, self._reductions = shard_ops(self.gm, self.pieces)
        handles = {gather.handle for gather in self._gathers}
        self._handles = sorted(handles | {reduction.handle for reduction in self._reductions})
        self._group_name = _first_group(self.gm)
        self.source_code = None

    def compile(self, state: State = PLAIN_STATE) -> None:
        """Compiles the variant for a state, unless that was done."""
        if state not in self._compiled:
            variant = self._specialise(*state)
            self._compiled[state] = self.compile_variant(variant)
            self._collectives[state] = variant.collectives
            self._checks[state] = variant.check

    def __call__(self, args: list[Any]) -> Any:
        found = {position: unit_of(args[position]) for position in self._handles}
        units = {position: unit for position, unit in found.items() if unit is not None}
        if self.kept_between is not None:
            for unit in units.values():
                unit.keeps_between = unit.label in self.kept_between
        if self.is_backward and any(unit.reduces_unused for unit in units.values()):
            next(iter(units.values())).tree.queue_end_of_backward()
        if all(map(self._is_plain, units.values())):
            self.compile()
            self._check(PLAIN_STATE, args)
            self._follow(PLAIN_STATE, units)
            return self._run(PLAIN_STATE, args)
        selection = self._select(units)
        extra = self._extra_inputs(selection, units)
        values = [*args, *extra]
        self._release(units)
        state = selection, self._held_bytes(extra, units) if self.counts_held else 0
        del extra
        self.compile(state)
        self._check(state, values)
        self._follow(state, units)
        self._forget_gradients(selection, units)  # nothing is lost by a half that is refused
        args.clear()
        outputs = list(self._run(state, values))
        return self._distribute(selection, units, outputs)

    @property
    def _has_backward(self) -> bool:
        return self.kept_between is not None

    def _check(self, state: State, args: list[Any]) -> None:
        if (check := self._checks[state]) is not None:
            check(args)

    def _follow(self, state: State, units: dict[int, Unit]) -> None:
        """Makes sure, where it is not certain, that the other ranks run the same collectives."""
        collectives = self._collectives[state]
        if collectives and units:
            tree = next(iter(units.values())).tree
            branch = "" if self.is_backward else self._collectives[PLAIN_STATE]
            tree.follow(self._group_name, collectives, f"run {self.what}", branch=branch)

    def _run(self, state: State, args: list[Any]) -> Any:
        """Runs a variant. AOTAutograd differentiates around it, so the Python autograd of its collectives,
        20 us for a gather and its wait, is left out.
        """
        compiled = self._compiled[state]
        with below_autograd():
            return compiled(args)

    def _is_plain(self, unit: Unit) -> bool:
        if unit.is_gathered or unit.tree.waiting:
            return False
        if self.is_backward:
            return unit.reduce_grads and unit.all_reduce_grads
        return not self._keeps(unit)

    def _keeps(self, unit: Unit) -> bool:
        """Whether a forward keeps what it gathers; an evaluation does so only where the user says it."""
        return unit.keeps_from_forward and (self._has_backward or not unit.stays_gathered)

    def _select(self, units: dict[int, Unit]) -> Selection:
        chosen: dict[str, list[int]] = {name: [] for name in Selection.__slots__}
        for index, gather in enumerate(self._gathers):
            unit = units.get(gather.handle)
            if unit is None or gather.shard < 0:
                continue
            if unit.gathered_value(gather.name) is not None:
                chosen["supplied"].append(index)
            elif not self.is_backward and self._keeps(unit):
                chosen["kept"].append(index)
        for index, reduction in enumerate(self._reductions):
            unit = units.get(reduction.handle)
            if unit is None:
                continue
            all_reduce = unit.all_reduce_grads or not reduction.has_replicas
            if reduction.output < 0 and not (unit.reduce_grads and all_reduce):
                raise UnsupportedShardingError(
                    f"parameter {reduction.name} is read in several ways whose gradients are added after their "
                    "reductions, so they cannot be accumulated unreduced; read it in one way only"
                )
            if not unit.reduce_grads:
                chosen["unreduced"].append(index)
                continue
            if reduction.name in unit.unreduced:
                chosen["with_unreduced"].append(index)
            if not all_reduce:
                chosen["scattered"].append(index)
            elif reduction.name in unit.partial:
                chosen["with_partial"].append(index)
        return Selection(**{name: tuple(indices) for name, indices in chosen.items()})

    def _extra_inputs(self, selection: Selection, units: dict[int, Unit]) -> list[Tensor]:
        extra = []
        for index in selection.supplied:
            gather = self._gathers[index]
            extra.append(units[gather.handle].gathered_value(gather.name))
        for index in selection.with_unreduced:
            reduction = self._reductions[index]
            extra.append(units[reduction.handle].unreduced[reduction.name])
        for index in selection.with_partial:
            reduction = self._reductions[index]
            extra.append(units[reduction.handle].partial[reduction.name])
        return extra

    def _forget_gradients(self, selection: Selection, units: dict[int, Unit]) -> None:
        """Gradients of earlier micro-batches are this half's inputs now, and die in it."""
        for index in selection.with_unreduced:
            reduction = self._reductions[index]
            del units[reduction.handle].unreduced[reduction.name]
        for index in selection.with_partial:
            reduction = self._reductions[index]
            del units[reduction.handle].partial[reduction.name]

    @staticmethod
    def _held_bytes(inputs: list[Tensor], units: dict[int, Unit]) -> int:
        """What the units hold that is not among the inputs of this half."""
        own = {id(value) for value in inputs}
        held = (value for unit in set(units.values()) for value in unit.held() if id(value) not in own)
        return sum(value.nbytes for value in held)

    def _release(self, units: dict[int, Unit]) -> None:
        """Frees what the units need no longer once this half holds it."""
        for unit in units.values():
            if self.is_backward:
                unit.tree.queue_end_of_backward()
                unit.end_backward()
            # The last micro-batch keeps what is gathered for its backward.
            elif unit.reshards and not (unit.stays_gathered or (self._has_backward and unit.keeps_between)):
                unit.reshard()

    def _distribute(
        self,
        selection: Selection,
        units: dict[int, Unit],
        outputs: list[Any],
    ) -> list[Any]:
        """Hands the variant's additional results to the units; returns what AOTAutograd expects."""
        if selection.kept:
            kept = outputs[-len(selection.kept) :]
            del outputs[-len(selection.kept) :]
            for index, full in zip(selection.kept, kept, strict=True):
                gather = self._gathers[index]
                units[gather.handle].keep(gather.name, full)
        for index in selection.unreduced:
            reduction = self._reductions[index]
            units[reduction.handle].add_unreduced(reduction.name, outputs[reduction.output])
            outputs[reduction.output] = None
        for index in selection.scattered:
            reduction = self._reductions[index]
            units[reduction.handle].add_partial(reduction.name, outputs[reduction.output])
            outputs[reduction.output] = None
        return outputs

    def _specialise(self, selection: Selection, held_bytes: int) -> Variant:
        gm, inputs = specialised(self.gm, selection)
        unreduced_outputs = frozenset(self._reductions[index].output for index in selection.unreduced)
        return Variant(gm, [*self.example_inputs, *inputs], unreduced_outputs, held_bytes)


def specialised(gm: fx.GraphModule, selection: Selection) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a half at level 1 for a state of its units, and the values of its additional inputs, the last ones."""
    gm = copy_graph(gm)
    values = []
    gathers = list(gm.graph.find_nodes(op="call_function", target=UNSHARD))
    reductions = list(gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD))
    last_input = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]

    def add_input(name: str, like: Tensor, shape: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        nonlocal last_input
        with gm.graph.inserting_after(last_input):
            last_input = gm.graph.placeholder(name)
        last_input.meta["val"] = like.new_empty(shape, dtype=dtype)
        values.append(last_input.meta["val"])
        return last_input

    supplied = {
        index: add_input(f"{GATHERED_INPUT}{index}", *_full_of(gathers[index]))
        for index in selection.supplied
    }
    unreduced = {
        index: add_input(f"{WAITING_INPUTS[0]}{index}", *_unreduced_of(reductions[index]))
        for index in selection.with_unreduced
    }
    partial = {
        index: add_input(f"{WAITING_INPUTS[1]}{index}", *_partial_of(reductions[index]))
        for index in selection.with_partial
    }
    outputs = list(output_values(gm.graph))
    outputs += [gathers[index] for index in selection.kept]
    gm.graph.output_node().args = (tuple(outputs),)
    for index, full in supplied.items():
        gathers[index].replace_all_uses_with(full)
        gm.graph.erase_node(gathers[index])
    for index, node in enumerate(reductions):
        call = ReduceGradCall(*node.args)
        with gm.graph.inserting_before(node):
            emit = GraphEmitter(gm.graph, origin=node)
            if index in selection.unreduced:
                replacement = emit_cast(emit, call.grad, call.reduce_dtype)
            else:
                replacement = emit(
                    REDUCE_GRAD,
                    *call._replace(
                        unreduced=unreduced.get(index),
                        partial=partial.get(index),
                        all_reduce=index not in selection.scattered,
                    ),
                )
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm, values


def shard_ops(gm: fx.GraphModule, pieces: frozenset[str]) -> tuple[list[Gather], list[Reduction]]:
    """The gathers and the reductions of a half at level 1, in order; ``pieces`` is as for :class:`Half`."""
    position = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    outputs = {
        value: index for index, value in enumerate(output_values(gm.graph)) if isinstance(value, fx.Node)
    }
    gathers = []
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        call = UnshardCall(*node.args)
        shard = -1 if call.shard.name in pieces else position.get(call.shard, -1)
        gathers.append(Gather(call.name, call.unit, position[call.handle], shard))
    reductions = []
    for node in gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        reduction = ReduceGradCall(*node.args)
        output = outputs[node] if node in outputs and len(node.users) == 1 else -1
        has_replicas = reduction.replicate_size > 1
        handle = position[reduction.handle]
        reductions.append(Reduction(reduction.name, reduction.unit, handle, output, has_replicas))
    return gathers, reductions


def _first_group(gm: fx.GraphModule) -> str:
    """The first process group of more than one rank over which a half's shard ops communicate."""
    for node in gm.graph.nodes:
        if node.target in (UNSHARD, REDUCE_GRAD):
            call = (UnshardCall if node.target is UNSHARD else ReduceGradCall)(*node.args)
            for size, name in (
                (call.group_size, call.group_name),
                (call.replicate_size, call.replicate_group),
            ):
                if size > 1 and name:
                    return name
    return ""


def _full_of(gather: fx.Node) -> tuple[Tensor, Sequence[Any], torch.dtype]:
    full = gather.meta["val"]
    return full, full.shape, full.dtype


def _unreduced_of(reduction: fx.Node) -> tuple[Tensor, Sequence[Any], torch.dtype]:
    call = ReduceGradCall(*reduction.args)
    grad = call.grad.meta["val"]
    return grad, grad.shape, call.reduce_dtype or grad.dtype


def _partial_of(reduction: fx.Node) -> tuple[Tensor, Sequence[Any], torch.dtype]:
    grad, shape, dtype = _unreduced_of(reduction)
    call = ReduceGradCall(*reduction.args)
    return grad, padded_shape(shape, call.dim, call.group_size), dtype
