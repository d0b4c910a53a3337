"""How much of a collective passes while the one in front of it in its group still moves, from measured sizes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlapRows:
    """Overlapped seconds by the seconds of a collective alone: linear in between, their last ratio above.

    Neither what overlaps nor what is left of the collective falls where it takes longer, as planners need it
    (:meth:`graphshard.cost.prices.Prices.overlapped_seconds`).

    Attributes:
        rows: (seconds, overlapped seconds), from (0, 0) on, seconds rising.
    """

    rows: tuple[tuple[float, float], ...]

    @staticmethod
    def of(measured: Iterable[tuple[int, float, float]]) -> OverlapRows:
        """From rows of (bytes, seconds, overlapped seconds), at least one.

        A size that is no slower than a smaller one says nothing; one that overlaps by less than a smaller one, or that
        has less left, counts as that one.
        """
        rows = [(0.0, 0.0)]
        for _, seconds, overlapped in sorted(measured):
            longest, most = rows[-1]
            if seconds > longest:
                rows.append((seconds, min(max(overlapped, most), most + seconds - longest)))
        return OverlapRows(tuple(rows))

    def overlapped(self, seconds: float) -> float:
        """Of a collective that takes so many seconds alone; never more than those."""
        index = bisect.bisect_right(self.rows, seconds, key=lambda row: row[0])
        if index == len(self.rows):
            longest, most = self.rows[-1]
            return most * (seconds / longest)
        (x0, y0), (x1, y1) = self.rows[index - 1 : index + 1]
        return y0 + (y1 - y0) * ((seconds - x0) / (x1 - x0))
