"""The planner on graphs: which collectives merge, where each starts, and where each is waited for.

Imports: ``ir``, ``memory``, ``cost``, ``pipeline``. The search on numbers is in ``search``, which knows no graph.

Read first:

- ``schedule_graph``: the public function;
- ``plan_graph``: the steps of planning one graph;
- ``from_graph``: a graph becomes a problem, with ``movable_nodes`` (what moves) and ``task_memory`` (what compute
  holds);
- ``to_graph``: a schedule becomes a graph, with ``merge_collectives`` and ``split_collectives``.

Then, for planned graphs: ``user_constraints``, ``follow_plan`` (the plan of another rank), ``choose_moves`` and
``move_compute`` (compute moves beside collectives), ``any_order_bound``, ``half_budget`` (a user's budget for one
half). The rule-based schedule: ``rule_order``, ``overlap_fit``.
"""

from .from_graph import GraphProblem, problem_of_graph
from .half_budget import check_budget, default_peak, held_beside, plan_near, plan_within
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
    "plan_near",
    "plan_within",
    "problem_of_graph",
    "schedule_graph",
    "topologies",
]
