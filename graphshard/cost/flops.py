"""Floating-point operations of a node, from shapes alone.

Formulas come from :mod:`graphshard.cost.products`, then from torch's registry (``torch.utils.flop_counter``), where
users can register formulas for their own ops. An op that torch composes of others ("linear", "conv2d", "einsum", as
torch.export keeps them) has the operations of its parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import flop_counter

from .._compat import TorchDispatchMode, is_composite, run_and_save_rng_state
from ..ir import argument, schema_call, size_hint
from .products import FORMULAS, TOKENS_FIRST


def kernel_class(node: fx.Node) -> str | None:
    """The class of kernels whose peak bounds the node: that of its largest product.

    One of :data:`graphshard.cost.cards.KERNEL_CLASSES`, or None for a node without a product, whose time is that of the
    bytes it moves.
    """
    products = _products(node)
    return max(products, key=lambda kind: products[kind]) if products else None


def model_flops(node: fx.Node) -> int:
    """Operations of a node as model FLOP utilisation counts them; 0 without a product.

    A multiplication and an addition are two operations. Causal attention counts in full. Symbolic sizes count with
    their hints.
    """
    return sum(_products(node).values())


def executed_flops(node: fx.Node) -> int:
    """Operations that the hardware executes: :func:`model_flops` without the masked half of causal attention."""
    flops = model_flops(node)
    if flops == 0 or not _is_causal(node):
        return flops
    return int(flops * causal_share(*_scored(node)))


def causal_share(queries: int, keys: int) -> Fraction:
    """The fraction of score entries on or below the diagonal that starts in the upper left corner.

    An exact fraction, so that operations are whole numbers at every length.
    """
    square = min(queries, keys)
    kept = Fraction(square * (square + 1), 2) + (queries - square) * keys
    return kept / max(queries * keys, 1)


def total_flops(gm: fx.GraphModule) -> int:
    """:func:`model_flops` of all nodes: the numerator of model FLOP utilisation."""
    return sum(model_flops(node) for node in gm.graph.nodes)


def hinted_shape(value: Tensor) -> tuple[int, ...]:
    """The shape with hints for symbolic sizes: the sizes seen while tracing, 0 for sizes that depend on data."""
    return tuple(map(size_hint, value.shape))


def hinted_numel(value: Tensor) -> int:
    """Number of elements, counted as :func:`hinted_shape` does."""
    return math.prod(hinted_shape(value))


def _products(node: fx.Node) -> dict[str, int]:
    """Operations of the products in a node, by the class of their kernels."""
    if node.op != "call_function":
        return {}
    target, args, kwargs = schema_call(node)
    formula = _formula(target)
    if formula is None and (not is_composite(target) or target.is_view or not node.all_input_nodes):
        return {}
    result = node.meta.get("val")
    if node.target is run_and_save_rng_state:
        _, result = result
    call = (_described(args), tuple(kwargs), _described(tuple(kwargs.values())))
    if formula is None:
        return _remembered(_count_parts, target, *call)
    return {_class_of(target): _remembered(_count, formula, *call, _described(result))}


def _class_of(target: Any) -> str:
    name = str(target)
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    return "convolution" if "conv" in name else "matmul"


def _formula(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", target)
    return FORMULAS.get(packet) or flop_counter.flop_registry.get(packet)


@dataclass(frozen=True, slots=True)
class _Described:
    """A hashable stand-in for a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


def _described(value: Any) -> Any:
    """An argument in hashable form: tensors by hinted shape, symbols by hint, lists as tuples."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _Described(hinted_shape(value), value.dtype)
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, torch.SymFloat):
        return value.node.hint or 0
    return tuple(map(_described, value)) if isinstance(value, (tuple, list)) else value


def _remembered(count: Any, *args: Any) -> Any:
    """Calls a cached function, without its cache if an argument is not hashable."""
    try:
        return count(*args)
    except TypeError:  # an argument is not hashable; an error of a user's formula is raised again
        return count.__wrapped__(*args)


@functools.lru_cache(maxsize=4096)
def _count(
    formula: Callable[..., Any],
    args: tuple[Any, ...],
    names: tuple[str, ...],
    values: tuple[Any, ...],
    out: Any,
) -> int:
    """Operations by a formula. Cached, since the blocks of a model are alike."""
    kwargs = dict(zip(names, map(_without_data, values), strict=True))
    return int(formula(*map(_without_data, args), **kwargs, out_val=_without_data(out)))


@functools.lru_cache(maxsize=4096)
def _count_parts(
    target: Any, args: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...]
) -> dict[str, int]:
    """The products that a composite op runs; none if that depends on data."""
    kwargs = dict(zip(names, map(_without_data, values), strict=True))
    with _ProductCounter() as counter:
        try:
            counter.run(target, tuple(map(_without_data, args)), kwargs)
        except RuntimeError:  # one of its ops needs data: "one_hot", "item"
            return {}
    return counter.flops


class _ProductCounter(TorchDispatchMode):
    """Adds up the operations of the products that run inside it, by class."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an op that may be composite, on tensors without data."""
        return target.decompose(*args, **kwargs) if is_composite(target) else target(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        formula, kwargs = _formula(func), kwargs or {}
        if formula is None and is_composite(func):
            with self:
                return self.run(func, args, kwargs)
        result = func(*args, **kwargs)
        if formula is not None:
            kind = _class_of(func)
            self.flops[kind] = self.flops.get(kind, 0) + int(formula(*args, **kwargs, out_val=result))
        return result


def _without_data(value: Any) -> Any:
    if isinstance(value, _Described):
        return torch.empty(value.sizes, dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return [_without_data(part) for part in value] if isinstance(value, tuple) else value


def _is_causal(node: fx.Node) -> bool:
    """True for a fused kernel of causal attention. Attention made of products computes the masked scores too."""
    return _formula(schema_call(node)[0]) is not None and bool(argument(node, "is_causal"))


def _scored(node: fx.Node) -> tuple[int, int]:
    """Numbers of queries and keys of causal attention. Kernels with tokens first skip nothing if the two differ."""
    query, key = (hinted_shape(argument(node, name).meta["val"]) for name in ("query", "key"))
    if getattr(schema_call(node)[0], "overloadpacket", None) not in TOKENS_FIRST:
        return query[-2], key[-2]
    sides = (
        (query[1], key[1])
        if len(query) == 4
        else (_described(argument(node, name)) for name in ("max_q", "max_k"))
    )
    queries, keys = sides
    return (queries, keys) if queries == keys else (1, 1)
