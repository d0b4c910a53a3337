"""Which calls of a graph run a kernel of a library, and what tells one such call from another.

Inductor generates code for most ops; that code allocates its results and nothing else. Products, convolutions,
attention, linear algebra, Fourier transforms and recurrent layers stay calls of kernels that are part of a library.
Those may allocate memory for themselves. All of them are torch's own ops and write to nothing but their results, so
they can be run to measure this. Ops of users may have effects, and are never run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir import schema_call, size_hint, tensors_of

#: Products of matrices: (sums of) rows times columns.
PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "addbmm", "_grouped_mm", "_scaled_mm", "_int_mm"))
CONVOLUTIONS = frozenset(("convolution", "convolution_backward"))
ATTENTION = "_scaled_dot_product_"

_LINEAR_ALGEBRA = ("linalg_", "_linalg_", "cholesky", "geqrf", "lu_", "ormqr", "orgqr", "triangular_solve")
_OTHERS = ("_fft_", "mkldnn_rnn_layer")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What of a tensor decides how a kernel runs: its sizes, strides (in elements) and dtype, not its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Of a real or a fake tensor; symbolic sizes count with their hints."""
        return TensorSpec(
            tuple(map(size_hint, tensor.shape)), tuple(map(size_hint, tensor.stride())), tensor.dtype
        )

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def num_stored(self) -> int:
        """Elements of the memory that it lies in, from its first to its last."""
        if not self.num_elements:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]@{'x'.join(map(str, self.strides))}"


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a library's kernel. Equal calls allocate equally on one machine.

    Attributes:
        op: an ``OpOverload``.
        args, kwargs: of the call, with a :class:`TensorSpec` for each tensor and a tuple for each list.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors among the arguments."""
        return tuple(_tensors((*self.args, *(value for _, value in self.kwargs))))

    def __str__(self) -> str:
        """The key under which it is remembered."""
        named = [f"{name}={_text(value)}" for name, value in self.kwargs]
        return f"{self.op}({', '.join([*map(_text, self.args), *named])})"


def kernel_call(node: fx.Node) -> KernelCall | None:
    """The call that a node makes, if it runs a kernel of a library (see the module); None for other nodes."""
    if node.op != "call_function" or not may_run_library(node.target):
        return None
    op, args, kwargs = schema_call(node)
    if kernel_name(op) is None:
        return None
    named = tuple((name, _plain(value)) for name, value in sorted(kwargs.items()))
    return KernelCall(op, _plain(args), named)


def kernel_calls(gm: fx.GraphModule, device_type: str | None) -> list[KernelCall]:
    """The different calls of a graph that run on the CPU.

    Args:
        gm: a graph whose values carry ``meta["val"]``.
        device_type: where it will run; None for where its values are.
    """
    found = {
        call: None
        for node in gm.graph.nodes
        if (call := kernel_call(node)) is not None and (device_type or device_of(node)) == "cpu"
    }
    return list(found)


def device_of(node: fx.Node) -> str:
    """Where the first tensor of a node's value is; "" where there is none."""
    return next((tensor.device.type for tensor in tensors_of(node.meta.get("val"))), "")


@functools.lru_cache(maxsize=4096)
def may_run_library(target: Any) -> bool:
    """Whether calls of this target may run a kernel of a library: it is one, or it may wrap another op."""
    return kernel_name(target) is not None or not isinstance(target, torch._ops.OpOverload)


def kernel_name(op: Any) -> str | None:
    """The name of an op of a library's kernel without its namespace; None for other ops."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    name = op.overloadpacket.__name__
    is_library = name in PRODUCTS | CONVOLUTIONS or name.startswith((ATTENTION, *_LINEAR_ALGEBRA, *_OTHERS))
    return name if is_library and not op._schema.is_mutable else None


def _plain(value: Any) -> Any:
    """An argument as it is compared: hashable, without nodes and symbols."""
    if isinstance(value, fx.Node):
        return _plain(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


def _tensors(values: Iterable[Any]) -> Iterator[TensorSpec]:
    for value in values:
        if isinstance(value, TensorSpec):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
