"""Which units keep their gathered parameters between forward and backward, within one memory budget.

A unit that keeps its parameters saves its gather in the backward, and holds the parameters in between. The cost of a
choice is measured: both halves are planned with it. A unit that is read last in the forward is needed first in the
backward, so it holds its parameters for the shortest time. The choices are therefore the runs of last units, from
none (every unit reshards) to all of them, and the default. None, all and the default are always tried, so the result
is no slower than any of the three that keeps the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InfeasibleBudgetError
from ...progress import TimeLimit

#: Up to so many units, every run of last units is tried. Of more, bisection tries those on the way to the longest
#: that fits.
_TRY_ALL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingCost:
    """The cost of forward and backward with some units kept.

    Attributes:
        seconds: of both.
        peak_bytes: the larger peak of the two.
        plans: the plans that take so long, as another plan can start from them; () if they are not kept.
    """

    seconds: float
    peak_bytes: int
    plans: tuple[Any, ...] = ()

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key, lower is better: time, then memory."""
        return float(f"{self.seconds:.9g}"), self.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingChoice:
    """Units that keep their parameters, with their cost and that of every choice that was tried.

    Attributes:
        units: labels, in the order of their last use.
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
    limit: TimeLimit | None = None,
) -> KeepingChoice:
    """The fastest choice that keeps the budget; among equally fast ones, the one with the lowest peak.

    Args:
        units: labels of the units that may be kept, in the order of their last use.
        default: the units that are kept if nothing is chosen.
        evaluate: the cost of a choice; raises ``InfeasibleBudgetError`` where no plan keeps the budget.
        limit: behind it, no further choice is tried if one keeps the budget.

    Raises:
        InfeasibleBudgetError: no choice keeps the budget; names the smallest budget found that is kept.
    """
    tried: dict[tuple[str, ...], KeepingCost | None] = {}
    refused: list[InfeasibleBudgetError] = []

    limit = limit or TimeLimit()

    def fits(kept: tuple[str, ...]) -> bool:
        if kept not in tried:
            if any(tried.values()) and limit.is_over():
                return False
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
    cost, kept = min(found, key=lambda one: (one[0].rank, len(one[1])))
    return KeepingChoice(units=kept, cost=cost, tried=tuple(tried.items()))


#: See :func:`extend_kept`.
FOR_OTHERS = 2 / 3


def extend_kept(
    units: Sequence[str],
    default: Sequence[str],
    evaluate: Callable[[tuple[str, ...]], KeepingCost],
    limit: TimeLimit | None = None,
) -> KeepingChoice:
    """The default choice plus further last units, one after the other, as long as each makes the step faster.

    For a budget that comes from the default choice and not from the user: few choices are tried.

    Args:
        units, default, evaluate: as for :func:`choose_kept`.
        limit: no choice is tried that would probably end behind it. The first one brings the most, so the others are
            to end within :data:`FOR_OTHERS` of it.

    Raises:
        InfeasibleBudgetError: no plan of the default choice keeps the budget.
    """
    limit = limit or TimeLimit()
    began = limit.spent()
    kept = tuple(unit for unit in units if unit in default)
    best = evaluate(kept)
    trial_seconds = limit.spent() - began
    tried: list[tuple[tuple[str, ...], KeepingCost | None]] = [(kept, best)]
    for unit in reversed(units):
        if unit in kept:
            continue
        within = limit if len(tried) == 1 else limit.part(FOR_OTHERS)
        if within.is_over(ahead=trial_seconds):
            limit.was_reached = True
            break
        more = tuple(other for other in units if other == unit or other in kept)
        try:
            cost = evaluate(more)
        except InfeasibleBudgetError:
            tried.append((more, None))
            break
        tried.append((more, cost))
        if cost.seconds >= best.seconds:
            break
        kept, best = more, cost
    return KeepingChoice(units=kept, cost=best, tried=tuple(tried))
