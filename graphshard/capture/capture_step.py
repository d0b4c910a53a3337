"""Captures a training step of a plain model on fake tensors: no data, no device, no process group.

Dynamo and AOTAutograd capture the step as one joint graph with full parameters. The pass ``insert_shards`` turns it
into the graph of a sharded model. From there the passes of training run. Mesh axes are only sizes with names, so a
capture for 4,096 ranks takes as long as one for 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from .._compat import (
    tree_map,
)
from ..backend import (
    StepChoice,
    drop_rng_states,
    partition_as_inductor,
)
from ..ir import (
    ExtendedInputs,
    MeshLayout,
    PlainParameter,
    ShardedShape,
    aten,
    copy_graph,
    graph_text,
    row_offsets,
)
from ..passes import InsertShards, KeepGathered, MergeUnshards, MergeWaits, SpreadParameters, TagRecompute
from ..pipeline import (
    PassContext,
    PassRecord,
    Pipeline,
    context_from_shard_ops,
    pieces_of,
)
from .export_model import cut_parameters, export_model
from .extended_parameters import with_saved_parts
from .placed_step import PlacedStep, run_reshard_passes
from .rules import ShardingRules

#: ``insert_shards``, which a plain graph needs, and then the joint passes of training.
PLAIN_PIPELINE = Pipeline(InsertShards(), MergeWaits(), MergeUnshards(), SpreadParameters(), TagRecompute())

#: Makes the choices by cost for a step, from its joint graph at level 1, its context, and the joint passes that follow.
Choose = Callable[[fx.GraphModule, PassContext, Pipeline], StepChoice | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A training step of a plain model, sharded, as graphs at level 1.

    Attributes:
        joint: the joint graph after the joint passes.
        forward, backward: the halves.
        context: the context of passes on them (``context.for_forward()``, ``for_backward()``).
        text: the joint graph before the joint passes; "" after a brief capture.
        records: the report of each joint pass, with the graph text after it; none after a brief capture.
        num_results: number of outputs of the forward that are not saved for the backward: what the model returns, and
            new values of inputs that it writes to, if autograd follows the write.
        order: names of the model's parameters, in the order of ``named_parameters``.
        choice: the choices made by cost for both halves, if any.
        pieces: shapes of the pieces of parameters that are cut on a further axis, by name.
        placed: placements of parameters and values on that axis, if any.
        reshards: for each collective of that axis, by the names of its group and its node, what it does.
    """

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    context: PassContext
    text: str
    records: tuple[PassRecord, ...]
    num_results: int
    order: tuple[str, ...]
    choice: StepChoice | None = None
    pieces: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    placed: PlacedStep | None = None
    reshards: Mapping[tuple[str, str], str] = field(default_factory=dict)


