"""Graphs at sizes that were not captured: each whole number in them follows from a few captures.

A number of a graph is taken as a product with one factor for each dim: a power of the size, or a linear function of it.
One further capture for each dim determines the factors. They are used only if captures at other points agree in every
number. A graph made so takes a tenth of the time of a capture.

Does not handle: numbers that are no such products, such as sizes padded to a multiple; nothing is interpolated then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...capture import CapturedStep, StepNumbers, step_with_numbers

#: Sizes of the dims.
Point = tuple[int, ...]

#: The highest power of a size in a number: that of a mask over pairs of positions.
_HIGHEST_POWER = 2


@dataclass(frozen=True, slots=True)
class _Factor:
    """How a number changes with one dim: ``power`` of the size, or else by ``slope`` for each step of the size."""

    power: int | None
    slope: Fraction

    def at(self, size: int, reference: int) -> Fraction:
        """The number at a size, over the number at the reference."""
        if self.power is not None:
            return Fraction(size, reference) ** self.power
        return 1 + self.slope * (size - reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNumbers:
    """The whole numbers of the halves of a step as functions of the dims.

    Attributes:
        reference: the point at which ``values`` were captured.
        structure: the fingerprint of everything else in the graphs.
        values: the distinct kinds of numbers: the number at the reference, and a factor for each dim.
        places: for each number, in the order of the graphs, the index of its kind.
    """

    reference: Point
    structure: str
    values: tuple[tuple[int, tuple[_Factor, ...]], ...]
    places: tuple[int, ...]

    @staticmethod
    def through(reference: Point, found: Mapping[Point, StepNumbers | None]) -> GraphNumbers | None:
        """The functions through captures at the reference and at one point for each dim, with another size there.

        None if the graphs differ in more than numbers, or a number of 0 changes.
        """
        known = [one for one in found.values() if one is not None]
        if len(known) < len(found) or len({one.structure for one in known}) != 1:
            return None
        first = found[reference]
        assert first is not None
        others = [point for point in found if point != reference]
        columns = list(
            zip(*(one.numbers for one in (first, *(found[point] for point in others)) if one), strict=True)
        )
        kinds = {column: index for index, column in enumerate(dict.fromkeys(columns))}
        values = []
        for start, *ends in kinds:
            if start == 0 and any(ends):
                return None
            factors = map(_factor, [start] * len(ends), ends, reference, _axis_sizes(reference, others))
            values.append((start, tuple(factors)))
        return GraphNumbers(
            reference=reference,
            structure=first.structure,
            values=tuple(values),
            places=tuple(kinds[column] for column in columns),
        )

    def at(self, point: Point) -> list[int] | None:
        """The numbers at a point; None if one is not whole there."""
        found = []
        for start, factors in self.values:
            value = Fraction(start)
            for factor, size, reference in zip(factors, point, self.reference, strict=True):
                value *= factor.at(size, reference)
            if value.denominator != 1:
                return None
            found.append(int(value))
        return [found[place] for place in self.places]

    def agrees(self, point: Point, captured: StepNumbers | None) -> bool:
        """Whether a capture at a point has this structure and these numbers."""
        if captured is None or captured.structure != self.structure:
            return False
        return self.at(point) == list(captured.numbers)

    def step(self, captured: CapturedStep, point: Point) -> CapturedStep | None:
        """The halves of a captured step with the numbers at a point; None if an op does not give these shapes."""
        numbers = self.at(point)
        return None if numbers is None else step_with_numbers(captured, numbers, with_joint=False)


def _axis_sizes(reference: Point, others: Sequence[Point]) -> list[int]:
    """For each dim its size in the point that differs from the reference there."""
    assert all(
        [size != same for size, same in zip(point, reference, strict=True)].index(True) == dim
        for dim, point in enumerate(others)
    )
    return [point[dim] for dim, point in enumerate(others)]


def _factor(start: int, end: int, reference: int, size: int) -> _Factor:
    if start == end:
        return _Factor(0, Fraction())
    ratio = Fraction(end, start)
    for power in range(1, _HIGHEST_POWER + 1):
        if ratio == Fraction(size, reference) ** power:
            return _Factor(power, Fraction())
    return _Factor(None, (ratio - 1) / (size - reference))
