"""How a unit runs without a compiler: it is gathered as a whole and reduced as a whole.

The first parameter that a forward of the unit reads gathers all of them, in one autograd node. The backward of that
node reduces all gradients that the unit got. So one collective serves the unit each way, and ranks that read different
parameters still gather the same. Code that Dynamo traces reads parameters one by one
(:func:`graphshard.fsdp.sharded_class.read_parameter`) and does not come here.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .._compat import gradients_are_boxed, in_backward, in_recomputation, is_tracing
from .._compat_autograd import accumulates_in_leaf, are_in_order, backward_id, is_asked_for, is_in_backward
from ..ir import COMMS, new_handle
from ..tensor_trees import tensors_in
from .state import (
    ForwardReads,
    FullRead,
    GatheredOnce,
    ParameterSlot,
    Span,
    Tree,
    TreeUnit,
    Unit,
    add_to_grad,
    as_complex,
    can_hook,
    expect_no_gradient,
    local_shard,
    owner_of,
    reduce_together,
    shard_data,
    version_of,
)


class _GatherUnit(torch.autograd.Function):
    """From the shards of a unit to its full parameters; backward: from their gradients to those of the shards."""

    @staticmethod
    def forward(
        ctx: Any,
        unit: Unit,
        slots: list[ParameterSlot],
        is_shown: bool,
        reads: ForwardReads | None,
        *shards: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # What a gather returns are views, to which autograd lets nobody write in place.
        held = [slot.as_held(full) for slot, full in zip(slots, unit.gather(slots), strict=True)]
        fulls = tuple(full.data if type(full) is Tensor else full for full in held)
        ctx.is_own, ctx.is_again, ctx.ran_in = reads is not None, in_backward(), None
        if ctx.is_own:
            unit.graphs.add(ctx)
        ctx.is_complex = [slot.is_complex for slot in slots]
        # A module that shows the result would keep itself alive through the unit: no garbage collector sees that.
        ctx.unit = weakref.ref(unit) if is_shown else lambda: unit
        handle = _handle_of_comms(unit) if is_shown else unit.handle
        # A DTensor goes in, and a DTensor comes out of the backward: to_local() would be a node for each parameter.
        ctx.specs = [shard._spec for shard in shards]
        ctx.handle = handle
        ctx.slots, ctx.arguments = [] if is_shown else slots, slots[0].arguments if slots else ()
        ctx.calls = [
            slot.reduction_of(shard._local_tensor)  # which the gather has checked
            for slot, shard in zip(slots, shards, strict=True)
        ]
        frozen = [full for slot, full in zip(slots, fulls, strict=True) if not slot.param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return fulls

    #: The gradients come in a list, where torch can do that: each is freed once it is copied.
    boxed_grads_call = True

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        boxed: list[Tensor | None] = grads[0] if gradients_are_boxed else list(grads)
        del grads
        if torch.is_grad_enabled():  # create_graph: the gradients of gradients are refused
            return _reduce_once(ctx, *boxed)
        return _GatherUnit.reduce(ctx, boxed)

    @staticmethod
    def reduce(
        ctx: Any, grads: list[Tensor | None], *, is_recorded: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Reduces the gradients, and takes them out of the list.

        Args:
            is_recorded: autograd records what becomes of the gradients, so leaves get them from autograd.
        """
        num_grads = len(grads)
        if (
            ctx.slots and ctx.slots[0].arguments is not ctx.arguments
        ):  # a setting has changed since the forward
            ctx.calls = [slot.reduction_of(shard_data(slot)) for slot in ctx.slots]
        unit = ctx.unit()
        waits = unit is not None and not is_recorded and _waits(ctx, unit, grads)
        given, calls = [], []
        for index in range(num_grads):
            grad, grads[index] = grads[index], None
            if grad is None and not waits and unit is not None and ctx.slots:
                grad = unit.take_unreduced(ctx.slots[index].name)
            elif grad is not None:
                grad = torch.view_as_real(grad.resolve_conj()) if ctx.is_complex[index] else grad
            if grad is not None:
                given.append(index)
                calls.append(ctx.calls[index].with_gradient(grad, ctx.handle))
        grad = None
        if unit is not None and ctx.is_own:
            unit.owes_reduction = False
            unit.end_of_gradients()
            if other := unit.tree.behind.pop(unit.label, None):
                other.prefetch_for_backward()
        elif unit is not None:
            unit.owes_reduction |= waits
        reduced = unit.reduce(calls, waits=waits) if unit is not None else reduce_together(calls)
        result: list[Tensor | None] = [None] * num_grads
        leaves = ctx.next_functions
        by_index = dict(zip(given, reduced, strict=True))
        is_in_order, gives_zeros = are_in_order(reduced), unit is not None and unit.gives_zeros
        for index in range(num_grads):
            grad, leaf = by_index.get(index), leaves[index][0]
            if grad is None and gives_zeros and leaf is not None and is_asked_for(leaf):
                result[index] = torch.zeros_like(leaf.variable)
            elif grad is None:
                # None of a frozen shard, and of one that was computed.
                if (param := getattr(leaf, "variable", None)) is not None:
                    expect_no_gradient(param)
            else:
                local = as_complex(grad) if ctx.is_complex[index] else grad
                reduced_grad = DTensor(local, ctx.specs[index], requires_grad=False)
                if not is_recorded and accumulates_in_leaf(leaf, is_in_order=is_in_order):
                    # That node would detach the DTensor, through the dispatch of DTensors for each parameter.
                    add_to_grad(leaf.variable, reduced_grad)
                else:
                    result[index] = reduced_grad
        return (None, None, None, None, *result)


