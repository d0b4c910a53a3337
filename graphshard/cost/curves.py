"""A number that depends on a size, such as an efficiency: a small matrix product reaches less of the peak.

A curve is rows of (size, value), interpolated over the logarithm of the size.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear in log(size), constant outside of its rows.

    Attributes:
        rows: (size, value), sizes positive and rising; one row is a constant.
    """

    rows: tuple[tuple[float, float], ...]

    @staticmethod
    def constant(value: float) -> Curve:
        """A curve with one value at every size."""
        return Curve(((1.0, value),))

    def at(self, size: float) -> float:
        """The value at a size; a size of 0 has the value of the first row."""
        index = bisect.bisect_right(self.rows, size, key=lambda row: row[0])
        if index == 0:
            return self.rows[0][1]
        if index == len(self.rows):
            return self.rows[-1][1]
        (x0, y0), (x1, y1) = self.rows[index - 1 : index + 1]
        return y0 + (y1 - y0) * math.log(size / x0) / math.log(x1 / x0)

    def problems(self) -> list[str]:
        """Mistakes in the rows, as sentences without a subject; empty if there are none."""
        if not self.rows:
            return ["has no rows"]
        sizes = [size for size, _ in self.rows]
        found = []
        if not all(math.isfinite(size) and size > 0 for size in sizes):
            found.append("has a size that is not a positive number")
        if any(after <= before for before, after in itertools.pairwise(sizes)):
            found.append("has sizes that do not rise")
        return found
