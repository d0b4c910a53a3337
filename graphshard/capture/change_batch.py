"""A captured step for other sizes of its inputs, between two that were captured.

Two captures of a model at two batch sizes are most often one graph with other numbers in it: sizes, strides
and the arguments made of them. A size in between has the numbers in between, as far as they are whole, and as far
as each op gives for its inputs what the graph then says it gives. Anything else (another structure, numbers that
grow with the square of the batch) has to be captured. What stays unseen is a number that shapes do not contradict and
that is not linear in the batch, such as padding to a multiple, or another graph for a size strictly between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._compat import call_of, lazy_graph_modules, tree_leaves
from ..ir import copy_graph, fake_result, tensors_of
from .capture_step import CapturedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """The whole numbers of a captured step, and a fingerprint of all else; small, and can be pickled.

    Attributes:
        structure: of nodes, ops, dtypes and whatever else of a node is no whole number.
        numbers: of the three graphs, in their order.
        inputs: sizes of the tensors that the step was captured with.
        given: fingerprint of parameters, of what else is said of the inputs, and of those that are no tensors.
    """

    structure: str
    numbers: tuple[int, ...]
    inputs: tuple[int, ...]
    given: str


def numbers_of(step: CapturedStep, module: nn.Module, inputs: Any) -> StepNumbers | None:
    """What a capture of ``module`` with ``inputs`` (any nesting) has of numbers; None for graphs inside of graphs."""
    numbers: list[int] = []
    digest = hashlib.sha256()

    def collect(number: int) -> int:
        numbers.append(number)
        return 0

    for gm in _graphs(step):
        if any(isinstance(inner, fx.GraphModule) for inner in gm.children()):
            return None
        for node in gm.graph.nodes:
            rest = _mapped((node.args, node.kwargs, _sizes(node.meta.get("val"))), collect)
            kinds = [(value.dtype, value.device) for value in tensors_of(node.meta.get("val"))]
            digest.update(repr((node.op, node.name, _op_text(node.target), rest, kinds)).encode())
    return StepNumbers(
        structure=digest.hexdigest(),
        numbers=tuple(numbers),
        inputs=_input_sizes(inputs),
        given=_given(module, inputs),
    )


def step_between(
    step: CapturedStep,
    own: StepNumbers,
    module: nn.Module,
    inputs: Any,
    low: StepNumbers,
    high: StepNumbers,
) -> CapturedStep | None:
    """``step`` with the numbers that ``module`` with ``inputs`` has between ``low`` and ``high``.

    Args:
        step, own: a capture of the same structure, and its numbers; it stays as it is.
        module, inputs: what the result is for.
        low, high: the numbers of two captures.

    Returns:
        The step, without texts and records, or None where it has to be captured.
    """
    share = _share(low.inputs, high.inputs, _input_sizes(inputs))
    if share is None or not own.structure == low.structure == high.structure:
        return None
    if not own.given == low.given == high.given == _given(module, inputs):
        return None
    between = []
    for first, last in zip(low.numbers, high.numbers, strict=True):
        number = first if first == last else first + share * (last - first)
        if number != int(number):
            return None
        between.append(int(number))
    numbers = iter(between)
    with lazy_graph_modules():
        joint, forward, backward = (_with_numbers(gm, numbers) for gm in _graphs(step))
    if not all(map(_is_consistent, (forward, backward))):
        return None
    return replace(step, joint=joint, forward=forward, backward=backward, text="", records=())


def _graphs(step: CapturedStep) -> tuple[fx.GraphModule, fx.GraphModule, fx.GraphModule]:
    return step.joint, step.forward, step.backward


def _input_sizes(inputs: Any) -> tuple[int, ...]:
    return tuple(size for value in tree_leaves(inputs) if isinstance(value, Tensor) for size in value.shape)


def _share(low: Sequence[int], high: Sequence[int], sizes: Sequence[int]) -> Fraction | None:
    """Where sizes lie on the way from low ones to high ones; None if they are not on it."""
    if not len(low) == len(high) == len(sizes):
        return None
    shares = {
        Fraction(size - first, last - first)
        for first, last, size in zip(low, high, sizes, strict=True)
        if first != last
    }
    is_same = all(size == first for first, last, size in zip(low, high, sizes, strict=True) if first == last)
    if not is_same or len(shares) != 1:
        return None
    (share,) = shares
    return share if 0 <= share <= 1 else None


def _op_text(target: Any) -> str:
    """An op by its name: a function's own text has an address in it."""
    return (
        str(target)
        if isinstance(target, (str, torch._ops.OpOverload))
        else str(getattr(target, "__name__", target))
    )


def _given(module: nn.Module, inputs: Any) -> str:
    """Parameters, of input tensors what is no size, and inputs that are no tensors."""
    params = [
        (name, param.shape, param.dtype, param.requires_grad) for name, param in module.named_parameters()
    ]
    leaves = tree_leaves(inputs)
    kinds = [(leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return hashlib.sha256(repr((params, kinds)).encode()).hexdigest()


def _mapped(value: Any, number: Callable[[int], int]) -> Any:
    """Nested arguments with each whole number replaced."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return number(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, number) for part in value)
    if isinstance(value, dict):
        return {name: _mapped(part, number) for name, part in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(part, number) for part in (value.start, value.stop, value.step)))
    return value


def _sizes(value: Any) -> Any:
    """Shapes and strides; a number stands for itself."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), tuple(value.stride()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_sizes, value))
    return value


def _shapes(value: Any) -> Any:
    """Strides aside: those that are written may be what Inductor makes of them."""
    return [tuple(part.shape) for part in tensors_of(value)]


def _with_numbers(gm: fx.GraphModule, numbers: Iterator[int]) -> fx.GraphModule:
    gm = copy_graph(gm)

    def next_number(_: int) -> int:
        return next(numbers)

    for node in gm.graph.nodes:
        value = node.meta.get("val")
        args, kwargs, sizes = _mapped((node.args, node.kwargs, _sizes(value)), next_number)
        node.args, node.kwargs = args, kwargs
        if "val" in node.meta:
            node.meta["val"] = _resized(value, sizes)
    return gm


def _resized(value: Any, sizes: Any) -> Any:
    if isinstance(value, Tensor):
        if _sizes(value) == sizes:
            return value
        return fake_result(torch.ops.aten.new_empty_strided.default, (value, *sizes), {})
    if isinstance(value, (list, tuple)):
        return type(value)(map(_resized, value, sizes))
    return sizes


def _is_consistent(gm: fx.GraphModule) -> bool:
    """Whether each op gives, for the values of its inputs, the shapes that are written at it."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        try:
            value = fake_result(*call_of(node))
        except (RuntimeError, TypeError, ValueError, IndexError):  # a shape that the op refuses
            return False
        if _shapes(value) != _shapes(node.meta["val"]):
            return False
    return True