def _waits(ctx: Any, unit: Unit, grads: list[Tensor | None]) -> bool:
    """Whether gradients are added up, and reduced with those that the running backward comes to later.

    So it is where the backward will come to another forward of the unit, and where a reentrant checkpoint runs a part
    of a forward again: FSDP2 reduces a unit once as well.
    """
    if not ctx.slots:
        return False
    if ctx.is_own:
        ctx.ran_in = backward_id()
        return not ctx.is_again and any(
            node.ran_in != ctx.ran_in and is_in_backward(node) for node in unit.graphs
        )
    leaves = [node for (node, _), grad in zip(ctx.next_functions, grads, strict=True) if grad is not None]
    is_in_order = are_in_order(grads)
    return ctx.is_again and all(accumulates_in_leaf(leaf, is_in_order=is_in_order) for leaf in leaves)


@once_differentiable
def _reduce_once(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _GatherUnit.reduce(ctx, list(grads), is_recorded=True)


class Writable(torch.autograd.Function):
    """The same memory as a tensor that is no view: autograd lets nobody write in place to results of some functions.

    It stands for a full parameter that is held anyway: the shard, where one rank holds it all, what is shown, or the
    result of a graph.
    """

    @staticmethod
    def forward(ctx: Any, held: Tensor) -> Tensor:
        return held.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _handle_of_comms(unit: Unit) -> Tensor:
    """A handle that leads to the collectives of a unit, and not to the unit."""
    return new_handle(**{COMMS: unit.settings.comms})


def full_parameter(slot: ParameterSlot) -> Tensor:
    """The full parameter, as a forward reads it; the first one read in a forward of its unit gathers the unit.

    A parameter that another unit reads, or a checkpointed region that runs again, is gathered alone.
    """
    unit = owner_of(slot)
    if unit.in_use is not None:
        if slot.name not in unit.in_use and slot.needs_op:
            _gather_all(unit, unit.in_use)
        elif slot.name not in unit.in_use:
            _gather(unit, [slot], unit.in_use)
        return unit.in_use[slot.name].shown
    tree = unit.tree
    if tree.running and slot.name in tree.read_alone:
        return tree.read_alone[slot.name][1].shown
    unit.write_back()
    alone = ForwardReads()
    _gather(unit, [slot], alone)
    if tree.in_forward:
        tree.read_alone[slot.name] = (unit, alone[slot.name])
    return alone[slot.name].shown


def take_part_unused(unit: Unit) -> None:
    """Gathers a unit that reduces zeros for unused parameters, also if this rank reads none of them."""
    if torch.is_grad_enabled():
        unit.mark_run()
    if unit.in_use is not None and any(slot.needs_op for slot in unit.slots):
        _gather_all(unit, unit.in_use)


def finish_reads(unit: Unit) -> None:
    """Writes what a forward of the unit has changed in place back to the shards, at its end."""
    unit.write_back()
    if unit.tree.running == [unit]:
        unit.tree.write_back()


def watch_outputs(tree: Tree, outputs: Any) -> None:
    """Makes a backward of the outputs run the end of the backward, also if it reaches no parameter on this rank."""
    if not torch.is_grad_enabled() or not any(unit.reduces_unused for unit in tree.units()):
        return
    for output in tensors_in(outputs):
        if output.requires_grad:
            output.register_hook(lambda _: tree.queue_end_of_backward())


def watch_backward(unit: Unit, outputs: Any) -> None:
    """Makes the backward of a forward's outputs gather the unit again, and start to gather what comes next."""
    if unit.in_use is None or not unit.in_use.gathers or not torch.is_grad_enabled() or not can_hook():
        return
    tree, reads = unit.tree, unit.in_use
    around = tuple(tree.running[:-1])
    previous = None if in_backward() else tree.last_forward  # a part that runs again has none before it
    enter = _EnterBackward(unit, around, previous, reads.gathers, reads.span)
    watched = [each for each in tensors_in(outputs) if each.requires_grad and each.grad_fn is not None]
    for output in watched:
        _hook_first(output, enter)
    reads.span.num_to_enter += bool(watched)
    if not in_backward():
        tree.last_forward = unit


@dataclass(eq=False, slots=True)
class _EnterBackward:
    """A hook of the outputs of a module's forward: it gathers the unit for its backward, unless it is gathered.

    Then it starts to gather the units that come next.
    """

    unit: Unit
    around: tuple[TreeUnit, ...]
    previous: TreeUnit | None
    gathers: list[GatheredOnce]
    span: Span
    has_entered: bool = False

    def __call__(self, grad: Tensor) -> None:
        unit = self.unit
        self.span.num_to_enter -= not self.has_entered
        self.has_entered = True
        unit.tree.enter_backward(unit, self.around)
        unit.is_between = self.span.num_to_enter > 0
        if unit.unshards_in_backward and any(gathered.is_freed for gathered in self.gathers):
            unit.gather_for_backward()
            unit.is_entered = True
        order, previous = unit.settings.backward_order, [self.previous] if self.previous is not None else []
        if previous and order == "post" and not unit.backward_prefetch:
            unit.tree.behind[unit.label] = previous[0]
        for other in unit.backward_prefetch or (() if order in ("post", "none") else previous):
            other.prefetch_for_backward()


def _hook_first(output: Tensor, enter: _EnterBackward) -> None:
    """Sets the hook before those of units inside of this one that return the same tensor.

    Hooks run in the order in which they were set. A backward must enter the outer unit first: it leaves an inner unit
    where it enters one that is not inside of it.
    """
    hooks = output._backward_hooks or {}
    inner = {key: hook for key, hook in hooks.items() if type(hook) is _EnterBackward}
    for key in inner:
        del hooks[key]
    output.register_hook(enter)
    hooks.update(inner)


def drop_prefetched(tree: Tree) -> None:
    """Frees the results of gathers that were started for units which did not run; not while a backward goes on."""
    if not in_backward():
        tree.drop_prefetched()


def show_gathered(unit: Unit) -> None:
    """Makes the modules show the gathered parameters of a unit, and gradients of what they show reach the shards.

    What is shown already, and still valid, stays the same tensor.
    """
    slots = [slot for slot in unit.slots if unit.gathered_value(slot.name) is not None]
    slots = [slot for slot in slots if unit.shows_kept or slot.valid_shown is None]
    unit.shows_kept = False
    if slots:
        for slot, full in zip(slots, _gathered(unit, slots, is_shown=True), strict=True):
            slot.show(full)


#: Marks what changes parameters: Dynamo would trace it, and lose parameters when it writes back the modules' dicts.
untraced = torch.compiler.disable(
    reason="unshard(), reshard() and the like change what modules hold: Dynamo does not trace them, and torch.compile "
    "without fullgraph=True runs them as they are"
)


class UnshardHandle:
    """The result of ``unshard(async_op=True)``: call :meth:`wait` before the parameters are used."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @untraced
    def wait(self) -> None:
        """Waits for the gather; after it the module's parameters are the full ones, unless a forward has freed them."""
        with torch.inference_mode(False):  # what is shown may be read in a forward that trains
            self._unit.finish_unshard()
            show_gathered(self._unit)


def show_kept(unit: Unit) -> None:
    """Makes the modules show the full parameters that a forward keeps for its backward, as FSDP2 does.

    Called where someone looks at parameters between the two, perhaps on one rank only: forwards and backwards do the
    same with and without it.
    """
    tree = unit.tree
    if not unit.may_show_kept or tree.in_forward or tree.has_begun_backward or in_backward() or is_tracing():
        return
    if not can_hook():  # a transform of torch.func runs, or something is traced
        return
    unit.may_show_kept = False
    if any(slot.hidden is not None for slot in unit.slots):  # unshard() shows it
        return
    slots = [
        slot
        for slot in unit.slots
        # functional_call may have put a computed shard there, and be about to take it away.
        if not slot.is_substituted
        and isinstance(slot.param, nn.Parameter)
        and unit.held_value(slot.name) is not None
    ]
    if slots:
        unit.shows_kept = True
        for slot, full in zip(slots, _gathered(unit, slots, is_shown=True), strict=True):
            slot.show(full, stands_for_shard=True)


def _gather_all(unit: Unit, in_use: ForwardReads) -> None:
    slots = [slot for slot in unit.slots if slot.needs_op and slot.name not in in_use]
    _gather(unit, [slot for slot in slots if not slot.is_substituted], in_use)
    if not in_backward():
        _prefetch(unit)


def _prefetch(unit: Unit) -> None:
    """Starts the gathers that come next in the forward: those that the user lists, or what came next so far.

    All ranks have gathered the same units so far, so they start the same one.
    """
    before, unit.tree.last_gathered = unit.tree.last_gathered, unit
    if before is not None and unit not in before.successors:
        before.successors.append(unit)
    for other in unit.forward_prefetch or (unit.successors if len(unit.successors) == 1 else ()):
        other.prefetch()


def _gather(unit: Unit, slots: list[ParameterSlot], in_use: ForwardReads) -> None:
    """Enters the parameters as a forward reads them; those that the modules show are not gathered."""
    if in_recomputation() and any(slot.needs_op for slot in slots):
        unit.gather_for_backward()
    # A tensor of inference mode has no version, so a write to it would go unnoticed.
    with torch.inference_mode(False):
        fulls: dict[str, Tensor] = {}
        missing = []
        for slot in slots:
            shown = slot.valid_shown if slot.needs_op else local_shard(slot)
            shown = None if slot.needs_op and unit.shows_kept else shown
            if shown is None or (slot.needs_op and type(shown) is not nn.Parameter):
                missing.append(slot)
            else:
                with torch.enable_grad():
                    fulls[slot.name] = Writable.apply(shown)
        if missing:
            given = _gathered(unit, missing, reads=in_use if in_use is unit.in_use else None)
            fulls.update({slot.name: full for slot, full in zip(missing, given, strict=True)})
        gathered = {slot.name: slot for slot in slots if slot.needs_op}
        if gathered:
            once = GatheredOnce(
                unit,
                {name: fulls[name] for name in gathered},
                gathered,
            )
            unit.remember(once, in_use if in_use is unit.in_use else None)
        with torch.enable_grad():
            for slot in slots:
                full = fulls[slot.name]
                in_use[slot.name] = FullRead.of(full, slot.as_read(full), version_of(slot.param))


def _gathered(
    unit: Unit, slots: list[ParameterSlot], is_shown: bool = False, reads: ForwardReads | None = None
) -> tuple[Tensor, ...]:
    # Also under no_grad: a parameter first read there may be read again where gradients are needed.
    with torch.enable_grad():
        return _GatherUnit.apply(unit, slots, is_shown, reads, *(slot.param for slot in slots))
