"""A plan as ranks exchange it: positions and indices, no names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """The plan another rank made of this graph; only sizes of activations may differ there.

    Attributes:
        num_tasks: pieces of compute between which its collectives stand.
        steps: position among the tasks, whether it is a start (else a wait), and the collectives, by
            their index in the graph, that are one bucket.
        splits: collectives, by their index in the graph, that are split first, and into how many parts.
        moves: compute that moves before that: see :class:`graphshard.planner.move_compute.Move`.
    """

    num_tasks: int
    steps: tuple[tuple[int, bool, tuple[int, ...]], ...]
    splits: tuple[tuple[int, int], ...] = ()
    moves: tuple[tuple[int, str, int, tuple[int, ...]], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> KnownPlan:
        """Reads :meth:`to_dict` back."""
        steps = tuple((position, is_start, tuple(members)) for position, is_start, members in data["steps"])
        splits = tuple((index, num_parts) for index, num_parts in data["splits"])
        moves = tuple((flight, op, number, tuple(carried)) for flight, op, number, carried in data["moves"])
        return KnownPlan(num_tasks=data["num_tasks"], steps=steps, splits=splits, moves=moves)
