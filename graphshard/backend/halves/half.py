"""One half of a captured graph at run time: it picks the variant for the state that its units are in.

Why there are variants: see "Variants of a half" in :mod:`graphshard.backend.halves.half_variants`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ..._compat import below_autograd, compile_lock, in_backward
from ...errors import UnsupportedShardingError
from ...fsdp.state import Unit, expect_no_gradient, unit_of
from ...ir import REDUCE_GRAD, UNSHARD, ReduceGradCall, UnshardCall, parameter_of
from .half_variants import PLAIN_STATE, CompiledVariant, Gather, Reduction, Selection, State, shard_ops
from .repeated_forwards import RepeatedForwards


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfFacts:
    """What a half says of itself; a later process reads it from disk.

    Attributes:
        is_backward: it is a backward; if not, a forward or an inference graph.
        gathers, reductions: its shard ops, in graph order.
        group_name: the first process group of more than one rank over which they communicate; "" if there is none.
        kept_between: of a forward, the units that a planner keeps gathered between micro-batches.
        counts_held: a memory budget counts what the units hold beside the inputs, so a variant is compiled for each
            amount of it.
        what: names the half in errors.
    """

    is_backward: bool
    gathers: tuple[Gather, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    group_name: str = ""
    kept_between: frozenset[str] | None = None
    counts_held: bool = False
    what: str = "a graph"

    @staticmethod
    def of(gm: fx.GraphModule, *, pieces: frozenset[str] = frozenset(), **said: Any) -> HalfFacts:
        """Those of a half at level 1.

        Args:
            gm: the half.
            pieces: inputs that are pieces of full parameters as they were in the forward, not shards.
            said: the attributes that its graph does not say.
        """
        gathers, reductions = shard_ops(gm, pieces)
        return HalfFacts(
            gathers=tuple(gathers), reductions=tuple(reductions), group_name=_first_group(gm), **said
        )


@dataclass
class Half:
    """A callable in AOTAutograd's boxed convention that runs the variant for its units' state.

    Attributes:
        facts: what the half says of itself.
        compile_state: compiles the variant for a state.
    """

    facts: HalfFacts
    compile_state: Callable[[State], CompiledVariant]
    _variants: dict[State, CompiledVariant] = field(default_factory=dict)
    _repeats: RepeatedForwards = field(default_factory=RepeatedForwards)
    _boxed_call: bool = True

    def __post_init__(self) -> None:
        self._gathers, self._reductions = self.facts.gathers, self.facts.reductions
        handles = {gather.handle for gather in self._gathers}
        self._handles = sorted(handles | {reduction.handle for reduction in self._reductions})
        self.source_code = None

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward."""
        return self.facts.is_backward

    def compile(self, state: State = PLAIN_STATE) -> CompiledVariant:
        """The variant for a state, compiled when it is first asked for; under Dynamo's lock, as Inductor expects."""
        if state not in self._variants:
            with compile_lock:
                self._variants[state] = self.compile_state(state)
        return self._variants[state]

    def __call__(self, args: list[Any]) -> Any:
        found = {position: unit_of(args[position]) for position in self._handles}
        units = {position: unit for position, unit in found.items() if unit is not None}
        if self.facts.kept_between is not None:
            for unit in units.values():
                unit.keeps_between = unit.label in self.facts.kept_between
        if self.is_backward and in_backward():
            self._refuse_copies(len(found) - len(units))
            for unit in units.values():
                unit.tree.queue_end_of_backward()
        if self._has_backward:
            self._repeats.note(set(units.values()))
        if all(map(self._is_plain, units.values())):
            variant = self.compile()
            _check(variant, args)
            self._follow(variant, units)
            return _run(variant, args)
        selection = self._select(units)
        extra = self._extra_inputs(selection, units)
        values = [*args, *extra]
        self._release(units)
        held_bytes = self._held_bytes(extra, units) if self.facts.counts_held else 0
        del extra
        variant = self.compile((selection, held_bytes))
        _check(variant, values)
        self._follow(variant, units)
        self._forget_gradients(selection, units)  # only now: a half that is refused must lose no gradient
        args.clear()
        outputs = list(_run(variant, values))
        return self._distribute(selection, units, outputs)

    @property
    def _described(self) -> str:
        """The half in errors: graphs of modules that are compiled one by one have equal numbers."""
        of_ops = [*(each.name for each in self._gathers), *(each.name for each in self._reductions)]
        names = list(dict.fromkeys(map(parameter_of, of_ops)))
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{self.facts.what} of {names[0]}{others}" if names else self.facts.what

    @property
    def _has_backward(self) -> bool:
        return self.facts.kept_between is not None

    def _follow(self, variant: CompiledVariant, units: dict[int, Unit]) -> None:
        """Makes sure, where it is not certain, that the other ranks run the same collectives."""
        if variant.collectives and units:
            tree = next(iter(units.values())).tree
            branch = "" if self.is_backward else self._variants[PLAIN_STATE].collectives
            tree.follow(self.facts.group_name, variant.collectives, f"run {self._described}", branch=branch)

    def _refuse_copies(self, missing: int) -> None:
        if missing:
            raise UnsupportedShardingError(
                f"the backward of {self._described} does not know {missing} of its units: hooks of saved tensors have "
                "copied the empty int8 tensors that lead to them; let hooks return tensors without elements as they "
                "are, and use save_on_cpu without pin_memory"
            )

    def _is_plain(self, unit: Unit) -> bool:
        if unit.is_gathered or unit.tree.waiting:
            return False
        if self.is_backward:
            return unit.reduce_grads and unit.all_reduce_grads
        return not self._keeps(unit)

    def _keeps(self, unit: Unit) -> bool:
        """Whether a forward keeps what it gathers for the unit; an evaluation does so only if the user says so."""
        if self._has_backward and self._repeats.expects_more(unit):
            return True
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
        """Drops gradients of earlier micro-batches from the units: they are inputs of this half now, and die in it."""
        for index in selection.with_unreduced:
            reduction = self._reductions[index]
            del units[reduction.handle].unreduced[reduction.name]
        for index in selection.with_partial:
            reduction = self._reductions[index]
            del units[reduction.handle].partial[reduction.name]

    @staticmethod
    def _held_bytes(inputs: list[Tensor], units: dict[int, Unit]) -> int:
        """Bytes that the units hold beside the inputs of this half."""
        own = {id(value) for value in inputs}
        held = (value for unit in set(units.values()) for value in unit.held() if id(value) not in own)
        return sum(value.nbytes for value in held)

    def _release(self, units: dict[int, Unit]) -> None:
        """Frees what the units need no longer, once the inputs of this half hold it."""
        for unit in units.values():
            if self.is_backward:
                unit.tree.queue_end_of_backward()
                unit.end_backward()
            # The last micro-batch keeps what its backward reads.
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
            unit = units[reduction.handle]
            unit.add_unreduced(reduction.name, outputs[reduction.output])
            expect_no_gradient(unit.slot_of(reduction.name).param)
            outputs[reduction.output] = None
        for index in selection.scattered:
            reduction = self._reductions[index]
            unit = units[reduction.handle]
            unit.add_partial(reduction.name, outputs[reduction.output])
            expect_no_gradient(unit.slot_of(reduction.name).param)
            outputs[reduction.output] = None
        return outputs


def _check(variant: CompiledVariant, args: list[Any]) -> None:
    if variant.check is not None:
        variant.check(args)


def _run(variant: CompiledVariant, args: list[Any]) -> Any:
    """Runs a variant below autograd: AOTAutograd differentiates around it.

    That leaves out the Python autograd of its collectives, 20 us for a gather and its wait.
    """
    with below_autograd():
        return variant.run(args)


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
