"""A value of a graph, and what each rank holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.tensor import Placement, Replicate

from .._compat_dtensor import Placed
from ..ir import size_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedValue:
    """A value of the program that every rank of an axis runs, and what this rank holds of it.

    Attributes:
        node: what this rank holds; one tensor, or a tuple of them.
        placement: of that; a tuple of placements (None for what is no tensor) for a tuple.
        whole: the fake value of the program, with sizes of whole tensors.
        is_local: the program itself works with pieces: ``placement`` is what the program says, and must stay.
    """

    node: fx.Node
    placement: Any
    whole: Any
    is_local: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        placements = self.placement if isinstance(self.placement, (tuple, list)) else (self.placement,)
        return all(each is None or isinstance(each, Replicate) for each in placements)

    def as_placed(self, placement: Placement | None = None) -> Placed:
        """The value as DTensor's rules see it, in its own or another placement. Symbolic sizes count with a hint."""
        return Placed(
            placement=self.placement if placement is None else placement,
            shape=_hints(self.whole.shape),
            stride=_hints(self.whole.stride()),
            dtype=self.whole.dtype,
        )


def _hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size_hint(size) for size in sizes)
