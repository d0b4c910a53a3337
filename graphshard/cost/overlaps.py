"""The part of a collective that overlaps with the previous one of its group, interpolated from measured sizes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlapRows:
    """Overlapped seconds as a function of the seconds of a collective alone.

    The function is linear between rows and keeps the last ratio above them. Neither the overlapped part nor the rest
    falls when the time grows, as planners need it (:meth:`graphshard.cost.prices.Prices.overlapped_seconds`).

    Attributes:
        rows: (seconds, overlapped seconds), from (0, 0) on, seconds rising.
    """

    rows: tuple[tuple[float, float], ...]

    @staticmethod
    def of(measured: Iterable[tuple[int, float, float]]) -> OverlapRows:
        """Makes the function of measured rows (bytes, seconds, overlapped seconds), at least one.

        A size that is no slower than a smaller one is dropped as noise. A size whose overlapped part, or whose rest, is
        less than that of a smaller one gets the part, or the rest, of the smaller one.
        """
        rows = [(0.0, 0.0)]
        for _, seconds, overlapped in sorted(measured):
            longest, most = rows[-1]
            if seconds > longest:
                rows.append((seconds, min(max(overlapped, most), most + seconds - longest)))
        return OverlapRows(tuple(rows))

    def overlapped(self, seconds: float) -> float:
        """The overlapped seconds of a collective that takes ``seconds`` alone; at most ``seconds``."""
        index = bisect.bisect_right(self.rows, seconds, key=lambda row: row[0])
        if index == len(self.rows):
            longest, most = self.rows[-1]
            return most * (seconds / longest)
        (x0, y0), (x1, y1) = self.rows[index - 1 : index + 1]
        return y0 + (y1 - y0) * ((seconds - x0) / (x1 - x0))
