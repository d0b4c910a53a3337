"""Captures a training step of a plain model on fake tensors: no data, no device, no process group.

The second way in: Dynamo and AOTAutograd capture the whole step as one joint graph with full
parameters; the pass ``insert_shards`` makes of it the graph of a sharded model, and from there the
same passes run as in training. Axes of the mesh are sizes with names, so 4,096 ranks cost what 8 cost.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._compat import (
    DATA_DEPENDENT,
    FakeTensorMode,
    TorchDynamoException,
    capture_with_dynamo,
    lazy_graph_modules,
    parameter_of_input,
    returns_tuple_of,
    tree_leaves,
    tree_map,
)
from ..backend import (
    StepChoice,
    drop_rng_states,
    functorch_patch,
    inductor_decompositions,
    partition_as_inductor,
)
from ..errors import CaptureError, OptionTypeError, ShardingError
from ..ir import (
    PlainParameter,
    ShardedShape,
    UnshardCall,
    aten,
    copy_graph,
    graph_text,
    output_values,
    row_offsets,
    value_text,
)
from ..passes import InsertShards, KeepGathered, MergeUnshards, MergeWaits, SpreadParameters, TagRecompute
from ..pipeline import PassContext, PassRecord, Pipeline, context_from_shard_ops, pieces_of
from .export_blocks import export_joint_of_blocks
from .gc_pauses import no_garbage_collection
from .gpu_attention import use_gpu_attention

#: A frame of a traceback, and the folders whose frames are not the user's.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+?)(?:, code: |\n)\s*([^\n]*)')
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

#: What fake tensors say of a real one.
_REAL_TENSOR = re.compile(r"convert all Tensors to FakeTensors first.*(size=\([^)]*\))", re.DOTALL)

#: The joint passes of training, behind the one that a plain graph needs.
PLAIN_PIPELINE = Pipeline(InsertShards(), MergeWaits(), MergeUnshards(), SpreadParameters(), TagRecompute())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRules:
    """How a plain model is to be sharded: what the calls of ``fully_shard`` would say.

    Attributes:
        mesh: sizes of the axes by name, outermost first: {"shard": 64} or {"replicate": 4, "shard": 16}.
        units: patterns of module paths, "layers.*" for instance, where "*" stands for one part of a
            path; each module that matches is a unit, and what is left is the root's.
        reshard_after_forward: as in ``fully_shard``: None frees all but the root.
        mp_policy: dtypes of compute and gathers, and of reductions.

    Raises:
        ShardingError: axes of other names, or sizes that are no numbers of ranks.
    """

    mesh: Mapping[str, int]
    units: Sequence[str] = ()
    reshard_after_forward: bool | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mapping):
            raise OptionTypeError(
                f"mesh={self.mesh!r} must be sizes of axes by name, {{'shard': 64}} for instance"
            )
        if isinstance(self.units, str) or not all(isinstance(pattern, str) for pattern in self.units):
            raise OptionTypeError(
                f"units={self.units!r} must be a list of patterns of module paths, ['layers.*']"
            )
        if not isinstance(self.mp_policy, MixedPrecisionPolicy):
            raise OptionTypeError(f"mp_policy={self.mp_policy!r} must be a MixedPrecisionPolicy")
        names = tuple(self.mesh)
        if names not in (("shard",), ("replicate", "shard")):
            raise ShardingError(
                f"mesh axes {', '.join(map(str, names)) or '(none)'}: write shard=N, or replicate=M and then shard=N"
            )
        sizes = self.mesh.items()
        wrong = [f"{name}={size!r}" for name, size in sizes if type(size) is not int or size < 1]
        if wrong:
            raise ShardingError(f"mesh: {', '.join(wrong)} must be a whole number of ranks, at least 1")
        if self.reshard_after_forward is not None and type(self.reshard_after_forward) is not bool:
            raise ShardingError(
                f"reshard_after_forward={self.reshard_after_forward!r} must be True, False or None here: "
                "parameters spread over a number of ranks are not captured"
            )

    def unit_of(self, path: str) -> str:
        """The unit of a parameter: the innermost matching module around it, else "root"."""
        parts = path.split(".")[:-1]
        for end in range(len(parts), 0, -1):
            if self.is_unit(module := ".".join(parts[:end])):
                return module
        return "root"

    def is_unit(self, path: str) -> bool:
        """Whether the module of this path is a unit."""
        return any(re.fullmatch(_as_regex(pattern), path) for pattern in self.units)

    def call_of(self, path: str, shape: torch.Size, is_float: bool) -> UnshardCall:
        """How the parameter of this path is gathered, without its tensors."""
        unit = self.unit_of(path)
        reshard = self.reshard_after_forward
        is_freed = unit != "root" if reshard is None else reshard
        num_shards, num_replicas = self.mesh["shard"], self.mesh.get("replicate", 1)
        replicate = "replicate" if num_replicas > 1 else ""
        return UnshardCall(
            shard=None,
            handle=None,
            name=path,
            unit=unit,
            shape=list(shape),
            dim=0,
            dtype=self.mp_policy.param_dtype if is_float else None,
            reshard=num_shards if is_freed else 1,
            reshard_group="",
            axis="shard",
            group_size=num_shards,
            group_name="shard",
            replicate_axis=replicate,
            replicate_size=num_replicas,
            replicate_group=replicate,
            reduce_dtype=self.mp_policy.reduce_dtype,
            divide_factor=None,
            force_sum=False,
            reshard_fixed=reshard is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A training step of a plain model, sharded, as graphs at level 1.

    Attributes:
        joint: forward and backward in one, after the joint passes.
        forward, backward: the halves.
        context: what passes on them know (``context.for_forward()``, ``for_backward()``).
        text: the joint graph as it was captured, before any of them; "" after a brief capture.
        records: what each joint pass did, with the graph text after it; none after a brief capture.
        num_results: how many outputs of the forward are results; the others are kept for the backward.
        order: names of the model's parameters, as ``named_parameters`` has them.
        choice: what was chosen by cost for both halves, if anything was.
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
    choose: Callable[[fx.GraphModule, PassContext, Pipeline], StepChoice | None] | None = None,
) -> CapturedStep:
    """Forward and backward of ``model`` as they would run on each rank of the mesh of ``rules``.

    Args:
        model: on the meta device or any other; it is neither run nor changed.
        args, kwargs: example inputs of one rank; of tensors only shape and dtype count.
        rules: mesh, units and dtypes.
        loss: turns the model's output into a scalar; None if the model returns one. If it picks one of several
            outputs, the others are results of the step too, as they are of a compiled model.
        checkpoint: patterns, as in ``rules.units``, of modules whose activations are computed again.
        needs_loss: refuse a step whose result is not one scalar.
        device_type: where the step is to run; None for the device of the capture, the CPU.
        is_brief: leave out texts, records and checks of the joint passes.
        choose: says which units keep their gathered parameters for the backward, from the joint graph at level 1,
            what is known of it, and the passes that follow; None for what ``rules`` say.

    Raises:
        CaptureError: the inputs do not fit; the model has a graph break, or a shape or a branch that
            depends on data (with the line), or reads a tensor that is no parameter, buffer or input;
            nothing is trained; the result is no loss, or the loss has parameters.
        ShardingError: patterns of ``rules.units`` or ``checkpoint`` match no module (all are listed).
    """
    if type(rules) is ShardingRules:
        _refuse_patterns_without_modules(model, "units", rules.units)
    _refuse_patterns_without_modules(model, "checkpoint", checkpoint)
    _refuse_other_inputs(model, args, kwargs or {})
    _refuse_parameters_of_loss(loss)
    mode = FakeTensorMode()
    fake = _fake_copy(model, mode, rules.mp_policy.param_dtype)
    _checkpoint(fake, checkpoint)
    fake_args, fake_kwargs = _fake_inputs((tuple(args), dict(kwargs or {})), mode, rules.mp_policy)
    paths = {id(param): path for path, param in reversed(list(fake.named_parameters()))}
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())  # a step is trained, whoever asks
        stack.enter_context(functorch_patch())
        stack.enter_context(lazy_graph_modules())
        stack.enter_context(no_garbage_collection())
        stack.enter_context(mode)
        traced = _trace(_Step(fake, loss), fake_args, fake_kwargs)
        has_others = returns_tuple_of(traced, _LossAndOthers)
        if device_type == "cuda":
            use_gpu_attention(traced)
        joint = _export(stack, traced, fake_args, fake_kwargs)
        placeholders = joint.graph.find_nodes(op="placeholder")
        primals = [node for node in placeholders if not node.name.startswith("tangents_")]
        if len(primals) == len(placeholders):
            raise CaptureError(
                "nothing is trained: what the model returns does not depend on a parameter in a way that has a gradient"
            )
        num_results = len(output_values(joint.graph)) - len(primals)
        if needs_loss:
            _refuse_other_results(output_values(joint.graph)[: 1 if has_others else num_results], loss)
        plain = []
        for node in primals:
            param = parameter_of_input(node, traced)
            if param is not None:
                path = paths[id(param)]
                dtype = model.get_parameter(path).dtype
                call = rules.call_of(path, node.meta["val"].shape, dtype.is_floating_point)
                plain.append(PlainParameter(placeholder=node.name, call=call, dtype=dtype))
        order = tuple(path for path, _ in fake.named_parameters())
        context = PassContext(plain=_with_places(plain, order))

        def run_joint_passes(gm: fx.GraphModule) -> _JointStep:
            text = "" if is_brief else graph_text(gm)
            records: list[PassRecord] = []

            def run(pipeline: Pipeline, ctx: PassContext) -> None:
                if is_brief:
                    pipeline.run_unchecked(gm, ctx)
                else:
                    records.extend(pipeline.run(gm, ctx, before=records[-1].text if records else text))

            first, tag = PLAIN_PIPELINE.split(-1)
            run(first, context)
            known = replace(context_from_shard_ops(gm), device_type=device_type)
            choice = choose(gm, known, tag) if choose is not None else None
            if choice is not None:
                run(Pipeline(KeepGathered(units=choice.kept), given=tag.given), context)
                tag = choice.extended(tag)
            run(tag, context)
            known = replace(
                context_from_shard_ops(gm),
                pieces=pieces_of(gm),
                device_type=device_type,
                default_peak_bytes=choice.peak_bytes if choice is not None else None,
            )
            return _JointStep(
                gm=copy_graph(gm), context=known, text=text, records=tuple(records), choice=choice
            )

        halves = partition_as_inductor(joint, num_results, range(len(plain)), run_joint_passes)
        drop_rng_states(halves.forward, halves.backward)
    return CapturedStep(
        joint=halves.joint.gm,
        forward=halves.forward,
        backward=halves.backward,
        context=halves.joint.context,
        text=halves.joint.text,
        records=halves.joint.records,
        num_results=num_results,
        order=order,
        choice=halves.joint.choice,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _JointStep:
    """The joint graph of a step after its passes; fields as of :class:`CapturedStep`."""

    gm: fx.GraphModule
    context: PassContext
    text: str
    records: tuple[PassRecord, ...]
    choice: StepChoice | None


def _with_places(plain: Sequence[PlainParameter], order: Sequence[str]) -> tuple[PlainParameter, ...]:
    """The parameters with the places that ``fully_shard`` would give their shards."""
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
    """An exported program as a module that can be captured again, on any device.

    The devices that the export wrote down become the CPU, where captures happen, and its checks of
    the inputs' metadata, which compare devices, are left out.
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


