"""The joint graph of a step: its passes, the choice for both halves, and what the halves are compiled with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..coordination import agree_on_seed
from ..ir import RESHARD, ExtendedInputs, ReshardCall
from ..memory import step_bytes
from ..pipeline import KnownPlan, PassContext, context_from_shard_ops, pieces_of, read_shards_as_they_are
from ..propagation import draws_numbers
from .dynamo_graph import DynamoGraph
from .observer import Observer
from .pipelines import RESHARDING, joint_pipeline
from .step_planner import StepPlanner

#: Finds the inputs of a joint graph that stand for parameters with gather extensions.
ExtendedInputsOf = Callable[[fx.Graph], tuple[ExtendedInputs, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointResult:
    """What the joint passes hand to the compilation of the halves.

    Attributes:
        context: what passes on the halves know.
        resident: fake values of the inputs that live through the whole step.
        kept_between: units that keep their parameters between micro-batches.
        chosen: the choice for both halves as text, equal on all ranks; "" if nothing was chosen.
        plans: plans of the forward and the backward that this rank has tried with that choice; () if it has not.
    """

    context: PassContext = field(default_factory=PassContext)
    resident: tuple[Any, ...] = ()
    kept_between: frozenset[str] = frozenset()
    chosen: str = ""
    plans: tuple[KnownPlan, ...] = ()

    def start(self, half: str) -> KnownPlan | None:
        """The plan that this rank has tried for "forward" or "backward"; None if it has none."""
        return dict(zip(("forward", "backward"), self.plans, strict=False)).get(half)


def run_joint_passes(
    gm: fx.GraphModule, graph: DynamoGraph, observer: Observer, extended_inputs: ExtendedInputsOf
) -> JointResult:
    """Runs the joint passes on ``gm`` in place, with the choice for both halves where one is made.

    ``extended_inputs`` finds the inputs that stand for parameters with gather extensions.

    A choice is made with a cost model, for a graph with gradients, and either within a memory budget or for a whole
    step: what else a step holds beside a part of it is not known. Ranks that are not compared must not differ.

    Raises:
        AgreementError: the ranks would choose for different parameters, or ranks of one axis that share a batch would
            draw different numbers.
        InfeasibleBudgetError: no choice keeps the memory budget.
    """
    options = graph.options
    read_shards_as_they_are(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    context = context_from_shard_ops(
        gm, full_checks=options.verify == "full", extended=extended_inputs(gm.graph)
    )
    observer.graph("joint", "0-captured", gm, context)
    first, tag = joint_pipeline(options).split(-1)
    records = []
    if gm.graph.find_nodes(op="call_function", target=RESHARD):
        _compare_seeds(gm, graph)
        records += RESHARDING.run(gm, context)
    records += first.run(gm, context)
    is_whole = graph.are_ranks_compared and graph.is_whole_step(context)
    is_chosen = options.memory_budget is not None or is_whole
    kept = None
    if options.hardware is not None and context.first_gradient is not None and is_chosen:
        kept = StepPlanner.of(graph).choose(
            gm,
            context,
            tag,
            options.memory_budget,
            graph.waiting if graph.are_ranks_compared else frozenset(),
            keeps_between=is_whole,
        )
        found = context_from_shard_ops(gm, full_checks=context.full_checks, extended=context.extended)
        context = replace(found, mesh=context.mesh)
    choice = kept.choice if kept is not None else None
    if kept is not None:
        records += kept.records
        tag = kept.choice.extended(tag)
    observer.records("joint", records + tag.run(gm, context))
    if choice is not None:
        observer.text("joint", "choice", f"{choice}\n")
    return JointResult(
        context=replace(
            context,
            pieces=pieces_of(gm),
            default_peak_bytes=choice.peak_bytes if choice is not None else None,
            resident_bytes=step_bytes(gm),
        ),
        resident=tuple(node.meta.get("val") for node in inputs if node.name.startswith("primals_")),
        kept_between=frozenset(choice.kept_between) if choice is not None else frozenset(),
        chosen=f"{choice} {choice.input_bytes}" if choice is not None else "",
        plans=choice.plans if choice is not None else (),
    )


def _compare_seeds(gm: fx.GraphModule, graph: DynamoGraph) -> None:
    """Has the ranks of the axes of reshards agree on a seed if the graph draws numbers: each draws whole tensors."""
    draws = [node for node in gm.graph.nodes if node.op == "call_function" and draws_numbers(node)]
    if not draws or not graph.are_ranks_compared:
        return
    calls = [ReshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
    program = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    for group, axis in {call.group_name: call.axis for call in calls}.items():
        what = f"graph {graph.index}, on the axis {axis}"
        agree_on_seed(group, torch.initial_seed(), program, what=what)
