"""Exact polynomials through measured whole numbers.

Bytes and operations of one graph are polynomials in its dynamic dims. One measurement for each monomial determines the
coefficients, in rational arithmetic without rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import sympy

#: Exponents of the dims in one monomial.
Monomial = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Monomials, and the points at which a polynomial of them is measured.

    Attributes:
        monomials: for each monomial the exponents of the dims.
        points: sizes of the dims, on a grid: as many points as monomials.
    """

    monomials: tuple[Monomial, ...]
    points: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_degrees(degrees: Sequence[int], sizes: Sequence[Sequence[int]]) -> Basis:
        """All monomials up to a degree in each dim, on a grid of the first sizes of each dim."""
        grid = [sizes[dim][: degree + 1] for dim, degree in enumerate(degrees)]
        assert all(len(set(row)) == degree + 1 for row, degree in zip(grid, degrees, strict=True))
        return Basis(
            monomials=tuple(itertools.product(*(range(degree + 1) for degree in degrees))),
            points=tuple(itertools.product(*grid)),
        )

    def row(self, point: Sequence[int]) -> list[int]:
        """The monomials at a point."""
        found = []
        for exponents in self.monomials:
            value = 1
            for size, exponent in zip(point, exponents, strict=True):
                value *= size**exponent
            found.append(value)
        return found

    def solver(self) -> list[list[Fraction]]:
        """The matrix that maps values at the points to coefficients."""
        inverse = sympy.Matrix([self.row(point) for point in self.points]).inv()
        size = len(self.points)
        return [
            [Fraction(int(inverse[i, j].p), int(inverse[i, j].q)) for j in range(size)] for i in range(size)
        ]


def fit(basis: Basis, values: Mapping[tuple[int, ...], Sequence[int]]) -> list[tuple[Fraction, ...]]:
    """Coefficients of polynomials with given values at the points of the basis.

    Args:
        basis: monomials and points.
        values: for each point the values of all polynomials, in one order.
    """
    solver = basis.solver()
    columns = zip(*(values[point] for point in basis.points), strict=True)
    known: dict[tuple[int, ...], tuple[Fraction, ...]] = {}
    found = []
    for column in columns:
        if column not in known:
            known[column] = tuple(
                sum((a * b for a, b in zip(row, column, strict=True)), Fraction()) for row in solver
            )
        found.append(known[column])
    return found


def value_at(basis: Basis, coefficients: Sequence[Fraction], point: Sequence[int]) -> Fraction:
    """The value of a polynomial at a point."""
    return sum((a * b for a, b in zip(coefficients, basis.row(point), strict=True)), Fraction())


def expression(basis: Basis, coefficients: Sequence[Fraction], symbols: Sequence[sympy.Symbol]) -> sympy.Expr:
    """The polynomial with symbols for the dims."""
    terms = []
    for exponents, value in zip(basis.monomials, coefficients, strict=True):
        powers = (symbol**exponent for symbol, exponent in zip(symbols, exponents, strict=True))
        terms.append(sympy.Mul(sympy.Rational(value.numerator, value.denominator), *powers))
    return sympy.Add(*terms)


def undominated(polynomials: Sequence[tuple[Fraction, ...]]) -> list[tuple[Fraction, ...]]:
    """The polynomials that can be the largest somewhere: no other one has every coefficient as large."""
    found: list[tuple[Fraction, ...]] = []
    for one in sorted(set(polynomials), reverse=True):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in found):
            found.append(one)
    return found
