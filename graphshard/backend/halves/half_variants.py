"""The variants of one half: the half at level 1, rewritten for one state of its units.

**Variants of a half.** Whether gradients are reduced, and which parameters are gathered already, is state of the units
(:mod:`graphshard.fsdp.state.unit`) that Dynamo and AOTAutograd never see. So a half stays at level 1, and a variant of
it is compiled for each state that it meets: some full parameters are inputs (their unit holds them), some are kept for
the unit, and some gradients wait for a later micro-batch. :func:`specialise` is the first step of that compilation; it
edits a copy. A training that never changes a flag meets one state and compiles each half once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...ir import (
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
from ..inductor import VariantCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one variant does differently from the half as captured; indices count its gathers or its reductions.

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


#: What a half is compiled for: the selection, and the bytes that its units hold beside its inputs.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A copy of a half at level 1 for one state, ready for the passes.

    Attributes:
        gm: the copy; its additional inputs are the last ones.
        example_inputs: of the copy.
        unreduced_outputs: outputs that are gradients and are not reduced.
        held_bytes: what the units hold beside its inputs while it runs, where a memory budget counts it.
    """

    gm: fx.GraphModule
    example_inputs: list[Any]
    unreduced_outputs: frozenset[int] = frozenset()
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledVariant:
    """What the compilation of a variant hands back.

    Attributes:
        run: the compiled code, in AOTAutograd's boxed convention.
        collectives: fingerprint of its collectives; "" if there are none, or if the ranks do not compare them.
        check: called with the inputs in front of each run; None if there is nothing to check.
        regathered: of a forward, the names of the parameters whose shards it keeps for the backward to gather again.
        code: what ``run`` runs, if it can be kept for a later process.
    """

    run: Callable[[list[Any]], Any]
    collectives: str = ""
    check: Callable[[list[Any]], None] | None = None
    regathered: frozenset[str] = frozenset()
    code: VariantCode | None = None


def specialise(gm: fx.GraphModule, example_inputs: Sequence[Any], state: State) -> Variant:
    """The variant of a half at level 1 for a state; ``gm`` is not changed."""
    selection, held_bytes = state
    _, reductions = shard_ops(gm, frozenset())
    copy, values = specialise_graph(gm, selection)
    return Variant(
        gm=copy,
        example_inputs=[*example_inputs, *values],
        unreduced_outputs=frozenset(reductions[index].output for index in selection.unreduced),
        held_bytes=held_bytes,
    )


def specialise_graph(gm: fx.GraphModule, selection: Selection) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy of a half at level 1 for a selection, and the fake values of its additional inputs, which come last."""
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
    """The gathers and the reductions of a half at level 1, in graph order.

    Args:
        gm: the half.
        pieces: inputs that are pieces of full parameters as they were in the forward, not shards.
    """
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
