"""Bytes of shards and collectives as expressions in the mesh axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy
import torch
from torch import nn

from ...capture import CapturedStep
from ...ir import REDUCE_GRAD, UNSHARD, ReduceGradCall, UnshardCall
from .links import Traffic
from .sampling import Sample


def _pieces(rows: Mapping[int, int], num_shards: sympy.Symbol) -> sympy.Expr:
    """Bytes of padded shards; ``rows`` maps a number of rows to the bytes of all rows of such parameters."""
    return sympy.Add(*(row_bytes * sympy.ceiling(sympy.Integer(num_rows) / num_shards)
                       for num_rows, row_bytes in sorted(rows.items())))  # fmt: skip


def shard_bytes(module: nn.Module, captured: CapturedStep, num_shards: sympy.Symbol) -> dict[str, sympy.Expr]:
    """Bytes of the shards of all parameters, of trained parameters, and of their gradients; placements cut first."""
    calls = [ReduceGradCall(*node.args)
             for node in captured.backward.graph.find_nodes(op="call_function", target=REDUCE_GRAD)]  # fmt: skip
    trained = {call.name: call.dtype.itemsize for call in calls}
    rows: dict[str, dict[int, int]] = {"parameters": {}, "trained": {}, "gradients": {}}
    for name, param in module.named_parameters():
        shape = captured.pieces.get(name, param.shape)
        num_rows = shape[0] if param.dim() else 1
        row_elements = math.prod(shape) // max(num_rows, 1)
        itemsizes = {"parameters": param.element_size()}
        if name in trained:
            itemsizes |= {"trained": param.element_size(), "gradients": trained[name]}
        for what, itemsize in itemsizes.items():
            rows[what][num_rows] = rows[what].get(num_rows, 0) + row_elements * itemsize
    return {what: _pieces(of_rows, num_shards) for what, of_rows in rows.items()}


def largest_unit(captured: CapturedStep) -> int:
    """Bytes of the largest gathered unit."""
    full: dict[str, dict[str, int]] = {}
    for node in captured.forward.graph.find_nodes(op="call_function", target=UNSHARD):
        call, value = UnshardCall(*node.args), node.meta["val"]
        full.setdefault(call.unit, {})[call.name] = value.numel() * value.element_size()
    return max((sum(of_unit.values()) for of_unit in full.values()), default=0)


def traffic_expressions(
    captured: CapturedStep, sample: Sample, num_shards: sympy.Symbol, num_replicas: sympy.Symbol | None
) -> dict[tuple[str, str], Traffic]:
    """The collectives of each half in one micro-batch, by kind."""
    gathered: dict[str, dict[int, int]] = {"forward": {}, "backward": {}}
    reduced: dict[int, int] = {}
    for half, gm in (("forward", captured.forward), ("backward", captured.backward)):
        for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
            _add_rows(gathered[half], node.meta["val"])
    for node in captured.backward.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        reduction = ReduceGradCall(*node.args)
        gradient = reduction.grad.meta["val"]
        _add_rows(reduced, gradient, reduction.reduce_dtype)
    found = {}
    for half, kind, num_bytes in (
        ("forward", "all_gather", num_shards * _pieces(gathered["forward"], num_shards)),
        ("backward", "all_gather", num_shards * _pieces(gathered["backward"], num_shards)),
        ("backward", "reduce_scatter", num_shards * _pieces(reduced, num_shards)),
    ):
        _, count = sample.traffic.get((half, kind), (0, 0))
        if num_bytes:
            found[half, kind] = Traffic(kind=kind, num_bytes=num_bytes, count=count, ranks=num_shards)
    if reduced and num_replicas is not None:
        _, count = sample.traffic["backward", "reduce_scatter"]
        found["backward", "all_reduce"] = Traffic(
            kind="all_reduce", num_bytes=_pieces(reduced, num_shards), count=count, ranks=num_replicas
        )
    return found


def _add_rows(rows: dict[int, int], full: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    num_rows = full.shape[0]
    row_bytes = full.numel() // max(num_rows, 1) * (dtype or full.dtype).itemsize
    rows[num_rows] = rows.get(num_rows, 0) + row_bytes


def moves_expressions(
    moved: Mapping[tuple[str, str], sympy.Expr], sample: Sample, size: int
) -> dict[tuple[str, str], Traffic]:
    """The reshards over the further axis of the mesh in one micro-batch, by half and kind.

    Args:
        moved: their bytes.
        sample: has their numbers.
        size: ranks of the axis.
    """
    ranks = sympy.Integer(size)
    return {
        (half, kind): Traffic(kind=kind, num_bytes=num_bytes, count=sample.moved[half, kind][1], ranks=ranks)
        for (half, kind), num_bytes in moved.items()
    }


def by_kind(traffic: Mapping[tuple[str, str], Traffic]) -> dict[str, sympy.Expr]:
    """Bytes by kind, summed over both halves; none on an axis of one rank."""
    found: dict[str, sympy.Expr] = {}
    for (_, kind), one in traffic.items():
        found[kind] = found.get(kind, sympy.Integer(0)) + one.num_bytes
    ranks = {kind: one.ranks for (_, kind), one in traffic.items()}
    return {kind: num_bytes * sympy.Min(1, ranks[kind] - 1) for kind, num_bytes in found.items()}
