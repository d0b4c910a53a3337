"""The steps that compile one half: specialise > lower > place > agree > hand over.

| step | takes | gives |
|---|---|---|
| :func:`~graphshard.backend.halves.specialise` | the half at level 1, its units' state | a variant at level 1 |
| :func:`lower` | the variant | collectives in place of shard ops (level 2) |
| :func:`place` | the lowered half | collectives merged and at their places |
| :func:`agree` | the placed half | a fingerprint on which all ranks have agreed |
| :func:`hand_over` | the placed half | Inductor's code, its order checked |

The forward is compiled at once, since the backward is traced with the strides of its results. A backward is compiled
when it first runs, when the state of its units is known (:class:`~graphshard.backend.halves.Half`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from .. import passes
from .._compat import group_by_name, uses_gloo
from ..coordination import agree_on_group, recording
from ..errors import ScheduleOrderError, UnsupportedShardingError
from ..ir import (
    ALL_GATHER,
    REDUCE_GRAD,
    REDUCE_SCATTER,
    UNSHARD,
    collective_text,
    copy_graph,
    group_labels,
    group_name,
    is_collective,
    output_values,
    short_name,
    text_fingerprint,
)
from ..pipeline import PassContext, PassRecord, Pipeline, reduced_parameters, shards_behind
from ..planner import check_budget
from .dynamic_sizes import RunningSizes, has_symbolic_sizes
from .dynamo_graph import DynamoGraph
from .halves import CompiledVariant, Half, HalfFacts, State, Variant, specialise
from .inductor import (
    EmptyResults,
    Piece,
    PieceRow,
    VariantCode,
    compile_fx_inner,
    compile_in_pieces,
    compile_later,
    cut_in_pieces,
    emitted_order,
    may_be_in_pieces,
    memory_patch,
    name_groups_by_axis,
    num_compiled_ops,
    order_difference,
    pinning_patch,
    planned_order,
    start_copies,
)
from .joint import JointResult
from .observer import Observer
from .pipelines import half_pipeline, half_pipelines
from .second_start import HalfSource, StepRecord, half_text
from .step_planner import StepPlanner

#: A half is compiled in pieces if at most so large a share of its ops is then compiled.
_MOST_COMPILED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HalfTask:
    """One half that is to be compiled, and all that its steps know.

    Attributes:
        graph: the graph of Dynamo that it is a half of.
        joint: the result of the joint passes.
        observer: sees what the steps do.
        kind: "forward", "backward" or "inference".
        gm: the half at level 1, as the partitioner made it.
        example_inputs: its fake inputs.
        patches: Inductor's settings.
        compiler_arguments: keyword arguments of Inductor's inner compiler.
        record: takes what a later process can use; None if nothing is kept.
    """

    graph: DynamoGraph
    joint: JointResult
    observer: Observer
    kind: str
    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    patches: Mapping[str, Any]
    compiler_arguments: Mapping[str, Any]
    record: StepRecord | None = None

    @property
    def what(self) -> str:
        """Names the half in errors."""
        return f"graph {self.graph.index} ({self.kind})"

    def source(self) -> HalfSource:
        """What a later process compiles further variants from."""
        return HalfSource(
            gm=self.gm,
            example_inputs=self.example_inputs,
            joint=self.joint,
            arguments=self.compiler_arguments,
        )

    def refusing(self, gm: fx.GraphModule, verb: str = "compile") -> AbstractContextManager[None]:
        """A context whose errors reach the ranks that communicate with this one."""
        return self.graph.refusing(f" ({self.kind})", gm, verb)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HalfGraph:
    """A variant of a half between two steps.

    Attributes:
        stage: its name for the observer.
        gm: the graph; the next step edits it in place.
        context: what passes on it know.
        example_inputs: its fake inputs.
        records: what the passes did so far.
    """

    stage: str
    gm: fx.GraphModule
    context: PassContext
    example_inputs: Sequence[Any]
    records: tuple[PassRecord, ...] = ()


def compile_half(task: HalfTask) -> tuple[Callable[..., Any], frozenset[str]]:
    """The compiled half, and of a forward the parameters that the backward gathers again.

    A half with shard ops becomes a :class:`Half`, which compiles a variant for each state of its units. So does one
    without where code is kept, since AOTAutograd then asks for the backward before it runs.
    """
    is_sharded = _has_shard_ops(task.gm)
    if not is_sharded and task.record is None:
        with task.refusing(task.gm):
            compiled = compile_unsharded(task)
        return compiled.run, compiled.regathered
    options = task.graph.options
    facts = HalfFacts.of(
        task.gm,
        pieces=frozenset(piece.placeholder for piece in task.joint.context.pieces),
        is_backward=task.kind == "backward",
        kept_between=task.joint.kept_between if task.kind == "forward" else None,
        counts_held=options.hardware is not None and options.memory_budget is not None,
        what=task.what,
    )
    if task.record is not None and not is_sharded:
        task.record.refuse(f"the {task.kind} has no sharded parameter")
    elif task.record is not None and not (text := half_text(task.gm)):
        task.record.refuse(f"the {task.kind} has a constant that is no plain tensor")
    elif task.record is not None:
        task.record.add_half(task.kind, facts, text, lambda: task.source().as_bytes())
    half = Half(facts=facts, compile_state=compiler_of_states(task))
    return half, frozenset() if half.is_backward else half.compile().regathered


def compiler_of_states(task: HalfTask) -> Callable[[State], CompiledVariant]:
    """Compiles the variant of a half for a state, now or later."""
    later = compile_later(task.patches)
    is_sharded = _has_shard_ops(task.gm)

    def compile_state(state: State) -> CompiledVariant:
        with later(), task.refusing(task.gm), recording() as said:
            if not is_sharded:
                return compile_unsharded(task)
            variant = compile_variant(task, specialise(task.gm, task.example_inputs, state))
            if task.record is not None:  # here, since it writes what AOTAutograd knows of the half
                task.record.add_variant(task.kind, state, variant, tuple(said))
        return variant

    return compile_state


def _has_shard_ops(gm: fx.GraphModule) -> bool:
    return any(node.target in (UNSHARD, REDUCE_GRAD) for node in gm.graph.nodes)


def compile_unsharded(task: HalfTask) -> CompiledVariant:
    """Compiles a half without shard ops: by Inductor alone, unless the model has collectives of its own."""
    variant = Variant(gm=task.gm, example_inputs=list(task.example_inputs))
    if any(map(is_collective, task.gm.graph.nodes)):
        return compile_variant(task, variant)
    half = _begin(task, variant)
    if task.graph.options.memory_budget is not None:
        measured = replace(half.context, scratch=task.graph.kernels.of(half.gm))
        check_budget(half.gm, measured, task.graph.options.memory_budget)
    return hand_over(task, half)


def compile_variant(task: HalfTask, variant: Variant) -> CompiledVariant:
    """The steps behind ``specialise``, in a row."""
    half = _begin(task, variant)
    task.observer.graph(half.stage, "0-partitioned", half.gm, half.context)
    with task.observer.passes(half.stage, half.gm):
        lowered = lower(task, half)
        placed = place(task, lowered)
    task.observer.placed(placed.stage, placed.gm, placed.context, placed.records)
    check = _size_check(task, placed)
    collectives = agree(task, placed)
    return replace(hand_over(task, placed), collectives=collectives, check=check)


def _begin(task: HalfTask, variant: Variant) -> HalfGraph:
    context = task.joint.context
    is_backward = task.kind == "backward"
    context = context.for_backward(variant.unreduced_outputs) if is_backward else context.for_forward()
    return HalfGraph(
        stage=task.observer.stage_of(task.kind),
        gm=variant.gm,
        context=replace(context, held_bytes=variant.held_bytes, start=task.joint.start(task.kind)),
        example_inputs=variant.example_inputs,
    )


def lower(task: HalfTask, half: HalfGraph) -> HalfGraph:
    """Runs all passes on a half up to the one that places the collectives."""
    records = half_pipelines(task.graph.options).before.run(half.gm, half.context)
    return replace(half, records=(*half.records, *records))


def place(task: HalfTask, half: HalfGraph) -> HalfGraph:
    """Runs the pass that places the collectives, and the user's behind it.

    With a cost model, one rank plans and the others follow. Without one, each rank places by what its own kernels
    allocate: the sequence of collectives does not depend on it.

    Raises:
        AgreementError: the ranks have different collectives to place.
        InfeasibleBudgetError: no plan keeps the memory budget.
    """
    pipelines = half_pipelines(task.graph.options)
    placing = pipelines.placing
    if task.graph.options.hardware is None:
        measured = replace(half.context, scratch=task.graph.kernels.of(half.gm))
        records = placing.run(half.gm, measured)
    else:
        planner = StepPlanner.of(task.graph)
        records = planner.place(
            placing, half.gm, half.context, agree(task, half), task.kind, chosen=task.joint.chosen
        )
    if pipelines.after.passes:
        records = [*records, *pipelines.after.run(half.gm, half.context)]
    context = replace(half.context, scratch=task.graph.kernels.scratch())
    return replace(half, context=context, records=(*half.records, *records))


def agree(task: HalfTask, half: HalfGraph) -> str:
    """Has all ranks agree on the collectives of each process group, in the order in which they are issued.

    Returns:
        A fingerprint of all of them, which all ranks have; "" for none, or if the ranks are not compared.

    Raises:
        AgreementError: the ranks would issue different collectives.
    """
    if not task.graph.are_ranks_compared:
        return ""
    gm, context = half.gm, half.context
    labels = group_labels(gm, context.mesh)
    served = reduced_parameters(gm, context)
    sequences: dict[str, list[str]] = {}
    without_sizes: dict[str, list[str]] = {}
    for node in filter(is_collective, gm.graph.nodes):
        names = sorted(binding.name for binding in served.get(node) or shards_behind(node, context))
        of_names = f" of {', '.join(names)}" if names else ""
        sequences.setdefault(group_name(node), []).append(collective_text(node, labels) + of_names)
        kind = f"{short_name(node)} over {labels[group_name(node)]}{of_names}"
        without_sizes.setdefault(group_name(node), []).append(kind)
    for name, sequence in sequences.items():
        agree_on_group(name, sequence, what=task.what)
    if not sequences:
        return ""
    # Sizes are equal in one group. Ranks of one axis may differ in those of another: in pieces of parameters that the
    # axis does not divide, or in the batches that its ranks have.
    told = without_sizes if len(sequences) > 1 else sequences
    # In the order in which the groups are first used: their names differ between ranks.
    return text_fingerprint("\n".join(text for sequence in told.values() for text in sequence))


def hand_over(task: HalfTask, half: HalfGraph) -> CompiledVariant:
    """Compiles a placed half with Inductor, and checks that its code keeps the planned order.

    Warns:
        UserWarning: the order is another one, or cannot be checked (with ``verify="cheap"``).

    Raises:
        ScheduleOrderError: the same with ``verify="full"``.
        UnsupportedShardingError: gloo would gather tensors of a GPU.
    """
    gm, options = half.gm, task.graph.options
    refuse_gloo_on_gpus(gm)
    if groups := _gloo_groups(task, gm):
        exchange = Pipeline(
            passes.ExchangeReductions(groups=groups), given=half_pipeline(options).facts_at_end
        )
        task.observer.records(half.stage, exchange.run(gm, half.context), first=len(half.records) + 1)
    regathered = _kept_shards(gm, half.context) if task.kind == "forward" else frozenset()
    copied_from = start_copies(gm) if task.graph.are_shards_pinned else None
    has_budget = options.memory_budget is not None
    fusions = memory_patch(options.inductor) if has_budget else nullcontext()
    pinned = pinning_patch(releases=has_budget and _is_on_gloo(task, gm))
    names = name_groups_by_axis(gm, half.context.mesh)
    results = None if has_symbolic_sizes(gm) else EmptyResults.of(gm)  # what follows edits the graph
    with task.observer.inductor(half.stage), fusions, pinned:
        row, checked = _compile(task, half)
    if task.graph.are_ranks_compared:
        for planned, code in checked:
            if planned:
                _check_order(planned, getattr(code, "source_code", None), task)
    code = VariantCode(
        compiled=tuple(code for _, code in checked),
        row=row,
        names=names,
        copied_from=copied_from,
        results=results,
    )
    return CompiledVariant(run=code.run(is_ahead=task.graph.is_ahead), regathered=regathered, code=code)


def _compile(task: HalfTask, half: HalfGraph) -> tuple[PieceRow | None, list[tuple[list[str], Any]]]:
    """What Inductor compiles for a placed half, each graph with its planned order; the row of pieces if it has some."""
    if pieces := _pieces(task, half):
        row, compiled = compile_in_pieces(half.gm, pieces, task.compiler_arguments)
        return row, [(planned_order(graph), code) for graph, code in compiled]
    planned = planned_order(half.gm)
    return None, [(planned, compile_fx_inner(half.gm, half.example_inputs, **task.compiler_arguments))]


def _pieces(task: HalfTask, half: HalfGraph) -> list[Piece] | None:
    """The pieces to compile a half in; None to compile it as a whole."""
    options = task.graph.options
    if not options.share_code or options.memory_budget is not None or not may_be_in_pieces():
        return None
    pieces = cut_in_pieces(half.gm)
    if pieces is None or options.share_code == "always":
        return pieces
    num_ops = sum(len(piece.nodes) for piece in pieces)
    return pieces if num_compiled_ops(pieces) <= _MOST_COMPILED * num_ops else None


def _check_order(planned: list[str], source: str | None, task: HalfTask) -> None:
    if source is None:
        message = f"graphshard: Inductor shows no source of the {task.kind}: whether its collectives moved is not known"
    elif difference := order_difference(planned, emitted_order(source)):
        message = f"graphshard: Inductor left the planned order of the {task.kind}: {difference}"
    else:
        return
    if task.graph.options.verify == "full":
        raise ScheduleOrderError(message)
    warnings.warn(message, stacklevel=2)


def _size_check(task: HalfTask, half: HalfGraph) -> Callable[[Sequence[Any]], None] | None:
    """A check in front of each run of a half with symbolic sizes; None where no budget can be exceeded."""
    budget = task.graph.options.memory_budget
    if budget is None or not has_symbolic_sizes(half.gm):
        return None
    planned = copy_graph(half.gm)  # what follows edits the graph
    return RunningSizes(
        gm=planned,
        context=half.context,
        resident=task.joint.resident,
        budget_bytes=budget,
        what=task.what,
        refusing=lambda: task.refusing(planned, "run"),
    ).check


def _kept_shards(gm: fx.GraphModule, context: PassContext) -> frozenset[str]:
    """The parameters whose shards are outputs of a forward."""
    kept = [value for value in output_values(gm.graph) if isinstance(value, fx.Node)]
    bindings = [context.binding(value.name) for value in kept if value.op == "placeholder"]
    return frozenset(binding.name for binding in bindings if binding is not None)


def refuse_gloo_on_gpus(gm: fx.GraphModule) -> None:
    """Refuses gathers of GPU tensors by gloo: the op that compiled code calls reads them on the CPU (torch 2.11).

    Raises:
        UnsupportedShardingError: a graph has such a gather; without this the process ends in a segmentation fault.
    """
    for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER):
        kind = node.meta["val"].device.type
        if kind != "cpu" and uses_gloo(group_by_name(group_name(node)), kind):
            raise UnsupportedShardingError(
                f"gloo cannot gather {kind} tensors in compiled code, and process group {group_name(node)!r} has gloo "
                f'for them: init_process_group("cpu:gloo,cuda:nccl"), or run the model uncompiled'
            )


def _gloo_groups(task: HalfTask, gm: fx.GraphModule) -> tuple[str, ...]:
    """Names of the process groups of the reduce-scatters that gloo runs."""
    reductions = gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    names = {group_name(node) for node in reductions if node.meta["val"].device.type == "cpu"}
    return tuple(sorted(filter(task.graph.is_on_gloo, names)))


def _is_on_gloo(task: HalfTask, gm: fx.GraphModule) -> bool:
    """Whether gloo runs all collectives of a graph."""
    groups = {group_name(node) for node in gm.graph.nodes if is_collective(node)}
    return all(map(task.graph.is_on_gloo, groups))
