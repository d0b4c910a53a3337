"""Gathers and reductions of several parameters at once, for a unit that runs uncompiled.

One gather through a bucket serves all members of one group, as bytes if their dtypes differ. One reduction serves all
members of one dtype, group and kind. What each member needs before and after the collective comes from the emitters
that also lower a graph (:mod:`graphshard.ir.lowering`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat import group_by_name, reduce_scatter_single
from ..._compat_gloo import GatherWork, start_gather
from ...coordination import Steps
from ...errors import ParameterStateError
from ...ir import (
    ALL_REDUCE,
    PACK,
    REDUCE_SCATTER,
    UNPACK,
    WAIT,
    EagerEmitter,
    ReduceGradCall,
    Scaling,
    UnshardCall,
    dtypes_text,
    emit_all_gather,
    emit_all_reduce,
    emit_bytes,
    emit_contiguous,
    emit_from_bytes,
    emit_gather_input,
    emit_reduce_scatter,
    emit_reduction_input,
    emit_reduction_output,
    padded_rows,
)
from .gather_extensions import extended_calls, full_after
from .parameter_slot import ParameterSlot, shard_data
from .shard_versions import FullRead, version_of
from .tree import WRITE_BACK, TreeUnit


class _CallCollectives(EagerEmitter):
    """Applies each op at once, and calls the process group in place of functional collectives.

    That costs the host less, and leaves nothing behind if a gather is started and no backward comes to wait for it.
    """

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target not in (REDUCE_SCATTER, ALL_REDUCE) or type(args[0]) is not Tensor:
            return target(*args, **kwargs)
        value, op, group = args[0], _OPS[args[1]], group_by_name(args[-1])
        steps = Steps.of_group(args[-1])
        if target is ALL_REDUCE:
            reduced = value.clone()
            _wait(dist.all_reduce(reduced, op, group, async_op=True), reduced, steps, steps.position)
            return reduced
        reduced = value.new_empty((value.shape[0] // args[2], *value.shape[1:]))
        work = reduce_scatter_single(reduced, value, op, group, async_op=True)
        _wait(work, reduced, steps, steps.position, takes_limit=False)
        return reduced


def _wait(work: Any, result: Tensor, steps: Steps, position: int, *, takes_limit: bool = True) -> None:
    """Waits for a collective of a step."""
    if result.device.type == "cpu":
        steps.wait(work, position, takes_limit=takes_limit)
    else:
        work.wait()


def are_started_here(call: UnshardCall | ReduceGradCall, value: Tensor) -> bool:
    """Whether this file calls the process group for the collectives of a call, on the CPU, and waits for them."""
    # Tensors of other classes go through functional collectives.
    is_here = type(value) is Tensor and value.device.type == "cpu"
    return is_here and not call.custom and call.device is None


_EMIT = _CallCollectives()
_WRITE_REMEDY = "Every rank must write to the same parameters in a forward"
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


class FlatGather(NamedTuple):
    """A gather of 1-D tensors that has started, by a call of the process group.

    Attributes:
        sent: the tensors one after the other, in their place in ``gathered``, so that they are not held twice.
        gathered: those of all ranks, once it is waited for.
        work: the collective.
        steps: those of the process group.
        position: that of the collective's step.
    """

    sent: Tensor
    gathered: Tensor
    work: Any
    steps: Steps
    position: int

    @staticmethod
    def of(flats: Sequence[Tensor], numel: int, dtype: torch.dtype, call: UnshardCall) -> FlatGather:
        """Starts the gather in the group of ``call``, of ``numel`` elements in all, which are cast to ``dtype``."""
        group, steps = group_by_name(call.group_name), Steps.of_group(call.group_name)
        gathered = flats[0].new_empty(call.group_size * numel, dtype=dtype)
        sent = gathered.narrow(0, group.rank() * numel, numel)
        with torch.no_grad():
            torch.cat(flats, out=sent)
        work = start_gather(gathered, sent, group)
        return FlatGather(sent, gathered, work, steps, steps.position)

    def wait(self) -> None:
        """Waits for ``gathered``."""
        takes_limit = not isinstance(self.work, GatherWork)
        _wait(self.work, self.gathered, self.steps, self.position, takes_limit=takes_limit)


@dataclass(slots=True)
class _StartedBucket:
    """A gather that has started.

    Attributes:
        indices: the calls that it serves.
        shapes: the shape of the piece of each.
        dtypes: the dtype of the piece of each.
        sent: the pieces one after the other.
        gathered: those of all ranks, once it is waited for.
        flight: the collective; None if ``gathered`` is the result of a functional one.
    """

    indices: list[int]
    shapes: list[list[int]]
    dtypes: list[torch.dtype]
    sent: Tensor
    gathered: Tensor
    flight: FlatGather | None = None

    @staticmethod
    def of(indices: list[int], pieces: list[Tensor], call: UnshardCall) -> _StartedBucket:
        """Starts the gather; ``call`` is one of those that it serves."""
        shapes, dtypes = [list(piece.shape) for piece in pieces], [piece.dtype for piece in pieces]
        is_custom = "all_gather" in call.custom.split(",")
        if call.group_size == 1 or is_custom or type(pieces[0]) is not Tensor:
            sent = PACK(pieces, 1)
            gathered = sent if call.group_size == 1 else emit_all_gather(_EMIT, sent, call)
            return _StartedBucket(indices, shapes, dtypes, sent, gathered)
        flats = [piece.reshape(-1) for piece in pieces]
        if dtypes_text(dtypes):
            flats = [flat.view(torch.uint8) for flat in flats]
        flight = FlatGather.of(flats, sum(flat.numel() for flat in flats), flats[0].dtype, call)
        return _StartedBucket(indices, shapes, dtypes, flight.sent, flight.gathered, flight)

    def wait(self, group_size: int) -> list[Tensor]:
        """For each member the pieces of all ranks, one after the other."""
        gathered = self.gathered
        if self.flight is not None:
            self.flight.wait()
        elif gathered is not self.sent:
            gathered = WAIT(gathered)
        itemsize = gathered.dtype.itemsize
        sizes = [
            int(torch.Size(shape).numel()) * dtype.itemsize // itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        return UNPACK(gathered, group_size, sizes, dtypes_text(self.dtypes))


class StartedGather:
    """Gathers that have started and were not waited for, one for each group."""

    def __init__(self, calls: Sequence[UnshardCall]) -> None:
        """Starts a gather for each group of ``calls``, whose shards are real tensors."""
        self._num = len(calls)
        self._calls = list(calls)
        self._dtypes: list[torch.dtype] = []
        self._buckets: list[_StartedBucket] = []
        groups: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
        for index, call in enumerate(calls):
            call = call._replace(shard=call.shard.detach()) if call.shard.requires_grad else call
            piece = emit_gather_input(_EMIT, call)
            self._dtypes.append(piece.dtype)
            piece = emit_bytes(_EMIT, piece)
            groups.setdefault((call.group_name, call.group_size), []).append((index, piece))
        for members in groups.values():
            indices = [index for index, _ in members]
            self._buckets.append(
                _StartedBucket.of(indices, [piece for _, piece in members], calls[indices[0]])
            )

    def wait(self) -> list[Tensor]:
        """Waits. Returns the full parameters in the order of the calls, contiguous, each with its own storage."""
        result: list[Tensor | None] = [None] * self._num
        while self._buckets:  # each is freed once it is copied out
            bucket = self._buckets.pop(0)
            group_size = self._calls[bucket.indices[0]].group_size
            for index, shape, flat in zip(
                bucket.indices, bucket.shapes, bucket.wait(group_size), strict=True
            ):
                call = self._calls[index]
                if call.dim == 0:
                    full = flat.view(group_size * shape[0], *shape[1:])
                else:
                    full = torch.cat(flat.view(group_size, *shape).unbind(0), call.dim)
                if full.shape[call.dim] != call.shape[call.dim]:
                    full = full.narrow(call.dim, 0, call.shape[call.dim]).contiguous()
                result[index] = emit_from_bytes(_EMIT, full, self._dtypes[index])
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
            own, metadata = extended_calls(slot, call) if slot.is_extended else ([call], None)
            parts += own
            self._parts.append((len(own), metadata))
        if parts:
            can_skip = all(are_started_here(call, call.shard) for call in parts)
            unit.meet_for_gather([call.name for call in self._calls], self._calls[0], can_skip=can_skip)
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


def reduce_together(calls: list[ReduceGradCall]) -> list[Tensor]:
    """The result of ``graphshard::reduce_grad`` for each call, with one collective for each dtype and group.

    The gradients are taken out of ``calls``, so that each is freed once it is copied into a bucket.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, Tensor, Scaling]]] = {}
    for index, call in enumerate(calls):
        if _is_sent_as_is(call):
            value, scaling = call.grad, call.scaling(call.grad.dtype)
        else:
            value, scaling = emit_reduction_input(_EMIT, call)
        key = (value.dtype, scaling.op, call.group_name, call.replicate_group, call.all_reduce)
        groups.setdefault(key, []).append((index, value, scaling))
        calls[index] = call.without_gradient()
    del call, value
    result: list[Tensor | None] = [None] * len(calls)
    for key in list(groups):
        indices, inputs, scalings = (list(column) for column in zip(*groups.pop(key), strict=True))
        reduced = _reduce_bucket([calls[index] for index in indices], inputs, scalings)
        for index, piece in zip(indices, reduced, strict=True):
            result[index] = piece
    return [value for value in result if value is not None]


