"""What a memory budget leaves for one half of a step, and what FSDP2's order takes.

The memory model counts one half. A user's budget counts the whole step, so what is held outside of the half while it
runs is taken off first.
"""

from __future__ import annotations

from torch import fx

from ..errors import InfeasibleBudgetError
from ..ir import apply_order, copy_graph
from ..memory import parse_bytes, step_bytes
from ..pipeline import PassContext, bucket_keys, row_places
from .merge_collectives import merge_by_unit
from .plan_graph import measured_peak
from .rule_order import Decisions, Movable, Placement, at_once


def held_beside(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Bytes that are held outside of a half while it runs, as far as a user's budget counts them.

    Gradients that wait, gathered parameters, and what lives through the step and is no input of this half: a backward
    does not read the shards of units that keep their parameters.
    """
    return ctx.held_bytes + max(0, ctx.resident_bytes - step_bytes(gm))


def check_budget(gm: fx.GraphModule, ctx: PassContext, memory_budget: int | str) -> None:
    """Sees that a half without collectives, of which there is nothing to plan, keeps a user's budget.

    Raises:
        InfeasibleBudgetError: it does not; names what it needs.
    """
    budget, held = parse_bytes(memory_budget), held_beside(gm, ctx)
    peak = measured_peak(gm, ctx.device_type)
    if held + peak > budget:
        raise InfeasibleBudgetError(budget, peak, is_smallest=True, held_bytes=held)


def default_peak(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Bytes live at the peak of a graph at level 2 whose units are gathered one ahead, as FSDP2 does.

    Each collective is waited for at once: what FSDP2 holds where nothing overlaps.
    """
    one_ahead = copy_graph(gm)
    merge_by_unit(one_ahead, bucket_keys(one_ahead, ctx), row_places(one_ahead, ctx))
    apply_order(one_ahead.graph, at_once(Placement(Movable(one_ahead, ctx), Decisions(prefetch=1)).order()))
    return measured_peak(one_ahead, ctx.device_type)