class _LossAndOthers(NamedTuple):
    """Results of a model that returns its loss among others that have gradients."""

    loss: Tensor
    others: list[Tensor]


class _Step(nn.Module):
    """The model with its loss.

    A compiled model that returns its loss returns the rest as well, and autograd hands its backward zeros for the
    gradients of what the loss does not read. So they are results here too.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self._loss is None:
            return output
        loss = self._loss(output)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if all(result is not loss for result in results):
            return loss
        found = [loss]
        for result in results:
            if result.requires_grad and all(result is not known for known in found):
                found.append(result)
        return loss if len(found) == 1 else _LossAndOthers(loss, found[1:])


def _as_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^.]+")


def _refuse_patterns_without_modules(model: nn.Module, option: str, patterns: Sequence[str]) -> None:
    paths = [path for path, _ in model.named_modules() if path]
    idle = [
        repr(pattern)
        for pattern in patterns
        if not any(re.fullmatch(_as_regex(pattern), path) for path in paths)
    ]
    if idle:
        some = ", ".join(paths[:8])
        raise ShardingError(f"{option}: no module matches {', '.join(idle)}; modules are {some}, ...")


def _refuse_other_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if isinstance(model, fx.GraphModule):
        return  # its forward takes anything, and checks later
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"the inputs do not fit {type(model).__name__}.forward: {error}") from error


def _refuse_other_results(results: Sequence[Any], loss: Callable[[Any], Tensor] | None) -> None:
    """Every result but one scalar of floats: there is no gradient of anything else."""
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
            "function that turns it into one scalar (loss=...), or return that from the model"
        )


def _checkpoint(model: nn.Module, patterns: Sequence[str]) -> None:
    """Modules whose path matches keep no activations."""
    for path, module in model.named_modules():
        if any(re.fullmatch(_as_regex(pattern), path) for pattern in patterns):
            module.forward = partial(torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=False)


def _export(
    stack: ExitStack, traced: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.GraphModule:
    if not any(param.requires_grad for param in traced.parameters()):
        raise CaptureError("nothing is trained: no parameter that the model reads requires a gradient")
    try:
        joint = export_joint_of_blocks(stack, traced, args, kwargs, inductor_decompositions())
    except (RuntimeError, *DATA_DEPENDENT) as error:  # AOTAutograd has no type of its own
        raise CaptureError(_complaint(error)) from error
    for node in joint.graph.find_nodes(op="placeholder"):
        node.meta.setdefault("val", None)  # a number among the inputs, which the graph holds as a constant
    return joint


def _fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> nn.Module:
    """A copy with fake parameters and buffers on the CPU; floating parameters in ``dtype``."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        fake = _fake(param, mode, dtype if param.dtype.is_floating_point else None)
        memo[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, mode, None)
    return copy.deepcopy(model, memo)