def _is_sent_as_is(call: ReduceGradCall) -> bool:
    """Whether a gradient is the input of its reduction: the usual case of ``emit_reduction_input``, in few steps."""
    grad, dtype = call.grad, call.grad.dtype
    if call.unreduced is not None or dtype == torch.float16 or call.reduce_dtype not in (None, dtype):
        return False
    is_even = call.dim == 0 and grad.shape[0] == call.shard_shape[0] * call.group_size
    return is_even and grad.is_contiguous()


def _reduce_bucket(
    calls: list[ReduceGradCall], inputs: list[Tensor], scalings: list[Scaling]
) -> list[Tensor]:
    first = calls[0]
    op = scalings[0].op
    shapes = [[value.shape[0] // first.group_size, *value.shape[1:]] for value in inputs]
    bucket = PACK(inputs, first.group_size)
    inputs.clear()
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
        pieces = _pieces(bucket, shapes)
    whole = emit_all_reduce(_EMIT, bucket, op, first)
    if whole is not bucket:
        pieces = _pieces(whole, shapes)
    return [
        emit_reduction_output(_EMIT, piece, scaling, call)
        for call, piece, scaling in zip(calls, pieces, scalings, strict=True)
    ]


def _pieces(bucket: Tensor, shapes: list[list[int]]) -> list[Tensor]:
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [flat.view(shape) for flat, shape in zip(bucket.split(sizes), shapes, strict=True)]


def write_back(slots: Sequence[ParameterSlot], fulls: Mapping[str, Tensor], *, line: str = "") -> None:
    """Writes full parameters that a forward has changed in place back to the shards; called on all ranks alike.

    An element that only one rank has changed gets the value of that rank. So the rows that ``nn.Embedding(max_norm=)``
    changes are those that any rank has looked up.

    Args:
        slots: the parameters.
        fulls: their changed values, by name.
        line: where they are written, for errors.

    Raises:
        ParameterStateError: ranks have written different values to one element, the parameter has another shape now,
            or it has an all-gather extension.
    """
    with torch.inference_mode(False), torch.no_grad():
        for slot in slots:
            _write_back(slot, fulls[slot.name].detach(), line)


def write_back_reads(label: str, slots: Sequence[ParameterSlot], reads: dict[str, FullRead]) -> None:
    """Writes what a forward has changed back to the shards, and renews the records of what it has read.

    Args:
        label: of the unit that holds the parameters, for errors.
        slots: the parameters that this rank may have changed.
        reads: what the forward has read, by name.

    Raises:
        ParameterStateError: as :func:`write_back`; or the write was recorded by autograd, or the shard has changed too.
    """
    found = any_rank(slots, [reads[slot.name].is_written for slot in slots])
    written = [slot for slot, is_written in zip(slots, found, strict=True) if is_written]
    for slot in written:
        read = reads[slot.name]
        if read.is_lost:
            raise ParameterStateError(
                f"parameter {slot.name} is a DTensor whose .data is assigned to in a forward of {label}, which "
                "changes no DTensor: write to it with copy_() under torch.no_grad()"
            )
        if read.shown.grad_fn is not read.source:
            raise ParameterStateError(
                f"parameter {slot.name} is written in place in the forward of unit {label} where gradients "
                "are enabled: write to it under torch.no_grad(), as to any parameter"
            )
        if version_of(slot.param) != read.shard:
            raise ParameterStateError(
                f"parameter {slot.name} is written in place in a forward, and its shard has changed since it "
                "was gathered: write to it in a forward, or to the shard outside of it"
            )
    write_back(written, {slot.name: reads[slot.name].full for slot in written})
    for slot in slots:
        reads[slot.name] = reads[slot.name].renewed(version_of(slot.param))


def any_rank(slots: Sequence[ParameterSlot], found: Sequence[bool]) -> list[bool]:
    """Which of ``found`` hold on any rank of the parameters' groups; the ranks meet first.

    Raises:
        AgreementError: another rank has not read or written the same parameters.
    """
    flags = torch.tensor(found, dtype=torch.int32, device=slots[0].param.device_mesh.device_type)
    unit, names = slots[0].unit, [slot.name for slot in slots]
    for group_name in _groups(slots):
        unit.tree.come(group_name, WRITE_BACK, unit.label, names, _WRITE_REMEDY, can_skip=False)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group_by_name(group_name))
    return [bool(flag) for flag in flags.tolist()]


def _groups(slots: Sequence[ParameterSlot]) -> list[str]:
    axes = (axis for slot in slots for axis in (slot.axis, slot.replicate))
    return list(dict.fromkeys(axis.group_name for axis in axes if axis.size > 1))


def _write_back(slot: ParameterSlot, full: Tensor, line: str) -> None:
    at = f" at {line}" if line else ""
    if slot.is_extended:
        raise ParameterStateError(
            f"parameter {slot.name} is written in place in a forward{at}, but it has an all-gather extension, so the "
            "values cannot be written back to the shards: change it outside of the forward"
        )
    full = slot.as_held(full)
    if full.shape != slot.shape:
        raise ParameterStateError(
            f"parameter {slot.name} of shape {tuple(slot.shape)} is replaced in a forward{at} by values of shape "
            f"{tuple(full.shape)}: keep the shape"
        )
    local = shard_data(slot).detach()
    call = UnshardCall(slot.as_sent(local), slot.unit.handle, *slot.arguments)
    old = slot.as_held(StartedGather([call]).wait()[0])
    full = full.to(old)
    is_changed = (full != old) & ~(full.isnan() & old.isnan())
    merged = _merged(slot, full, old, is_changed, at)
    rank = group_by_name(slot.axis.group_name).rank() if slot.axis.size > 1 else 0
    start = min(rank * padded_rows(slot.shape[slot.dim], slot.axis.size), slot.shape[slot.dim])
    own = [value.narrow(slot.dim, start, local.shape[slot.dim]) for value in (merged, old)]
    # What is not written keeps its value in the dtype of the shard.
    local.copy_(torch.where((own[0] != own[1]).to(local.device), own[0].to(local), local))


def _merged(slot: ParameterSlot, full: Tensor, old: Tensor, is_changed: Tensor, at: str) -> Tensor:
    """The values that the ranks together have written."""
    group_names = _groups([slot])
    if not group_names:
        return full
    wide = torch.float64 if full.is_floating_point() or full.is_complex() else torch.int64
    values, olds = (value.to(wide) for value in _as_reals(full, old))
    is_changed = is_changed.unsqueeze(-1).expand_as(values) if full.is_complex() else is_changed
    lowest = torch.finfo(wide).min if wide.is_floating_point else torch.iinfo(wide).min + 1
    highs, lows = (torch.where(is_changed, value, lowest) for value in (values, -values))
    written = is_changed.to(torch.int32)
    for group_name in group_names:
        for value in (highs, lows, written):
            dist.all_reduce(value, dist.ReduceOp.MAX, group_by_name(group_name))
    rounding = 8 * torch.finfo(full.dtype).eps if wide.is_floating_point else 0
    is_unequal = (highs + lows).abs() > rounding * highs.abs().clamp(min=1e-3)
    if bool((is_unequal & (written > 0)).any()):
        raise ParameterStateError(
            f"parameter {slot.name} is written in place in a forward{at}, and ranks have written different values to "
            "the same elements: make the values equal on all ranks (torch.distributed.all_reduce what they are "
            "computed of), or keep them in a buffer"
        )
    merged = torch.where(is_changed, values, torch.where(written.bool(), highs, olds))
    return (torch.view_as_complex(merged.contiguous()) if full.is_complex() else merged).to(full.dtype)


def _as_reals(*values: Tensor) -> list[Tensor]:
    return [torch.view_as_real(value) if value.is_complex() else value for value in values]