def capture_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rules: ShardingRules,
    loss: Callable[[Any], Tensor] | None = None,
    checkpoint: Sequence[str] = (),
    needs_loss: bool = False,
    device_type: str | None = None,
    is_brief: bool = False,
    choose: Choose | None = None,
    pipeline: Pipeline = PLAIN_PIPELINE,
) -> CapturedStep:
    """Captures forward and backward of ``model`` as they would run on each rank of the mesh of ``rules``.

    Args:
        model: a model on the meta device or any other; it is neither run nor changed.
        args, kwargs: example inputs of one rank; only shape and dtype of tensors count.
        rules: mesh, units and dtypes.
        loss: turns the model's output into a scalar; None if the model returns one, or with ``needs_loss`` an output
            that holds one. If it picks one of several outputs, the others are results of the step too, as in a compiled
            model.
        checkpoint: patterns, as in ``rules.units``, of modules whose activations are recomputed.
        needs_loss: refuse a step whose result is not one scalar.
        device_type: device type that the step is to run on; None for that of the capture, the CPU.
        is_brief: leave out texts, records and checks of the joint passes.
        choose: decides which units keep their gathered parameters for the backward; None follows ``rules``.
        pipeline: the joint passes; the last one tags the graph for the partitioner.

    Raises:
        CaptureError: the inputs do not fit; the model has a graph break, or a shape or branch that depends on data
            (with the line); it reads a tensor that is no parameter, buffer or input; nothing is trained; the result is
            no loss; the loss has parameters.
        ShardingError: patterns of ``rules.units`` or ``checkpoint`` match no module, parameters have no dim to cut, or
            placements do not fit the model; lists all of them.
        OptionTypeError: ``loss`` is not a function.
    """
    placed = PlacedStep.of(model, rules)
    with ExitStack() as stack:
        exported = export_model(
            stack, model, args, kwargs, rules=rules, placed=placed, loss=loss, checkpoint=checkpoint,
            needs_loss=needs_loss, device_type=device_type,
        )  # fmt: skip
        joint, outputs, extended = exported.joint, exported.outputs, exported.extended
        plain = exported.plain_parameters(placed)
        order = exported.order
        context = PassContext(plain=_with_places(plain, order), extended=extended)
        positions = _positions_of(plain, context.held, outputs.primals)
        cut = cut_parameters(plain, outputs.primals, placed)

        def run_joint_passes(gm: fx.GraphModule) -> _JointStep:
            text = "" if is_brief else graph_text(gm)
            records: list[PassRecord] = []

            def run(pipeline: Pipeline, ctx: PassContext) -> None:
                if is_brief:
                    pipeline.run_unchecked(gm, ctx)
                else:
                    records.extend(pipeline.run(gm, ctx, before=records[-1].text if records else text))

            first, tag = pipeline.split(-1)
            reshards = run_reshard_passes(gm, cut, context, run) if placed is not None else {}
            run(first, context)
            known = replace(_context_of(gm, placed, extended), device_type=device_type)
            choice = choose(gm, known, tag) if choose is not None else None
            if choice is not None:
                run(Pipeline(KeepGathered(units=choice.kept), given=tag.given), context)
                tag = choice.extended(tag)
            run(tag, context)
            known = replace(
                _context_of(gm, placed, extended),
                pieces=pieces_of(gm),
                device_type=device_type,
                default_peak_bytes=choice.peak_bytes if choice is not None else None,
            )
            return _JointStep(
                gm=copy_graph(gm), context=known, text=text, records=tuple(records), choice=choice,
                reshards=reshards,
            )  # fmt: skip

        halves = partition_as_inductor(joint, outputs.num_results, positions, run_joint_passes)
        drop_rng_states(halves.forward, halves.backward)
    return CapturedStep(
        joint=halves.joint.gm,
        forward=halves.forward,
        backward=halves.backward,
        context=with_saved_parts(halves.joint.context, halves.forward),
        text=halves.joint.text,
        records=halves.joint.records,
        num_results=outputs.num_results,
        order=order,
        choice=halves.joint.choice,
        pieces={each.name: tuple(placed.shape_of(each.name, each.call.shape)) for each in cut}
        if placed
        else {},
        placed=placed,
        reshards=halves.joint.reshards,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _JointStep:
    """The joint graph of a step after its passes; fields as of :class:`CapturedStep`."""

    gm: fx.GraphModule
    context: PassContext
    text: str
    records: tuple[PassRecord, ...]
    choice: StepChoice | None
    reshards: Mapping[tuple[str, str], str]


def _context_of(
    gm: fx.GraphModule, placed: PlacedStep | None, extended: Sequence[ExtendedInputs]
) -> PassContext:
    """What shard ops say; the axis of placements, whose reshards are lowered, lies inside their axes."""
    context = context_from_shard_ops(gm, extended=extended)
    if placed is None:
        return context
    return replace(context, mesh=MeshLayout.of_axes([*context.mesh.axes, placed.axis]))


def _positions_of(
    plain: Sequence[PlainParameter], held: frozenset[str], primals: Sequence[fx.Node]
) -> list[int]:
    names = {given.placeholder for given in plain} | held
    return [index for index, node in enumerate(primals) if node.name in names]


def _with_places(plain: Sequence[PlainParameter], order: Sequence[str]) -> tuple[PlainParameter, ...]:
    """The parameters with the row offsets that ``fully_shard`` would give their shards."""
    calls = {given.call.name: (given.call, given.dtype) for given in plain}
    offsets = row_offsets(
        {
            name: ShardedShape(call.unit, call.shape, call.dim, call.group_size, dtype)
            for name, (call, dtype) in ((name, calls[name]) for name in order if name in calls)
        }
    )
    return tuple(
        replace(given, call=given.call._replace(row_offset=offsets[given.call.name])) for given in plain
    )


def plain_module(exported: torch.export.ExportedProgram) -> nn.Module:
    """An exported program as a module that can be captured again.

    Devices in the program become the CPU, where captures run. Its checks of the inputs' metadata, which compare
    devices, are removed.
    """
    module = exported.module(check_guards=False)
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            if node.target is aten._assert_tensor_metadata.default:
                part.graph.erase_node(node)
                continue
            node.args, node.kwargs = tree_map(_on_cpu, (node.args, node.kwargs))
        part.recompile()
    return module


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
