"""Gathers and reductions of several parameters at once, for a unit that runs uncompiled.

One collective through a bucket serves all members of one dtype, group and kind. What each member needs before and after
the collective comes from the emitters that also lower a graph (:mod:`graphshard.ir.lowering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..ir import (
    PACK,
    UNPACK,
    WAIT,
    EagerEmitter,
    ReduceGradCall,
    Scaling,
    UnshardCall,
    emit_all_gather,
    emit_all_reduce,
    emit_bytes,
    emit_contiguous,
    emit_from_bytes,
    emit_gather_input,
    emit_reduce_scatter,
    emit_reduction_input,
    emit_reduction_output,
)
from .gather_extensions import calls_before, full_after
from .parameter_slot import ParameterSlot
from .tree import TreeUnit

_EMIT = EagerEmitter()


class StartedGather:
    """Gathers that have started and were not waited for, one for each dtype and group."""

    def __init__(self, calls: Sequence[UnshardCall]) -> None:
        """Starts a gather for each dtype and group of ``calls``, whose shards are real tensors."""
        self._num = len(calls)
        self._calls = list(calls)
        self._dtypes: list[torch.dtype] = []
        self._buckets: list[tuple[list[int], list[list[int]], Tensor]] = []
        groups: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
        for index, call in enumerate(calls):
            piece = emit_gather_input(_EMIT, call._replace(shard=call.shard.detach()))
            self._dtypes.append(piece.dtype)
            piece = emit_bytes(_EMIT, piece)
            groups.setdefault((piece.dtype, call.group_name, call.group_size), []).append((index, piece))
        for members in groups.values():
            indices = [index for index, _ in members]
            pieces = [piece for _, piece in members]
            first = calls[indices[0]]
            packed = PACK(pieces, 1)
            gathered = packed if first.group_size == 1 else emit_all_gather(_EMIT, packed, first)
            self._buckets.append((indices, [list(piece.shape) for piece in pieces], gathered))

    def wait(self) -> list[Tensor]:
        """Waits. Returns the full parameters in the order of the calls, contiguous, each with its own storage."""
        result: list[Tensor | None] = [None] * self._num
        for indices, shapes, gathered in self._buckets:
            group_size = self._calls[indices[0]].group_size
            sizes = [int(torch.Size(shape).numel()) for shape in shapes]
            whole = WAIT(gathered) if group_size > 1 else gathered
            for index, shape, flat in zip(indices, shapes, UNPACK(whole, group_size, sizes), strict=True):
                call = self._calls[index]
                if call.dim == 0:
                    full = flat.view(group_size * shape[0], *shape[1:])
                else:
                    full = torch.cat(flat.view(group_size, *shape).unbind(0), call.dim)
                full = full.narrow(call.dim, 0, call.shape[call.dim]).contiguous()
                result[index] = emit_from_bytes(_EMIT, full, self._dtypes[index])
        self._buckets.clear()
        return [full for full in result if full is not None]


class PendingGather:
    """A gather of several parameters of a unit that has started and was not waited for."""

    def __init__(self, unit: TreeUnit, members: list[tuple[ParameterSlot, Tensor]]) -> None:
        self._members = members
        self._calls = [UnshardCall(local, unit.handle, *slot.arguments) for slot, local in members]
        # Number of tensors that each member gathers (an extension may have several), and the extension's metadata.
        self._parts: list[tuple[int, Any]] = []
        parts: list[UnshardCall] = []
        for (slot, _), call in zip(members, self._calls, strict=True):
            own, metadata = _extended_calls(slot, call) if slot.is_extended else ([call], None)
            parts += own
            self._parts.append((len(own), metadata))
        if parts:
            unit.meet_for_gather([call.name for call in self._calls], self._calls[0])
        self._started = StartedGather(parts)

    def take(self) -> dict[str, Tensor]:
        """Waits. Returns the full parameters by name; none if they were taken before."""
        gathered = self._started.wait() if self._members else []
        fulls = {}
        for (slot, local), call, (num_parts, metadata) in zip(
            self._members, self._calls, self._parts, strict=True
        ):
            own, gathered = gathered[:num_parts], gathered[num_parts:]
            fulls[slot.name] = full_after(local, own, metadata, call) if slot.is_extended else own[0]
        self._members, self._calls, self._parts = [], [], []
        return fulls


def reduce_together(calls: Sequence[ReduceGradCall]) -> list[Tensor]:
    """The result of ``graphshard::reduce_grad`` for each call, with one collective for each dtype and group."""
    groups: dict[tuple[Any, ...], list[tuple[int, Tensor, Scaling]]] = {}
    for index, call in enumerate(calls):
        value, scaling = emit_reduction_input(_EMIT, call)
        key = (value.dtype, scaling.op, call.group_name, call.replicate_group, call.all_reduce)
        groups.setdefault(key, []).append((index, value, scaling))
    result: list[Tensor | None] = [None] * len(calls)
    for members in groups.values():
        reduced = _reduce_bucket([calls[index] for index, *_ in members], [rest for _, *rest in members])
        for (index, *_), value in zip(members, reduced, strict=True):
            result[index] = value
    return [value for value in result if value is not None]


def _reduce_bucket(calls: list[ReduceGradCall], inputs: list[list[Any]]) -> list[Tensor]:
    first = calls[0]
    op = inputs[0][1].op
    shapes = [[value.shape[0] // first.group_size, *value.shape[1:]] for value, _ in inputs]
    bucket = PACK([value for value, _ in inputs], first.group_size)
    if first.group_size > 1:
        bucket = emit_reduce_scatter(_EMIT, bucket, op, first)
    pieces = _pieces(bucket, shapes)
    with_partial = [
        piece if call.partial is None else call.partial + piece
        for call, piece in zip(calls, pieces, strict=True)
    ]
    if not first.all_reduce:
        return [piece.clone() for piece in with_partial]
    if any(call.partial is not None for call in calls):
        bucket = PACK([emit_contiguous(_EMIT, piece) for piece in with_partial], 1)
    pieces = _pieces(emit_all_reduce(_EMIT, bucket, op, first), shapes)
    return [
        emit_reduction_output(_EMIT, piece, scaling, call)
        for call, piece, (_, scaling) in zip(calls, pieces, inputs, strict=True)
    ]


def _pieces(bucket: Tensor, shapes: list[list[int]]) -> list[Tensor]:
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [flat.view(shape) for flat, shape in zip(bucket.split(sizes), shapes, strict=True)]


def _extended_calls(slot: ParameterSlot, call: UnshardCall) -> tuple[list[UnshardCall], Any]:
    param = slot.param
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    shard_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
    shard = call.shard.detach()
    if call.device is not None:
        shard = shard.to(call.device)
    owner, _ = slot.owners[0]
    policy = slot.unit.settings.mp_policy
    return calls_before(call._replace(shard=shard), shard_mesh, param.stride(), owner, policy)
