"""Captures a training step of a plain model on fake tensors: no data, no device, no process group.

The second way in: Dynamo and AOTAutograd capture the whole step as one joint graph with full
parameters; the pass ``insert_shards`` makes of it the graph of a sharded model, and from there the
same passes run as in training. Axes of the mesh are sizes with names, so 4,096 ranks cost what 8 cost.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._compat import (
    FakeTensorMode,
    TorchDynamoException,
    capture_with_dynamo,
    export_joint,
    parameter_of_input,
    tree_map,
)
from .context import PassContext, context_from_shard_ops, pieces_of
from .errors import CaptureError, ShardingError
from .inductor import functorch_patch, inductor_decompositions, partition_as_inductor
from .params import PlainParameter, UnshardCall
from .passes import InsertShards, MergeUnshards, SpreadParameters, TagRecompute
from .pipeline import PassRecord, Pipeline
from .rewrite import copy_graph, output_values

#: The joint passes of training, behind the one that a plain graph needs.
PLAIN_PIPELINE = Pipeline(InsertShards(), MergeUnshards(), SpreadParameters(), TagRecompute())


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
        names = tuple(self.mesh)
        if names not in (("shard",), ("replicate", "shard")):
            raise ShardingError(
                f"mesh axes {', '.join(map(str, names)) or '(none)'}: write shard=N, or replicate=M and then shard=N"
            )
        sizes = self.mesh.items()
        wrong = [f"{name}={size!r}" for name, size in sizes if type(size) is not int or size < 1]
        if wrong:
            raise ShardingError(f"mesh: {', '.join(wrong)} must be a whole number of ranks, at least 1")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A training step of a plain model, sharded, as graphs at level 1.

    Attributes:
        joint: forward and backward in one, after the joint passes.
        forward, backward: the halves.
        context: what passes on them know (``context.for_forward()``, ``for_backward()``).
        records: what each joint pass did, with the graph text after it.
    """

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    context: PassContext
    records: tuple[PassRecord, ...]


def capture_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rules: ShardingRules,
    loss: Callable[[Any], Tensor] | None = None,
) -> CapturedStep:
    """Forward and backward of ``model`` as they would run on each rank of the mesh of ``rules``.

    Args:
        model: on the meta device or any other; it is neither run nor changed.
        args, kwargs: example inputs of one rank; of tensors only shape and dtype count.
        rules: mesh, units and dtypes.
        loss: turns the model's output into a scalar; None if the model returns one.

    Raises:
        CaptureError: the model has a graph break, or a branch that depends on data (with the line).
        ShardingError: patterns of ``rules.units`` match no module (all are listed).
    """
    _refuse_patterns_without_modules(model, rules)
    mode = FakeTensorMode()
    fake = _fake_copy(model, mode, rules.mp_policy.param_dtype)
    fake_args, fake_kwargs = _fake_inputs((tuple(args), dict(kwargs or {})), mode, rules.mp_policy)
    paths = {id(param): path for path, param in reversed(list(fake.named_parameters()))}
    with ExitStack() as stack:
        stack.enter_context(functorch_patch())
        stack.enter_context(mode)
        traced = _trace(_Step(fake, loss), fake_args, fake_kwargs)
        joint = export_joint(stack, traced, fake_args, fake_kwargs, inductor_decompositions())
        placeholders = joint.graph.find_nodes(op="placeholder")
        primals = [node for node in placeholders if not node.name.startswith("tangents_")]
        plain = []
        for node in primals:
            param = parameter_of_input(node, traced)
            if param is not None:
                path = paths[id(param)]
                plain.append(_plain_parameter(node, path, model.get_parameter(path).dtype, rules))
        context = PassContext(plain=tuple(plain))
        found: list[tuple[fx.GraphModule, PassContext, list[PassRecord]]] = []

        def run_joint_passes(gm: fx.GraphModule) -> None:
            records = PLAIN_PIPELINE.run(gm, context)
            found.append((copy_graph(gm), replace(context_from_shard_ops(gm), pieces=pieces_of(gm)), records))

        num_results = len(output_values(joint.graph)) - len(primals)
        forward, backward = partition_as_inductor(joint, num_results, range(len(plain)), run_joint_passes)
    ((sharded, sharded_context, records),) = found
    return CapturedStep(
        joint=sharded, forward=forward, backward=backward, context=sharded_context, records=tuple(records)
    )


class _Step(nn.Module):
    """The model with its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        return output if self._loss is None else self._loss(output)


def _as_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^.]+")


def _refuse_patterns_without_modules(model: nn.Module, rules: ShardingRules) -> None:
    paths = [path for path, _ in model.named_modules() if path]
    idle = [
        repr(pattern)
        for pattern in rules.units
        if not any(re.fullmatch(_as_regex(pattern), path) for path in paths)
    ]
    if idle:
        some = ", ".join(paths[:8])
        raise ShardingError(f"units: no module matches {', '.join(idle)}; modules are {some}, ...")


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
        traced = capture_with_dynamo(step, args, kwargs)
    except TorchDynamoException as error:
        raise CaptureError(
            f"the model cannot be captured as one graph: {_first_lines(error)}\n"
            "Replace what breaks the graph, or mark it as an operator (torch.library.custom_op)"
        ) from error
    return traced


def _first_lines(error: Exception) -> str:
    return str(error).strip().split("\n\n\n", 1)[0]


def _plain_parameter(node: fx.Node, path: str, dtype: torch.dtype, rules: ShardingRules) -> PlainParameter:
    unit = rules.unit_of(path)
    reshard = rules.reshard_after_forward
    is_freed = unit != "root" if reshard is None else reshard
    num_shards, num_replicas = rules.mesh["shard"], rules.mesh.get("replicate", 1)
    replicate = "replicate" if num_replicas > 1 else ""
    policy = rules.mp_policy
    call = UnshardCall(
        shard=None,
        handle=None,
        name=path,
        unit=unit,
        shape=list(node.meta["val"].shape),
        dim=0,
        dtype=policy.param_dtype if dtype.is_floating_point else None,
        reshard=num_shards if is_freed else 1,
        reshard_group="",
        axis="shard",
        group_size=num_shards,
        group_name="shard",
        replicate_axis=replicate,
        replicate_size=num_replicas,
        replicate_group=replicate,
        reduce_dtype=policy.reduce_dtype,
        divide_factor=None,
        force_sum=False,
        reshard_fixed=reshard is not None,
    )
    return PlainParameter(placeholder=node.name, call=call, dtype=dtype)
