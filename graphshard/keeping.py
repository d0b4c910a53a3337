"""Which units keep their gathered parameters between forward and backward, within one memory budget.

Keeping a unit's parameters saves its gather in the backward and holds them in between. What a choice
costs is measured by planning both halves with it. A unit that runs later in the forward is needed
sooner in the backward, so its parameters are held for less time: the choices are the runs of last
units, from none (every unit reshards) to all of them, and the default. Since those three are always
among them, what is chosen is no slower than any of the three that keeps the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .planner.plan import InfeasibleBudgetError

#: Up to so many units every run of last units is tried; of more, those on the way to the longest that fits.
_TRY_ALL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingCost:
    """Forward and backward with some units kept.

    Attributes:
        seconds: of both.
        peak_bytes: the larger peak of the two.
    """

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingChoice:
    """Units that keep their parameters, with their cost and that of every choice that was tried.

    Attributes:
        units: labels, in the order of their first use.
        cost: of this choice.
        tried: each choice with its cost; None where no plan keeps the budget.
    """

    units: tuple[str, ...]
    cost: KeepingCost
    tried: tuple[tuple[tuple[str, ...], KeepingCost | None], ...]


def choose_kept(
    units: Sequence[str],
    default: Sequence[str],
    evaluate: Callable[[tuple[str, ...]], KeepingCost],
) -> KeepingChoice:
    """The fastest choice that keeps the budget; among equally fast ones that with the lowest peak.

    Args:
        units: labels of the units that may be kept, in the order of their first use.
        default: those that are kept if nothing is chosen.
        evaluate: cost of a choice; raises ``InfeasibleBudgetError`` where no plan keeps the budget.

    Raises:
        InfeasibleBudgetError: no choice keeps the budget; names the smallest one found.
    """
    tried: dict[tuple[str, ...], KeepingCost | None] = {}
    refused: list[InfeasibleBudgetError] = []

    def fits(kept: tuple[str, ...]) -> bool:
        if kept not in tried:
            try:
                tried[kept] = evaluate(kept)
            except InfeasibleBudgetError as error:
                refused.append(error)
                tried[kept] = None
        return tried[kept] is not None

    def last(count: int) -> tuple[str, ...]:
        return tuple(units[len(units) - count :])

    fits(last(0))
    fits(tuple(unit for unit in units if unit in default))
    if len(units) <= _TRY_ALL:
        for count in range(1, len(units) + 1):
            fits(last(count))
    elif not fits(last(len(units))):
        shortest, longest = 0, len(units)
        while longest - shortest > 1:
            middle = (shortest + longest) // 2
            shortest, longest = (middle, longest) if fits(last(middle)) else (shortest, middle)
    found = [(cost, kept) for kept, cost in tried.items() if cost is not None]
    if not found:
        raise min(refused, key=lambda error: error.smallest_bytes)
    cost, kept = min(found, key=lambda one: (float(f"{one[0].seconds:.9g}"), one[0].peak_bytes, len(one[1])))
    return KeepingChoice(units=kept, cost=cost, tried=tuple(tried.items()))
