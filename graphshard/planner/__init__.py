"""The planner on graphs: which collectives merge, where each starts, and where each is waited for.

Imports: ``ir``, ``memory``, ``cost``, ``pipeline``. The search itself is in ``search``, which knows no graph.

Read first: ``schedule_graph`` (the public function), ``plan_graph``, ``from_graph`` (a graph as a problem) and
``to_graph`` (a schedule as a graph). Then: ``rule_order``, ``overlap_fit`` (the rule-based schedule),
``merge_collectives``, ``split_collectives``, ``choose_splits``, ``choose_moves``, ``move_compute``,
``any_order_bound``, ``user_constraints``, ``follow_plan``, ``keep_units``, ``recompute_share``.
"""

from .from_graph import GraphProblem, problem_of_graph
from .half_budget import check_budget, default_peak, held_beside
from .merge_collectives import merge_by_unit, merge_gathers, merge_reductions
from .overlap_fit import fit
from .plan_graph import PlannedGraph, measured_peak, plan_graph
from .rule_order import Decisions, Movable, Placement, at_once
from .schedule_graph import check_graph, schedule_graph, topologies
from .search import SHARES, KeepingCost, choose_kept, choose_saved, extend_kept
from .user_constraints import Wishes

__all__ = [
    "SHARES",
    "Decisions",
    "GraphProblem",
    "KeepingCost",
    "Movable",
    "Placement",
    "PlannedGraph",
    "Wishes",
    "at_once",
    "check_budget",
    "check_graph",
    "choose_kept",
    "choose_saved",
    "default_peak",
    "extend_kept",
    "fit",
    "held_beside",
    "measured_peak",
    "merge_by_unit",
    "merge_gathers",
    "merge_reductions",
    "plan_graph",
    "problem_of_graph",
    "schedule_graph",
    "topologies",
]
