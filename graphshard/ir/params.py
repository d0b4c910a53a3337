"""Sharded parameters: the arguments of the shard ops, and the shape of a padded shard.

Shards follow ``torch.chunk``: with ``n`` rows over ``w`` ranks, each rank holds at most ``ceil(n / w)`` rows; the last
ranks hold fewer, possibly none. All decisions use the padded size ``ceil(n / w)``, which is equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedShardingError


def padded_rows(num_rows: int, num_ranks: int) -> int:
    """Rows of one padded shard: ``ceil(num_rows / num_ranks)``."""
    return -(-num_rows // num_ranks)


def padded_shape(shape: Sequence[int], dim: int, num_ranks: int) -> list[int]:
    """Shape of the padded shard of a parameter of ``shape`` cut along ``dim``."""
    result = list(shape)
    result[dim] = padded_rows(result[dim], num_ranks)
    return result


def shard_shape(shape: Sequence[int], dim: int, num_ranks: int, rank: int) -> list[int]:
    """Shape of the unpadded piece that ``rank`` holds (``torch.chunk`` semantics)."""
    rows = padded_rows(shape[dim], num_ranks)
    start = min(rank * rows, shape[dim])
    result = list(shape)
    result[dim] = min(start + rows, shape[dim]) - start
    return result


class UnshardCall(NamedTuple):
    """The arguments of ``graphshard::unshard``, in order; ``UnshardCall(*node.args)`` reads a node.

    Attributes:
        shard: this rank's piece, padded to ``ceil(shape[dim] / group_size)`` rows or not; any dtype.
        handle: an empty tensor with the unit as an attribute; a running graph finds the unit's state through it.
        name: fully qualified name of the parameter, for text and errors.
        unit: label of the unit; collectives of one unit are merged.
        shape: shape of the full parameter.
        dim: the tensor dim that is cut.
        dtype: dtype of the gather and of the full parameter; None for the shard's dtype.
        reshard: ranks over which the full parameter is spread between forward and backward:
            1 keeps it whole, ``group_size`` frees it.
        reshard_group: process group of those ranks; "" where ``reshard`` is 1 or ``group_size``.
        axis: label of the mesh axis over which the parameter is sharded.
        group_size: ranks on that axis.
        group_name: process group of that axis.
        replicate_axis, replicate_size, replicate_group: the axis over which shards are copied and gradients are
            summed too; size 1 if there is none.
        reduce_dtype: dtype in which gradients are summed; None for the gradient's dtype.
        divide_factor: divisor of the summed gradient; None for the number of ranks (a mean).
        force_sum: sum and divide, even if the process group can average.
        device: device of the full parameter if the shard is on another (offloaded to the CPU); else None.
        reduce_group: process group of the reduce-scatter if it is not the one of the gather; else "".
        custom: the collectives that the user replaced, joined by ",": "all_gather", "reduce_scatter",
            "all_reduce_hook" (see :mod:`graphshard.ir.custom_collectives`).
        forward_prefetch, backward_prefetch: labels of the units, joined by ",", whose gathers start once this
            unit's full parameters are copied out of the bucket; "" for the next unit.
        max_reductions: reductions of the model that may be open at a time; 0 leaves the number to the schedule.
        reshard_fixed: the user set ``reshard``; a plan for a memory budget does not change it.
        row_offset: first element of the shard in its unit's row (:mod:`graphshard.ir.shard_rows`); -1 if it has no
            place in one.
    """

    shard: Any
    handle: Any
    name: str
    unit: str
    shape: Sequence[int]
    dim: int
    dtype: torch.dtype | None
    reshard: int
    reshard_group: str
    axis: str
    group_size: int
    group_name: str
    replicate_axis: str
    replicate_size: int
    replicate_group: str
    reduce_dtype: torch.dtype | None
    divide_factor: float | None
    force_sum: bool
    device: torch.device | None = None
    reduce_group: str = ""
    custom: str = ""
    forward_prefetch: str = ""
    backward_prefetch: str = ""
    max_reductions: int = 0
    reshard_fixed: bool = False
    row_offset: int = -1


def part_name(name: str, index: int) -> str:
    """The name under which one of several tensors is gathered that together make a parameter."""
    return f"{name}[{index}]"


def parameter_of(name: str) -> str:
    """The name of the parameter that is gathered under ``name``."""
    return name.partition("[")[0]


class ReduceGradCall(NamedTuple):
    """The arguments of ``graphshard::reduce_grad``, in order; those not listed are as in ``UnshardCall``.

    Attributes:
        grad: gradient of the full parameter, with any strides.
        unreduced: full gradients of earlier micro-batches, added before the reduction; or None.
        partial: reduce-scattered gradients of earlier micro-batches, added before the all-reduce; or None.
        shard_shape: shape of the result: that of the shard.
        dtype: dtype of the result: that of the shard.
        all_reduce: sum over the replicate axis too; False returns the partial sum in ``reduce_dtype``.
        group_name: process group of the reduce-scatter.
        device: device of the result if the gradient is on another; else None.
    """

    grad: Any
    unreduced: Any
    partial: Any
    handle: Any
    name: str
    unit: str
    shard_shape: Sequence[int]
    dim: int
    dtype: torch.dtype
    axis: str
    group_size: int
    group_name: str
    replicate_axis: str
    replicate_size: int
    replicate_group: str
    reduce_dtype: torch.dtype | None
    divide_factor: float | None
    force_sum: bool
    all_reduce: bool
    device: torch.device | None = None
    custom: str = ""

    def with_gradient(self, grad: torch.Tensor, handle: Any) -> ReduceGradCall:
        """The call for this gradient and handle.

        Raises:
            UnsupportedShardingError: it is a sparse tensor.
        """
        if grad.layout is not torch.strided:
            raise UnsupportedShardingError(
                f"parameter {self.name} has a sparse gradient, but reductions are of dense tensors: leave out "
                "sparse=True, in nn.Embedding and torch.nn.functional.embedding"
            )
        return ReduceGradCall(grad, self.unreduced, self.partial, handle, *self[4:])

    def scaling(self, dtype: torch.dtype) -> Scaling:
        """How gradients of ``dtype`` are averaged."""
        num_ranks = self.group_size * self.replicate_size
        return gradient_scaling(dtype, num_ranks, self.divide_factor, self.force_sum)

    def without_gradient(self) -> ReduceGradCall:
        """The call for a gradient that is on its way; what waited was added to it."""
        return ReduceGradCall(None, None, *self[2:])


def gradient_call(
    call: UnshardCall,
    grad: Any,
    shard_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> ReduceGradCall:
    """The reduction that is the backward of a gather. Shape, dtype and device are those of the shard."""
    return ReduceGradCall(
        grad=grad,
        unreduced=None,
        partial=None,
        handle=call.handle,
        name=call.name,
        unit=call.unit,
        shard_shape=list(shard_shape),
        dim=call.dim,
        dtype=dtype,
        axis=call.axis,
        group_size=call.group_size,
        group_name=call.reduce_group or call.group_name,
        replicate_axis=call.replicate_axis,
        replicate_size=call.replicate_size,
        replicate_group=call.replicate_group,
        reduce_dtype=call.reduce_dtype,
        divide_factor=call.divide_factor,
        force_sum=call.force_sum,
        all_reduce=True,
        device=None if call.device is None else device,
        custom=call.custom,
    )


class Scaling(NamedTuple):
    """How a gradient is averaged: a factor before the reduction, the reduction, a factor after it."""

    before: float
    op: str
    after: float


def gradient_scaling(
    dtype: torch.dtype, num_ranks: int, divide_factor: float | None, force_sum: bool
) -> Scaling:
    """How gradients of ``dtype`` are summed over ``num_ranks`` and divided.

    In float16 a plain sum can overflow, and a division before it can underflow. So the division is split, as in FSDP1
    and FSDP2: first by a power of two, which is doubled while it divides the factor and is smaller than the rest; then
    by the rest. Other dtypes use the average of the process group, or a sum and one division.
    """
    factor = float(num_ranks if divide_factor is None else divide_factor)
    if dtype == torch.float16:
        before = 1.0
        while factor % before == 0 and factor / before > before:
            before *= 2
        return Scaling(1.0 / before, "sum", before / factor)
    if factor == num_ranks and not force_sum and num_ranks > 1:
        return Scaling(1.0, "avg", 1.0)
    return Scaling(1.0, "sum", 1.0 / factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainParameter:
    """A parameter of a graph captured without ``fully_shard``, and how to shard it.

    Attributes:
        placeholder: the graph input that holds the full parameter.
        call: its gather; ``shard`` and ``handle`` are ignored.
        dtype: dtype of the shard.
    """

    placeholder: str
    call: UnshardCall
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedInputs:
    """The inputs of a joint graph that stand for one parameter with a gather extension.

    Attributes:
        name: of the parameter.
        shape: of the full parameter.
        carrier: name of the input that takes its gradient.
        inner: names of the inputs that its shard holds.
    """

    name: str
    shape: tuple[int, ...]
    carrier: str
    inner: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBinding:
    """One sharded parameter of one captured graph.

    Attributes:
        placeholder: name of the graph input that holds its shard.
        position: index of that input among the inputs of the forward.
        gradient: index of its gradient among the outputs of the backward; -1 if none of them is.
        group_names: the process groups that gather and reduce it. A collective on another group, of tensor parallelism
            for instance, is compute on its values.
        row_offset: as in :class:`UnshardCall`.
        handle: name of the input that is the unit's handle. It tells units of different models with one label apart.
        held: of a parameter with a gather extension: inputs that its shard holds, and values made of them alone that
            the forward may save for the backward.
    """

    placeholder: str
    position: int
    name: str
    unit: str
    shape: tuple[int, ...]
    dim: int
    axis: str
    group_size: int
    reshard: int
    replicate_axis: str = ""
    replicate_size: int = 1
    group_names: tuple[str, ...] = ()
    row_offset: int = -1
    handle: str = ""
    held: tuple[str, ...] = ()
    gradient: int = -1

    @property
    def num_ranks(self) -> int:
        """Ranks over which its gradient is summed."""
        return self.group_size * self.replicate_size

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)
