"""Traces a model and its loss on fake tensors with Dynamo, and exports the joint graph with AOTAutograd."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .._compat import (
    DATA_DEPENDENT,
    FakeTensorMode,
    TorchDynamoException,
    capture_with_dynamo,
    tree_leaves,
    tree_map,
)
from .._compat_frames import TorchRuntimeError, failures_unlogged, inline_regions
from ..backend import inductor_decompositions
from ..errors import CaptureError
from ..ir import value_text
from ..tensor_trees import cast_tensors
from .export_blocks import export_joint_of_blocks
from .extended_parameters import ExtendedShard, carrier_of
from .rules import ShardingRules

#: A frame of a traceback.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+?)(?:, code: |\n)\s*([^\n]*)')

#: What an op said when Dynamo ran it on fake tensors.
_FAILED_CALL = re.compile(r"got \w+\(['\"](.*?)['\"]\)\s*$", re.MULTILINE)

_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

#: The message of fake tensors that meet a real one.
_REAL_TENSOR = re.compile(r"convert all Tensors to FakeTensors first.*(size=\([^)]*\))", re.DOTALL)


#: The dtypes of what a forward takes and of what it returns; None for those that values have.
Casts = tuple[torch.dtype | None, torch.dtype | None]


class LossAndOthers(NamedTuple):
    """Results of a model that returns its loss and other results with gradients."""

    loss: Tensor
    others: list[Tensor]


def loss_in(output: Any) -> Tensor | None:
    """The loss that a model's output holds: its attribute or entry ``loss``, or its only scalar of floats."""
    if isinstance(output, Tensor):
        return output
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    scalars = [leaf for leaf in leaves if leaf.numel() == 1 and leaf.dtype.is_floating_point]
    return scalars[0] if len(scalars) == 1 else None


class StepModule(nn.Module):
    """The model with its loss.

    A compiled model that returns its loss returns its other results as well, and autograd gives its backward zeros for
    their gradients. So they are results here too.

    Args:
        model: the model.
        loss: turns its output into a scalar; None if the output holds one.
        rules: what the root casts.
        finds_loss: without ``loss``, take the loss that the output holds; see :func:`loss_in`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], Tensor] | None,
        rules: ShardingRules,
        *,
        finds_loss: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._casts = _casts_at("", rules)
        self._loss = loss_in if loss is None and finds_loss else loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = _cast_around(self._casts, self.model, *args, **kwargs)
        if self._loss is None:
            return output
        loss = self._loss(output)
        if loss is None:
            return output
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if all(result is not loss for result in results):
            return loss
        found = [loss]
        for result in results:
            if result.requires_grad and all(result is not known for known in found):
                found.append(result)
        return loss if len(found) == 1 else LossAndOthers(loss, found[1:])


def fake_copy(
    model: nn.Module,
    mode: FakeTensorMode,
    dtype: torch.dtype | None,
    shards: Mapping[str, ExtendedShard],
) -> nn.Module:
    """A copy of a model with fake parameters and buffers on the CPU.

    Floating-point parameters have ``dtype``. Those of ``shards`` are carriers.
    """
    memo: dict[int, Any] = {}
    for path, param in model.named_parameters():
        if path in shards:
            with mode:
                memo[id(param)] = carrier_of(shards[path], param.requires_grad)
            continue
        fake = _fake(param, mode, dtype if param.dtype.is_floating_point else None)
        memo[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, mode, None)
    return copy.deepcopy(model, memo)


def fake_inputs(values: Any, mode: FakeTensorMode) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _fake(value, mode, None).requires_grad_(value.requires_grad)

    return tree_map(convert, values)


def cast_at_units(model: nn.Module, rules: ShardingRules) -> None:
    """Lets each unit inside of a model cast what its forward takes and returns, as ``fully_shard`` does.

    The root is left to :class:`StepModule`: Dynamo calls the forward of an exported program's class.
    """
    for path, module in model.named_modules():
        casts = _casts_at(path, rules)
        if path and casts != (None, None):
            module.forward = partial(_cast_around, casts, module.forward)


def _casts_at(path: str, rules: ShardingRules) -> Casts:
    policy = rules.mp_policy
    if not rules.casts_at(path):
        return None, None
    return (policy.param_dtype if policy.cast_forward_inputs else None), policy.output_dtype


def _cast_around(casts: Casts, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    taken, returned = casts
    if taken is not None:
        args, kwargs = cast_tensors((args, kwargs), taken)
    outputs = forward(*args, **kwargs)
    return outputs if returned is None else cast_tensors(outputs, returned)


def _fake(value: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device="cpu")


def trace_step(step: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    try:
        with failures_unlogged():
            traced = capture_with_dynamo(step, args, kwargs)
    except (TorchDynamoException, *DATA_DEPENDENT) as error:
        failed = _FAILED_CALL.search(str(error)) if isinstance(error, TorchRuntimeError) else None
        if failed is not None and not isinstance(error, DATA_DEPENDENT):
            raise CaptureError(_misfit(failed[1], str(error), args, kwargs)) from error
        raise CaptureError(_complaint(error)) from error
    except AssertionError as error:  # fake tensors refuse real ones with a plain AssertionError
        if (found := _REAL_TENSOR.search(str(error))) is None:
            raise
        raise CaptureError(
            "the model or its loss reads a tensor that is no parameter, no buffer and no input: "
            f"{found[1]}; register it as a buffer, or give it as an input"
        ) from error
    inline_regions(traced)
    return traced


def export_step(
    stack: ExitStack, traced: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.GraphModule:
    if not any(param.requires_grad for param in traced.parameters()):
        raise CaptureError(
            "nothing is trained: no parameter that the model reads requires a gradient; set requires_grad on some"
        )
    try:
        joint = export_joint_of_blocks(stack, traced, args, kwargs, inductor_decompositions())
    except (RuntimeError, *DATA_DEPENDENT) as error:  # AOTAutograd raises plain RuntimeErrors
        raise CaptureError(_complaint(error)) from error
    for node in joint.graph.find_nodes(op="placeholder"):
        node.meta.setdefault("val", None)  # a number, which the graph holds as a constant
    return joint


def _misfit(why: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What an op of the model says of its operands, the line of the model, and the inputs."""
    named = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
    inputs = ", ".join(f"{name} {value_text(value)}" for name, value in named if isinstance(value, Tensor))
    return (
        f"the model does not run on these inputs ({inputs or 'no tensors'}): {why}{_place(text)}; give inputs with the "
        "shapes and dtypes that it takes"
    )


def _complaint(error: Exception) -> str:
    """One line: what broke the graph, and the user's line that did."""
    text = str(error).strip()
    what = text.splitlines()[0].strip()[:300] if text else type(error).__name__
    if isinstance(error, DATA_DEPENDENT):
        what = f"a shape or a number depends on data ({what})"
    return (
        f"the model cannot be captured as one graph: {what}{_place(text)}; replace what breaks the graph, or mark it "
        "as an operator (torch.library.custom_op)"
    )


def _place(text: str) -> str:
    """The last line of the user's code in a traceback; "" if there is none."""
    places = [
        (file, number, function, code.strip())
        for file, number, function, code in _FRAME.findall(text)
        if not file.startswith(_NOT_USERS)
    ]
    if not places:
        return ""
    file, number, function, code = places[-1]
    return f" at {file}:{number}, in {function}: `{code}`"
