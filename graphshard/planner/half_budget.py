"""Memory budgets for one half of a step: what a user's budget leaves for it, and the default budget.

The memory model counts one half; a user's budget counts the whole step. So what is held outside of the half while it
runs is subtracted first. The default budget is the peak of FSDP2's order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ..budget_text import parse_bytes
from ..errors import InfeasibleBudgetError
from ..ir import apply_order, copy_graph
from ..memory import step_bytes
from ..pipeline import PassContext, bucket_keys, row_places
from ..units import size_text
from .merge_collectives import merge_by_unit
from .plan_graph import PlannedGraph, measured_peak
from .rule_order import Decisions, Movable, Placement, at_once

#: Budgets that :func:`plan_near` tries, as shares of the peak it is given.
_SHARES = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5)


def held_beside(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Bytes that are held outside of a half while it runs, as far as a user's budget counts them.

    These are gradients that wait for a later micro-batch, gathered parameters, and what lives through the step but
    is no input of this half: a backward does not read the shards of units that keep their parameters.
    """
    return ctx.held_bytes + max(0, ctx.resident_bytes - step_bytes(gm))


def check_budget(gm: fx.GraphModule, ctx: PassContext, memory_budget: int | str) -> None:
    """Checks that a half without collectives keeps a user's budget; such a half is not planned.

    Raises:
        InfeasibleBudgetError: it exceeds the budget; names what it needs.
    """
    budget, held = parse_bytes(memory_budget), held_beside(gm, ctx)
    peak = measured_peak(gm, ctx.device_type, ctx.scratch)
    if held + peak > budget:
        raise InfeasibleBudgetError(budget, peak, is_smallest=True, held_bytes=held)


def default_peak(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Bytes live at the peak of a graph at level 2 whose units are gathered one ahead, as FSDP2 does.

    Each collective is waited for at once, so this is what FSDP2 holds without overlap.
    """
    one_ahead = copy_graph(gm)
    merge_by_unit(one_ahead, bucket_keys(one_ahead, ctx), row_places(one_ahead, ctx))
    apply_order(one_ahead.graph, at_once(Placement(Movable(one_ahead, ctx), Decisions(prefetch=1)).order()))
    return measured_peak(one_ahead, ctx.device_type, ctx.scratch)


def plan_within(plan: Callable[[int], PlannedGraph], budget_bytes: int, held_bytes: int) -> PlannedGraph:
    """The plan within the part of a budget that is not held outside of the graph.

    Args:
        plan: plans within a budget in bytes.
        budget_bytes: the user's budget.
        held_bytes: the part of it that is held outside of the graph.

    Raises:
        InfeasibleBudgetError: no plan keeps the budget; its figures include ``held_bytes``.
    """
    try:
        return plan(max(1, budget_bytes - held_bytes))
    except InfeasibleBudgetError as error:
        if not held_bytes:
            raise
        raise InfeasibleBudgetError(
            budget_bytes, error.smallest_bytes, is_smallest=error.is_smallest, held_bytes=held_bytes
        ) from None


def plan_near(plan: Callable[[int | None], PlannedGraph], peak: int, notes: list[str]) -> PlannedGraph:
    """The plan within ``peak`` bytes or the smallest of a few larger budgets that a plan keeps.

    Args:
        plan: plans within a budget in bytes, or without one.
        peak: the budget to try first.
        notes: gets a sentence if a larger budget, or none, was used.
    """
    too_little = f"no plan is found within the {size_text(peak)} that units gathered one ahead take"
    for share in _SHARES:
        budget = round(share * peak)
        try:
            planned = plan(budget)
        except InfeasibleBudgetError:
            continue
        if planned.plan.solver not in ("none", "leanest") or not planned.plan.buckets:
            if share > 1.0:
                notes.append(f"{too_little}: this one is within {size_text(budget)}")
            return planned
    planned = plan(None)
    notes.append(
        f"{too_little}, nor within {_SHARES[-1]:g} times as much: this one takes {size_text(planned.plan.peak_bytes)}"
    )
    return planned
