"""The parts of a report about placements on a further mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.tensor import Shard

from ..capture import CapturedStep
from ..ir import REPLICATE, placement_text
from ..report import HalfReport, PlacedParameters, ReshardCount


def placed_parameters(module: nn.Module, captured: CapturedStep) -> tuple[PlacedParameters, ...]:
    """Where the parameters of a model lie on the axis of placements; nothing without one.

    Args:
        module: the model.
        captured: its captured step.
    """
    if captured.placed is None:
        return ()
    found: dict[tuple[str, str, tuple[int, ...]], PlacedParameters] = {}
    for name, param in module.named_parameters():
        placement = captured.placed.stated.parameters.get(name)
        is_cut = isinstance(placement, Shard)
        text = placement_text(Shard(placement.dim % param.ndim)) if is_cut else REPLICATE  # type: ignore[union-attr]
        shape = tuple(param.shape)
        key = (_folded(name), text, shape)
        one = PlacedParameters(
            name=key[0], count=0, placement=text, shape=shape, piece=captured.pieces.get(name, shape)
        )
        found[key] = replace(one, count=found.get(key, one).count + 1)
    return tuple(found.values())


def reshard_counts(halves: Sequence[HalfReport]) -> tuple[ReshardCount, ...]:
    """The reshards of a step that communicate, those with the most bytes first."""
    found: dict[tuple[str, str, str, str, str, int], ReshardCount] = {}
    for half in halves:
        for one in half.collectives:
            if not one.reshard:
                continue
            key = (half.name, one.reshard, _folded(one.module), one.kind, one.group, one.num_bytes)
            known = found.get(key)
            found[key] = ReshardCount(
                half=half.name, reshard=one.reshard, module=key[2], kind=one.kind, group=one.group,
                num_bytes=one.num_bytes, count=half.repeats + (known.count if known else 0), seconds=one.seconds,
                exposed_seconds=half.repeats * one.exposed_seconds + (known.exposed_seconds if known else 0.0),
            )  # fmt: skip
    return tuple(sorted(found.values(), key=lambda one: -one.num_bytes * one.count))


def _folded(path: str) -> str:
    """A path with "*" for numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