def _fake_inputs(values: Any, mode: FakeTensorMode, policy: MixedPrecisionPolicy) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_cast = policy.cast_forward_inputs and value.dtype.is_floating_point
        return _fake(value, mode, policy.param_dtype if is_cast else None).requires_grad_(value.requires_grad)

    return tree_map(convert, values)


def _fake(value: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device="cpu")


def _trace(step: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    try:
        return capture_with_dynamo(step, args, kwargs)
    except (TorchDynamoException, *DATA_DEPENDENT) as error:
        raise CaptureError(_complaint(error)) from error
    except AssertionError as error:  # fake tensors refuse real ones with no type of their own
        if (found := _REAL_TENSOR.search(str(error))) is None:
            raise
        raise CaptureError(
            "the model or its loss reads a tensor that is no parameter, no buffer and no input: "
            f"{found[1]}; register it as a buffer, or give it as an input"
        ) from error


def _refuse_parameters_of_loss(loss: Callable[[Any], Tensor] | None) -> None:
    if loss is not None and not callable(loss):
        raise OptionTypeError(f"loss={loss!r} must be a function that turns the model's output into a scalar")
    names = [name for name, _ in loss.named_parameters()] if isinstance(loss, nn.Module) else []
    if names:
        raise CaptureError(
            f"the loss has parameters of its own ({', '.join(names[:5])}), which nothing would shard or count: make "
            "it a part of the model"
        )


def _complaint(error: Exception) -> str:
    """One line: what broke the graph, and the line of the user's that did."""
    text = str(error).strip()
    what = text.splitlines()[0].strip()[:300] if text else type(error).__name__
    if isinstance(error, DATA_DEPENDENT):
        what = f"a shape or a number depends on data ({what})"
    places = [
        (file, number, function, code.strip())
        for file, number, function, code in _FRAME.findall(text)
        if not file.startswith(_NOT_USERS)
    ]
    where = ""
    if places:
        file, number, function, code = places[-1]
        where = f" at {file}:{number}, in {function}: `{code}`"
    return (
        f"the model cannot be captured as one graph: {what}{where}; replace what breaks the graph, or mark it "
        "as an operator (torch.library.custom_op)"
    )
