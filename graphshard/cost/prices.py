"""The interface of a cost model that the planner uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import fx


class Prices(Protocol):
    """Prices that depend on sizes alone."""

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds of one collective.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
            num_bytes: the larger of its input and its output.
            group: name of its process group.
        """
        ...

    def overlapped_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds of one collective that pass while the previous one of its group still moves.

        A backend that runs several at a time hides latency this way; one that runs them one after the other has 0. At
        most :meth:`collective_seconds`. Neither this part nor the rest may fall when bytes grow.
        """
        ...

    def spread_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds by which one collective may end before or after :meth:`collective_seconds`; arguments as above.

        0 if its time does not vary; see :func:`behind_wait`. It may not fall when bytes grow.
        """
        ...

    def core_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds that one collective takes from the core that computes; arguments as above.

        A backend with a queue of its own takes none. One large collective must not take more than two smaller ones with
        the same bytes together.
        """
        ...

    def copy_seconds(self, num_bytes: int) -> float:
        """Seconds in which the device copies ``num_bytes`` between two buffers."""
        ...


def behind_wait(clock: float, finish: float, spread: float) -> float:
    """The expected time at which compute continues after a wait that it reaches at ``clock``.

    The collective ends uniformly within ``spread`` of ``finish``, so compute that arrives a little after ``finish`` may
    still wait. The result is at least ``clock`` and at least ``finish``, and never falls when either grows. All
    arguments are seconds; ``spread`` is not negative.
    """
    if clock >= finish + spread:
        return clock
    if clock <= finish - spread:
        return finish
    return clock + (finish + spread - clock) ** 2 / (4 * spread)


class GraphPrices(Prices, Protocol):
    """Prices of everything in a graph."""

    def compute_seconds(self, gm: fx.GraphModule) -> Mapping[fx.Node, float]:
        """Seconds of each node that computes; missing nodes cost nothing."""
        ...
