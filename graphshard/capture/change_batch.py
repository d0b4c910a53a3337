"""Interpolates a captured step for input sizes between two that were captured.

Captures of a model at two batch sizes are usually one graph with other numbers: sizes, strides and arguments made of
them. A size in between gets the numbers in between, if they are whole and if each op then gives the shapes that the
graph states. Otherwise (another structure, numbers that grow with the square of the batch) the step has to be captured.

Does not handle:

- numbers that are not linear in the batch and that no shape contradicts, such as padding to a multiple;
- models with another graph for a size strictly between the two.
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
    """The whole numbers of a captured step, and a fingerprint of all else. It is small and pickles.

    Attributes:
        structure: fingerprint of nodes, ops, dtypes and everything else of a node that is not a whole number.
        numbers: the whole numbers of the graphs, in order.
        inputs: sizes of the input tensors.
        given: fingerprint of parameters, of the inputs without their sizes, and of inputs that are not tensors.
    """

    structure: str
    numbers: tuple[int, ...]
    inputs: tuple[int, ...]
    given: str


def numbers_of(
    step: CapturedStep, module: nn.Module, inputs: Any, *, with_joint: bool = True
) -> StepNumbers | None:
    """The numbers of a capture of ``module`` with ``inputs`` (any nesting); None for a step with nested graphs.

    ``with_joint`` includes the numbers of the joint graph, besides those of the halves.
    """
    numbers: list[int] = []
    digest = hashlib.sha256()

    def collect(number: int) -> int:
        numbers.append(number)
        return 0

    for gm in _graphs(step, with_joint):
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
    """A copy of ``step`` with the numbers for ``inputs``, interpolated between ``low`` and ``high``.

    Args:
        step, own: a capture of the same structure, and its numbers; it is not changed.
        module, inputs: the model and the inputs of the result.
        low, high: the numbers of two captures.

    Returns:
        The step, without texts and records; None if it has to be captured.
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
    return step_with_numbers(step, between)


def step_with_numbers(
    step: CapturedStep, numbers: Sequence[int], *, with_joint: bool = True
) -> CapturedStep | None:
    """A copy of ``step`` with other numbers, in the order of :func:`numbers_of`; it has no texts and records.

    Without ``with_joint`` the joint graph is that of ``step``. None if an op does not give the shapes that the numbers
    say.
    """
    rest = iter(numbers)
    with lazy_graph_modules():
        copies = [_with_numbers(gm, rest) for gm in _graphs(step, with_joint)]
    joint, forward, backward = copies if with_joint else (step.joint, *copies)
    if not all(map(_is_consistent, (forward, backward))):
        return None
    return replace(step, joint=joint, forward=forward, backward=backward, text="", records=())


def _graphs(step: CapturedStep, with_joint: bool) -> tuple[fx.GraphModule, ...]:
    return (step.joint, step.forward, step.backward) if with_joint else (step.forward, step.backward)


def _input_sizes(inputs: Any) -> tuple[int, ...]:
    return tuple(size for value in tree_leaves(inputs) if isinstance(value, Tensor) for size in value.shape)


def _share(low: Sequence[int], high: Sequence[int], sizes: Sequence[int]) -> Fraction | None:
    """The position of ``sizes`` between ``low`` (0) and ``high`` (1); None if they are not on the line between."""
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
    """The name of an op; the repr of a function contains an address."""
    return (
        str(target)
        if isinstance(target, (str, torch._ops.OpOverload))
        else str(getattr(target, "__name__", target))
    )


def _given(module: nn.Module, inputs: Any) -> str:
    """Fingerprint of parameters, of input tensors without their sizes, and of other inputs."""
    params = [
        (name, param.shape, param.dtype, param.requires_grad) for name, param in module.named_parameters()
    ]
    leaves = tree_leaves(inputs)
    kinds = [(leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return hashlib.sha256(repr((params, kinds)).encode()).hexdigest()


def _mapped(value: Any, number: Callable[[int], int]) -> Any:
    """Nested arguments with ``number`` applied to each whole number."""
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
    """Shapes and strides of tensors; numbers as they are."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), tuple(value.stride()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_sizes, value))
    return value


def _shapes(value: Any) -> Any:
    """Shapes without strides: Inductor may have changed the strides in a graph."""
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
    """Whether each op, on the values of its inputs, gives the shapes in its ``meta``."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        try:
            value = fake_result(*call_of(node))
        except (RuntimeError, TypeError, ValueError, IndexError):  # the op refuses a shape
            return False
        if _shapes(value) != _shapes(node.meta["val"]):
            return False
    return True
