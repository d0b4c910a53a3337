"""Captures a training step of a plain model on fake tensors: no data, no device, no process group.

Dynamo and AOTAutograd capture the step as one joint graph with full parameters. The pass ``insert_shards`` turns it
into the graph of a sharded model. From there the passes of training run. Mesh axes are only sizes with names, so a
capture for 4,096 ranks takes as long as one for 8.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from .._compat import (
    FakeTensorMode,
    lazy_graph_modules,
    parameter_of_input,
    returns_tuple_of,
    tree_map,
)
from ..backend import (
    StepChoice,
    drop_rng_states,
    functorch_patch,
    partition_as_inductor,
)
from ..errors import CaptureError, OptionTypeError, ShardingError
from ..ir import (
    MeshLayout,
    PlacedParameter,
    PlainParameter,
    ShardedShape,
    aten,
    copy_graph,
    graph_text,
    output_values,
    row_offsets,
    value_text,
)
from ..passes import InsertShards, KeepGathered, MergeUnshards, MergeWaits, SpreadParameters, TagRecompute
from ..pipeline import (
    JointOutputs,
    PassContext,
    PassRecord,
    Pipeline,
    context_from_shard_ops,
    joint_outputs,
    pieces_of,
)
from .fake_step import LossAndOthers, StepModule, export_step, fake_copy, fake_inputs, trace_step
from .gc_pauses import no_garbage_collection
from .gpu_attention import use_gpu_attention
from .placed_step import PlacedStep, run_reshard_passes
from .rules import ShardingRules, as_regex, refuse_patterns_without_modules

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
        joint, outputs = exported.joint, exported.outputs
        plain = exported.plain_parameters(placed)
        positions = _positions_of(plain, outputs.primals)
        order = exported.order
        context = PassContext(plain=_with_places(plain, order))
        cut = _cut_parameters(plain, outputs.primals, placed)

        def run_joint_passes(gm: fx.GraphModule) -> _JointStep:
            text = "" if is_brief else graph_text(gm)
            records: list[PassRecord] = []

            def run(pipeline: Pipeline, ctx: PassContext) -> None:
                if is_brief:
                    pipeline.run_unchecked(gm, ctx)
                else:
                    records.extend(pipeline.run(gm, ctx, before=records[-1].text if records else text))

            first, tag = PLAIN_PIPELINE.split(-1)
            reshards = run_reshard_passes(gm, cut, context, run) if placed is not None else {}
            run(first, context)
            known = replace(_context_of(gm, placed), device_type=device_type)
            choice = choose(gm, known, tag) if choose is not None else None
            if choice is not None:
                run(Pipeline(KeepGathered(units=choice.kept), given=tag.given), context)
                tag = choice.extended(tag)
            run(tag, context)
            known = replace(
                _context_of(gm, placed),
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
        context=halves.joint.context,
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
class ExportedModel:
    """The joint graph of a step on whole parameters.

    Attributes:
        model, rules: what was exported.
        joint: the graph.
        traced: the graph of Dynamo that it was exported from.
        outputs: what the inputs and outputs of ``joint`` are.
        paths: name in the model of each traced parameter, by its id.
        order: names of the model's parameters.
    """

    model: nn.Module
    rules: ShardingRules
    joint: fx.GraphModule
    traced: fx.GraphModule
    outputs: JointOutputs
    paths: Mapping[int, str]
    order: tuple[str, ...]

    def plain_parameters(self, placed: PlacedStep | None) -> list[PlainParameter]:
        """The inputs that are parameters, of the shapes that a rank of the axis of placements gathers."""
        return _plain_parameters(
            self.outputs.primals, self.traced, self.model, self.rules, self.paths, placed
        )

    def on_one_rank(self, placed: PlacedStep) -> fx.GraphModule:
        """A copy of the joint graph with placements, as a rank of their axis computes it; parameters are gathered."""
        gm = copy_graph(self.joint)
        cut = _cut_parameters(self.plain_parameters(placed), self.outputs.primals, placed)

        def run(pipeline: Pipeline, context: PassContext) -> None:
            pipeline.run_unchecked(gm, context)

        run_reshard_passes(gm, cut, PassContext(), run)
        return gm


def export_model(
    stack: ExitStack,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    rules: ShardingRules,
    placed: PlacedStep | None,
    loss: Callable[[Any], Tensor] | None,
    checkpoint: Sequence[str],
    needs_loss: bool,
    device_type: str | None,
) -> ExportedModel:
    """The joint graph of a step, with the values between modules marked that ``placed`` holds.

    Args:
        stack: gets the contexts that the graph is to be edited in.
        placed: placements of values; those of parameters leave the graph as it is.
        model, args, kwargs, rules, loss, checkpoint, needs_loss, device_type: as of :func:`capture_step`, whose errors
            it raises.
    """
    if type(rules) is ShardingRules:
        _refuse_parameters_without_dims(model)
        refuse_patterns_without_modules(model, "units", rules.units)
    refuse_patterns_without_modules(model, "checkpoint", checkpoint)
    _refuse_other_inputs(model, args, kwargs or {})
    _refuse_parameters_of_loss(loss)
    mode = FakeTensorMode()
    fake = fake_copy(model, mode, rules.mp_policy.param_dtype)
    if placed is not None:
        placed.hold(fake)
    _checkpoint(fake, checkpoint)
    fake_args, fake_kwargs = fake_inputs((tuple(args), dict(kwargs or {})), mode, rules.mp_policy)
    paths = {id(param): path for path, param in reversed(list(fake.named_parameters()))}
    stack.enter_context(torch.enable_grad())  # a step has a backward, even if the caller is under no_grad
    stack.enter_context(functorch_patch())
    stack.enter_context(lazy_graph_modules())
    stack.enter_context(no_garbage_collection())
    stack.enter_context(mode)
    traced = trace_step(StepModule(fake, loss, finds_loss=needs_loss), fake_args, fake_kwargs)
    has_others = returns_tuple_of(traced, LossAndOthers)
    if device_type == "cuda":
        use_gpu_attention(traced)
    joint = export_step(stack, traced, fake_args, fake_kwargs)
    outputs = joint_outputs(joint.graph)
    if outputs is None:
        raise CaptureError(
            "nothing is trained: what the model returns does not depend on a parameter in a way that has a "
            "gradient; return a loss that does"
        )
    if needs_loss:
        values = output_values(joint.graph)
        own_results = [values[index] for index in outputs.own_results]
        _refuse_other_results(own_results[:1] if has_others else own_results, loss)
    order = tuple(path for path, _ in fake.named_parameters())
    return ExportedModel(
        model=model, rules=rules, joint=joint, traced=traced, outputs=outputs, paths=paths, order=order
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


def _context_of(gm: fx.GraphModule, placed: PlacedStep | None) -> PassContext:
    """What shard ops say; the axis of placements, whose reshards are lowered, lies inside their axes."""
    context = context_from_shard_ops(gm)
    if placed is None:
        return context
    return replace(context, mesh=MeshLayout.of_axes([*context.mesh.axes, placed.axis]))


def _cut_parameters(
    plain: Sequence[PlainParameter], primals: Sequence[fx.Node], placed: PlacedStep | None
) -> tuple[PlacedParameter, ...]:
    if placed is None:
        return ()
    shapes = {node.name: node.meta["val"].shape for node in primals if node.meta.get("val") is not None}
    return placed.parameters({each.call.name: (each.placeholder, shapes[each.placeholder]) for each in plain})


def _refuse_parameters_without_dims(model: nn.Module) -> None:
    names = [name for name, param in model.named_parameters() if param.ndim == 0]
    if names:
        raise ShardingError(
            f"parameter(s) {', '.join(names)} have no dimension to cut over ranks; make them 1-D (shape [1]), or "
            "buffers. fully_shard refuses them too, unless they are in ignored_params"
        )


def _plain_parameters(
    primals: Sequence[fx.Node],
    traced: fx.GraphModule,
    model: nn.Module,
    rules: ShardingRules,
    paths: Mapping[int, str],
    placed: PlacedStep | None,
) -> list[PlainParameter]:
    """The inputs that are parameters; ``paths`` maps the id of a traced parameter to its name in the model."""
    plain = []
    for node in primals:
        param = parameter_of_input(node, traced)
        if param is not None:
            path = paths[id(param)]
            dtype = model.get_parameter(path).dtype
            value = node.meta["val"]
            own = value.shape if placed is None else placed.shape_of(path, value.shape)
            shape = torch.Size([*own, 2] if dtype.is_complex else own)
            call = rules.call_of(path, shape, dtype.is_floating_point)
            plain.append(PlainParameter(placeholder=node.name, call=call, dtype=dtype))
    return plain


def _positions_of(plain: Sequence[PlainParameter], primals: Sequence[fx.Node]) -> list[int]:
    names = {given.placeholder for given in plain}
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


def _refuse_other_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if isinstance(model, fx.GraphModule):
        return  # its forward takes any arguments, and checks them later
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"the inputs do not fit {type(model).__name__}.forward: {error}") from error


def _refuse_other_results(results: Sequence[Any], loss: Callable[[Any], Tensor] | None) -> None:
    """Refuses every result but one floating-point scalar, since only that has a gradient."""
    values = [value.meta.get("val") if isinstance(value, fx.Node) else value for value in results]
    is_loss = len(values) == 1 and isinstance(values[0], Tensor) and values[0].numel() == 1
    if not is_loss or not values[0].dtype.is_floating_point:
        found = ", ".join(map(value_text, values)) or "nothing"
        if loss is not None:
            raise CaptureError(
                f"what loss={loss!r} returns is no loss: {found}; it must return one scalar of floats"
            )
        raise CaptureError(
            f"what the model returns is no loss: {found}; give a "
            "function that turns it into one scalar (loss=..., or --loss PKG.MODULE:FUNCTION), or return that from "
            "the model"
        )


def _checkpoint(model: nn.Module, patterns: Sequence[str]) -> None:
    """Checkpoints the modules whose path matches a pattern, so that they save no activations."""
    for path, module in model.named_modules():
        if any(re.fullmatch(as_regex(pattern), path) for pattern in patterns):
            module.forward = partial(torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=False)


def _refuse_parameters_of_loss(loss: Callable[[Any], Tensor] | None) -> None:
    if loss is not None and not callable(loss):
        raise OptionTypeError(f"loss={loss!r} must be a function that turns the model's output into a scalar")
    names = [name for name, _ in loss.named_parameters()] if isinstance(loss, nn.Module) else []
    if names:
        raise CaptureError(
            f"the loss has parameters of its own ({', '.join(names[:5])}), which nothing would shard or count: make "
            "it a part of the model"
        )
