"""The joint graph of a training step on whole parameters, captured on fake tensors.

Dynamo traces the model and the loss, AOTAutograd adds the backward. The passes of sharding come behind it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
)
from ..backend import (
    functorch_patch,
)
from ..errors import CaptureError, OptionTypeError, ShardingError, UnsupportedShardingError
from ..ir import (
    ExtendedInputs,
    PlacedParameter,
    PlainParameter,
    copy_graph,
    output_values,
    value_text,
)
from ..pipeline import (
    JointOutputs,
    PassContext,
    Pipeline,
    joint_outputs,
)
from .extended_parameters import (
    ExtendedShard,
    extended_shards,
    group_for_extensions,
    inputs_of_held,
    merge_reads,
    name_axis,
    read_extended,
)
from .fake_step import (
    LossAndOthers,
    StepModule,
    cast_at_units,
    export_step,
    fake_copy,
    fake_inputs,
    trace_step,
)
from .from_sharded import FoundRules
from .gc_pauses import no_garbage_collection
from .gpu_attention import use_gpu_attention
from .placed_step import PlacedStep, run_reshard_passes
from .rules import ShardingRules, as_regex, refuse_patterns_without_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """The joint graph of a step on whole parameters.

    Attributes:
        model, rules: what was exported.
        joint: the graph.
        traced: the graph of Dynamo that it was exported from.
        outputs: what the inputs and outputs of ``joint`` are.
        extended: the inputs of ``joint`` that stand for parameters with gather extensions.
        paths: name in the model of each traced parameter, by its id.
        order: names of the model's parameters.
    """

    model: nn.Module
    rules: ShardingRules
    joint: fx.GraphModule
    traced: fx.GraphModule
    outputs: JointOutputs
    extended: tuple[ExtendedInputs, ...]
    paths: Mapping[int, str]
    order: tuple[str, ...]

    def plain_parameters(self, placed: PlacedStep | None) -> list[PlainParameter]:
        """The inputs that are parameters, of the shapes that a rank of the axis of placements gathers."""
        held = PassContext(extended=self.extended).held
        unheld = [node for node in self.outputs.primals if node.name not in held]
        return _plain_parameters(unheld, self.traced, self.model, self.rules, self.paths, placed)

    def on_one_rank(self, placed: PlacedStep) -> fx.GraphModule:
        """A copy of the joint graph with placements, as a rank of their axis computes it; parameters are gathered."""
        gm = copy_graph(self.joint)
        cut = cut_parameters(self.plain_parameters(placed), self.outputs.primals, placed)

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
    shards = rules.extended if isinstance(rules, FoundRules) else extended_shards(model, rules)
    _refuse_placed_extensions(shards, rules)
    fake = fake_copy(model, mode, rules.mp_policy.param_dtype, shards)
    order = tuple(path for path, _ in fake.named_parameters())
    if placed is not None:
        placed.hold(fake)
    _checkpoint(fake, checkpoint)
    cast_at_units(fake, rules)
    fake_args, fake_kwargs = fake_inputs((tuple(args), dict(kwargs or {})), mode)
    paths = {id(param): path for path, param in reversed(list(fake.named_parameters()))}
    held = read_extended(fake, shards, rules, mode)
    stack.enter_context(torch.enable_grad())  # a step has a backward, even if the caller is under no_grad
    stack.enter_context(functorch_patch())
    stack.enter_context(lazy_graph_modules())
    stack.enter_context(no_garbage_collection())
    stack.enter_context(mode)
    own_name = stack.enter_context(group_for_extensions(shards, rules))
    traced = trace_step(StepModule(fake, loss, rules, finds_loss=needs_loss), fake_args, fake_kwargs)
    merge_reads(traced)
    has_others = returns_tuple_of(traced, LossAndOthers)
    if device_type == "cuda":
        use_gpu_attention(traced)
    joint = export_step(stack, traced, fake_args, fake_kwargs)
    name_axis(joint.graph, own_name)
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
    extended = inputs_of_held(outputs.primals, traced, held)
    return ExportedModel(
        model=model, rules=rules, joint=joint, traced=traced, outputs=outputs, extended=extended, paths=paths,
        order=order,
    )  # fmt: skip


def cut_parameters(
    plain: Sequence[PlainParameter], primals: Sequence[fx.Node], placed: PlacedStep | None
) -> tuple[PlacedParameter, ...]:
    """The parameters as ``placed`` cuts them over its axis; none without placements."""
    if placed is None:
        return ()
    values = {node.name: node.meta.get("val") for node in primals}
    shapes = {name: value.shape for name, value in values.items() if isinstance(value, Tensor)}
    return placed.parameters({each.call.name: (each.placeholder, shapes[each.placeholder]) for each in plain})


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


def _refuse_placed_extensions(shards: Mapping[str, ExtendedShard], rules: ShardingRules) -> None:
    if shards and rules.placements is not None:
        raise UnsupportedShardingError(
            f"placements: parameter(s) {', '.join(list(shards)[:8])} have a gather extension and cannot be placed on a "
            "further axis; leave out placements, or give plain parameters"
        )


def _refuse_parameters_without_dims(model: nn.Module) -> None:
    names = [name for name, param in model.named_parameters() if param.ndim == 0]
    if names:
        raise ShardingError(
            f"parameter(s) {', '.join(names)} have no dimension to cut over ranks; make them 1-D (shape [1]), or "
            "buffers. fully_shard refuses them too, unless they are in ignored_params"
        )


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
