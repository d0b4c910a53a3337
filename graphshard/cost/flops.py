"""Floating-point operations of a node, from shapes alone.

torch's own registry (``torch.utils.flop_counter``) serves, so a formula that a user registers there
for an op of their own is found here too. The ops it lacks are below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import flop_counter

from .._compat import call_of, run_and_save_rng_state

aten = torch.ops.aten


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Scores, then the weighted sum of values."""
    return flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Five products where the forward has two: scores again, and gradients of weights, q, k and v."""
    return flop_counter.sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """One product per group; where an operand is 2-D the groups divide one of its dims."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


#: Formulas that torch's registry lacks (2.13).
_MORE_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped,
    aten._scaled_grouped_mm: _grouped,
}


def kernel_class(node: fx.Node) -> str | None:
    """The class of :data:`graphshard.cost.cards.KERNEL_CLASSES` whose peak bounds the node.

    None for a node without a formula: its time is that of the bytes it moves.
    """
    if _formula(node) is None:
        return None
    name = str(call_of(node)[0])
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    return "convolution" if "conv" in name else "matmul"


def model_flops(node: fx.Node) -> int:
    """Operations as they are usually counted for model FLOP utilisation; 0 without a formula.

    A multiplication and an addition are two; causal attention counts in full. Symbolic sizes count
    with their hints.
    """
    formula = _formula(node)
    if formula is None:
        return 0
    _, args, kwargs = call_of(node)
    result = node.meta.get("val")
    if node.target is run_and_save_rng_state:
        _, result = result
    call = (formula, _shapes_of(args), tuple(kwargs), _shapes_of(tuple(kwargs.values())), _shapes_of(result))
    try:
        return _count(*call)
    except TypeError:  # an argument that is not hashable, or what a user's formula raises again
        return _count.__wrapped__(*call)


def executed_flops(node: fx.Node) -> float:
    """Operations that the hardware executes: kernels skip the masked half of causal attention."""
    flops = model_flops(node)
    if flops == 0 or not _is_causal(node):
        return float(flops)
    queries, keys = (hinted_shape(argument(node, name).meta["val"])[-2] for name in ("query", "key"))
    return flops * causal_share(queries, keys)


def causal_share(queries: int, keys: int) -> float:
    """The fraction of score entries on or below the diagonal that starts in the upper left corner."""
    square = min(queries, keys)
    kept = square * (square + 1) / 2 + (queries - square) * keys
    return kept / max(queries * keys, 1)


def total_flops(gm: fx.GraphModule) -> int:
    """:func:`model_flops` of all nodes: the numerator of model FLOP utilisation."""
    return sum(model_flops(node) for node in gm.graph.nodes)


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an op by its name in the schema; None if it has none of that name, or its default."""
    target, args, kwargs = call_of(node)
    if name in kwargs:
        return kwargs[name]
    schema = getattr(target, "_schema", None)
    for index, expected in enumerate(schema.arguments if schema else ()):
        if expected.name == name:
            return args[index] if index < len(args) else None
    return None


def hinted_shape(value: Tensor) -> tuple[int, ...]:
    """The shape, symbolic sizes by the sizes seen while tracing; 0 for one that depends on data."""
    return tuple(size if isinstance(size, int) else int(size.node.hint or 0) for size in value.shape)


def hinted_numel(value: Tensor) -> int:
    """Number of elements, counted as :func:`hinted_shape` does."""
    return math.prod(hinted_shape(value))


def _formula(node: fx.Node) -> Callable[..., Any] | None:
    if node.op != "call_function":
        return None
    target, *_ = call_of(node)
    packet = getattr(target, "overloadpacket", target)
    return _MORE_FORMULAS.get(packet) or flop_counter.flop_registry.get(packet)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Stands for a tensor."""

    sizes: tuple[int, ...]


def _shapes_of(value: Any) -> Any:
    """Nodes become what they stand for, tensors their hinted shapes, symbols their hints, lists tuples."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _Shape(hinted_shape(value))
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint or 0
    return tuple(map(_shapes_of, value)) if isinstance(value, (tuple, list)) else value


@functools.lru_cache(maxsize=4096)
def _count(
    formula: Callable[..., Any],
    args: tuple[Any, ...],
    names: tuple[str, ...],
    values: tuple[Any, ...],
    out: Any,
) -> int:
    """What a formula says of such arguments: the blocks of a model are alike."""
    kwargs = dict(zip(names, map(_without_data, values), strict=True))
    return int(formula(*map(_without_data, args), **kwargs, out_val=_without_data(out)))


def _without_data(value: Any) -> Any:
    if isinstance(value, _Shape):
        return torch.empty(value.sizes, device="meta")
    return [_without_data(part) for part in value] if isinstance(value, tuple) else value


def _is_causal(node: fx.Node) -> bool:
    return bool(argument(node, "is_causal")) and isinstance(argument(node, "query"), fx.Node)
