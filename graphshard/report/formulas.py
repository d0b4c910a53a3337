"""The cost of a training step as sympy expressions, and solutions of questions about them.

Bytes are exact. Compute time is the roofline of :mod:`graphshard.cost.compute`, with the regime (bound by arithmetic or
by memory) and the efficiency that each kernel has at the reference point. Collectives are rings of
:mod:`graphshard.cost.links`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from ..errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """Expressions of one model; every symbol is a positive whole number.

    Attributes:
        symbols: symbols by name: the dynamic dims, then the mesh axes "shard" and "replicate". A further axis of the
            mesh has no symbol; its size is that of the reference.
        reference: the sizes of dims and mesh axes at which graphs and regimes were taken.
        memory: bytes of a rank. In the mesh axes: "parameters", "gradients", "optimizer". In the dynamic dims:
            "inputs", "activations" (saved for the backward). "gathered" is what the forward leaves gathered, and
            "largest unit" a whole unit in the dtype of the gathers.
        peak: bytes of a rank at the peak of the step on the reference mesh, in the dynamic dims: the maximum over the
            moments that can be the peak.
        traffic: bytes of all collectives of a step by kind, in the mesh axes; a collective counts with the larger of
            input and output. "all_reduce of reshards" and the like are those over the further axis, in the dims.
        seconds: "forward compute", "backward compute", "optimizer", "forward communication", "backward communication",
            and "step", in which a half takes the longer of its compute and its communication. With several
            micro-batches also "accumulation": adding the gradients of one of them to those before. With a further axis
            also "forward reshards" and "backward reshards", which are added to compute.
        communication: the seconds of communication in lines for people: a formula for each kind of collective, with
            four digits, and the sums of them.
        checked: points at which another capture agreed to the byte.
        solutions: solutions by question; None if no size up to the limit of the search is one.
        notes: what the expressions leave out.
    """

    symbols: Mapping[str, sympy.Symbol]
    reference: Mapping[str, int]
    memory: Mapping[str, sympy.Expr]
    peak: sympy.Expr
    traffic: Mapping[str, sympy.Expr]
    seconds: Mapping[str, sympy.Expr]
    communication: tuple[str, ...]
    checked: tuple[Mapping[str, int], ...]
    solutions: Mapping[str, int | None]
    notes: tuple[str, ...]

    def value(self, expression: sympy.Expr, **sizes: int) -> float | int:
        """The value of an expression: an int for bytes, a float for seconds.

        Args:
            expression: one of the expressions here.
            sizes: sizes of symbols by name; other symbols have their reference sizes.

        Raises:
            OptionError: a name is no symbol.
        """
        if unknown := sorted(set(sizes) - set(self.symbols)):
            raise OptionError(
                f"{', '.join(unknown)}: the expressions have no such symbol, but {', '.join(self.symbols)}; "
                "make formulas on a mesh with another size of this axis"
            )
        at = {name: size for name, size in self.reference.items() if name in self.symbols} | sizes
        # All at once, as numbers: `subs` would take one after the other, and compare what is left at each.
        point = {self.symbols[name]: sympy.Integer(size) for name, size in at.items()}
        found = expression.xreplace(point).doit()
        return int(found) if found.is_Integer else float(found)

    def to_dict(self) -> dict[str, Any]:
        """The formulas as JSON values; expressions are texts that sympy reads back."""
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


#: The composition of the step; its expression would repeat the parts.
_STEP = (
    "optimizer + micro-batches * (Max(forward compute, forward communication) + "
    "Max(backward compute, backward communication){accumulation})"
)


def formulas_text(formulas: Formulas) -> str:
    """The expressions as text, one a line."""
    return "\n".join(_lines(formulas)) + "\n"


def _lines(formulas: Formulas) -> Iterator[str]:
    reference = ", ".join(f"{name}={size}" for name, size in formulas.reference.items())
    step = _STEP.format(accumulation=" + accumulation" if "accumulation" in formulas.seconds else "")
    if "forward reshards" in formulas.seconds:
        step = step.replace("forward compute", "forward compute + forward reshards")
        step = step.replace("backward compute", "backward compute + backward reshards")
    yield f"reference: {reference}"
    for title, expressions in (
        ("Bytes of a rank", formulas.memory),
        ("Bytes of collectives in a step", formulas.traffic),
        ("Seconds", formulas.seconds),
    ):
        yield f"\n{title}"
        for name, one in expressions.items():
            if name.endswith((" communication", " reshards")):
                continue
            text = step if name == "step" else sympy.sstr(one.evalf(6) if title == "Seconds" else one)
            yield f"  {name} = {text}"
    yield "\nSeconds of communication"
    yield from (f"  {line}" for line in formulas.communication)
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
    """The expressions whose maximum is the peak."""
    return tuple(peak.args) if isinstance(peak, sympy.Max) else (peak,)
