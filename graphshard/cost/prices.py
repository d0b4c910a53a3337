"""What a planner asks of a cost model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import fx


class Prices(Protocol):
    """The part of a cost model that depends on sizes alone."""

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds of one collective.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
            num_bytes: the larger of its input and its output.
            group: name of its process group.
        """
        ...

    def overlapped_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds of one collective that pass while the one in front of it on its group still moves.

        A backend that has several under way at a time hides latency so; one that runs them one after the
        other does not: 0. Never more than :meth:`collective_seconds`; neither this nor what is left of those may
        fall when bytes grow.
        """
        ...

    def spread_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """By how much one collective may end sooner or later than :meth:`collective_seconds` says; arguments as above.

        0 where each takes as long as the other; see :func:`behind_wait`. It may not fall when bytes grow.
        """
        ...

    def core_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds of compute that one collective takes for itself, wherever it runs; arguments as above.

        A backend that starts and moves on the core that computes has some; one with its own queue has none.
        One large collective must not take more than two with as many bytes together.
        """
        ...

    def copy_seconds(self, num_bytes: int) -> float:
        """Seconds in which the device copies ``num_bytes`` from one buffer to another."""
        ...


def behind_wait(clock: float, finish: float, spread: float) -> float:
    """When compute goes on that arrives at ``clock`` at the wait for a collective: the expected time.

    The collective ends at any moment within ``spread`` of ``finish``, each as likely as the other, so that
    compute which arrives a little later than ``finish`` still waits at times. A later ``clock`` or ``finish`` never
    gives a sooner result, and the result is never before either. All arguments are seconds, ``spread`` not negative.
    """
    if clock >= finish + spread:
        return clock
    if clock <= finish - spread:
        return finish
    return clock + (finish + spread - clock) ** 2 / (4 * spread)


class GraphPrices(Prices, Protocol):
    """Prices of everything in a graph."""

    def compute_seconds(self, gm: fx.GraphModule) -> Mapping[fx.Node, float]:
        """Seconds of each node that computes; nodes left out cost nothing."""
        ...
