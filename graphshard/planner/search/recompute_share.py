"""How many activations are saved for the backward, chosen together with the units that keep parameters.

Activations that are not saved are computed again in the backward. Torch's partitioner says which, given the share
that may be saved of what it would save by itself. The cost of a share is measured as that of kept units: both halves
are planned with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from ...errors import InfeasibleBudgetError
from ...progress import TimeLimit
from .keep_units import KeepingChoice, KeepingCost, choose_kept

#: Shares that are tried if the budget binds.
SHARES = (0.75, 0.5, 0.25, 0.1)

#: The cost of the units that keep their parameters and the share of activations that is saved; None for torch's
#: default.
Evaluate = Callable[[tuple[str, ...], float | None], KeepingCost]


def choose_saved(
    units: Sequence[str],
    default: Sequence[str],
    evaluate: Evaluate,
    shares: Sequence[float] = SHARES,
    limit: TimeLimit | None = None,
) -> tuple[float | None, tuple[str, ...]]:
    """The fastest choice that keeps the budget: a share of activations to save, and the units to keep.

    Shares are tried only if the budget has no room for all units: recomputation takes time, and frees memory for
    units to be kept. Each share is tried with the units that are kept without it, and with all of them if there is
    room. The best share is then tried with other choices of units.

    Args:
        units, default: as for :func:`graphshard.planner.search.keep_units.choose_kept`.
        evaluate: raises ``InfeasibleBudgetError`` where no plan keeps the budget.
        shares: in (0, 1), largest first; a smaller one recomputes more.
        limit: behind it, no further choice is tried if one keeps the budget.

    Returns:
        The share, None for torch's default, and the units.

    Raises:
        InfeasibleBudgetError: no choice keeps the budget; names the smallest budget found that is kept.
    """
    limit = limit or TimeLimit()
    known: dict[tuple[tuple[str, ...], float | None], KeepingCost | InfeasibleBudgetError] = {}

    def cost(kept: tuple[str, ...], share: float | None) -> KeepingCost:
        if (kept, share) not in known:
            try:
                known[kept, share] = evaluate(kept, share)
            except InfeasibleBudgetError as error:
                known[kept, share] = error
        found = known[kept, share]
        if isinstance(found, InfeasibleBudgetError):
            raise found
        return found

    def choose(share: float | None) -> KeepingChoice | None:
        with suppress(InfeasibleBudgetError):
            return choose_kept(units, default, lambda kept: cost(kept, share), limit)
        return None

    def fits(kept: tuple[str, ...], share: float | None) -> bool:
        with suppress(InfeasibleBudgetError):
            return bool(cost(kept, share))
        return False

    every, whole = tuple(units), choose(None)
    kept = whole.units if whole is not None else ()
    for share in () if fits(every, None) else shares:
        if whole is not None and limit.is_over():
            break
        if fits(kept, share) and fits(every, share):
            break
    found = [(cost.rank, key) for key, cost in known.items() if isinstance(cost, KeepingCost)]
    if not found:
        refused = [error for error in known.values() if isinstance(error, InfeasibleBudgetError)]
        raise min(refused, key=lambda error: error.smallest_bytes)
    rank, (kept, best) = min(found, key=lambda one: one[0])
    more = None if limit.is_over() else choose(best)
    return best, more.units if more is not None and more.cost.rank <= rank else kept
