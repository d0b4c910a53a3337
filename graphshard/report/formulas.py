"""What a training step costs as sympy expressions, and what follows from solving them.

Bytes are exact. Times are the roofline of :mod:`graphshard.cost.compute` with every kernel in the regime
(bound by arithmetic or by memory) and at the efficiency it has at the reference point, and rings of
:mod:`graphshard.cost.links` for collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """Expressions of one model; every symbol is a positive whole number.

    Attributes:
        symbols: by name: the dynamic dims, then the mesh axes "shard" and "replicate".
        reference: sizes of all of them at which graphs and regimes were taken.
        memory: bytes of a rank. In the mesh axes: "parameters", "gradients", "optimizer"; in the dynamic
            dims: "inputs", "activations" (what the forward keeps for the backward); "gathered" is what
            the forward leaves gathered, and "largest unit" a whole unit in the dtype of the gathers.
        peak: bytes of a rank at the peak of the step on the reference mesh, in the dynamic dims: the
            largest of the moments that can be the peak.
        traffic: bytes of all collectives of a step by kind, in the mesh axes; of each the larger of what
            a rank sends and what it receives.
        seconds: "forward compute", "backward compute" and "optimizer", "forward communication" and
            "backward communication", and "step": each half as long as the longer of its two.
        checked: points at which another capture agreed to the byte.
        solutions: what was solved, by question; None where nothing up to the limit of the search answers.
        notes: what the expressions leave out.
    """

    symbols: Mapping[str, sympy.Symbol]
    reference: Mapping[str, int]
    memory: Mapping[str, sympy.Expr]
    peak: sympy.Expr
    traffic: Mapping[str, sympy.Expr]
    seconds: Mapping[str, sympy.Expr]
    checked: tuple[Mapping[str, int], ...]
    solutions: Mapping[str, int | None]
    notes: tuple[str, ...]

    def value(self, expression: sympy.Expr, **sizes: int) -> float | int:
        """An expression at a point: an int for bytes, a float for seconds.

        Args:
            expression: one of these.
            sizes: of symbols by name; the others are as at the reference.
        """
        point = {self.symbols[name]: size for name, size in (dict(self.reference) | sizes).items()}
        found = expression.subs(point).doit()
        return int(found) if found.is_Integer else float(found)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, expressions as text that sympy reads back."""
        texts = {name: {what: str(one) for what, one in getattr(self, name).items()}
                 for name in ("memory", "traffic", "seconds")}  # fmt: skip
        return {
            "symbols": list(self.symbols),
            "reference": dict(self.reference),
            **texts,
            "peak": str(self.peak),
            "checked": [dict(point) for point in self.checked],
            "solutions": dict(self.solutions),
            "notes": list(self.notes),
        }


#: How the step is put together; the expression itself repeats its parts.
_STEP = (
    "optimizer + micro-batches * (Max(forward compute, forward communication) + "
    "Max(backward compute, backward communication))"
)


def formulas_text(formulas: Formulas) -> str:
    """The expressions, one a line, for people and for diff."""
    return "\n".join(_lines(formulas)) + "\n"


def _lines(formulas: Formulas) -> Iterator[str]:
    reference = ", ".join(f"{name}={size}" for name, size in formulas.reference.items())
    yield f"reference: {reference}"
    for title, expressions in (
        ("Bytes of a rank", formulas.memory),
        ("Bytes of collectives in a step", formulas.traffic),
        ("Seconds", formulas.seconds),
    ):
        yield f"\n{title}"
        for name, one in expressions.items():
            text = _STEP if name == "step" else sympy.sstr(one.evalf(6) if title == "Seconds" else one)
            yield f"  {name} = {text}"
    yield "\nBytes of a rank at the peak, on the reference mesh: the largest of"
    yield from (f"  {sympy.sstr(one)}" for one in moments_of(formulas.peak))
    yield "\nSolved"
    for question, answer in formulas.solutions.items():
        yield f"  {question}: {'none' if answer is None else answer}"
    yield ""
    for point in formulas.checked:
        sizes = ", ".join(f"{name}={size}" for name, size in point.items())
        yield f"checked to the byte against a capture with {sizes}"
    yield from formulas.notes


def moments_of(peak: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """The expressions among which a peak is the largest."""
    return tuple(peak.args) if isinstance(peak, sympy.Max) else (peak,)
