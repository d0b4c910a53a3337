"""The search for a schedule, and for what a step keeps and splits, on numbers alone: no file here knows graphs.

Imports: ``ir`` (rows of shards), ``cost`` (prices), ``progress`` (a time limit).

Read first: ``problem`` (what is planned), ``machine`` (the rules of a schedule), ``simulate`` (what a schedule
costs), ``solve`` (finds one), ``bound`` (how fast one can be), ``plan`` (the result). Searches: ``exact``, ``beam``,
``list_schedule``, ``local_search``, ``feasible``; ``condense`` makes problems smaller. Choices around a schedule:
``choose_splits``, ``keep_units``, ``recompute_share``.
"""

from .bound import Bounds, links_bound, lower_bounds
from .choose_splits import SPLIT_WORTH, splits_to_try
from .keep_units import KeepingCost, choose_kept, extend_kept
from .machine import Step
from .plan import Plan, make_plan
from .problem import Collective, Problem, Task
from .recompute_share import SHARES, choose_saved
from .simulate import BucketRun, simulate
from .solve import EXACT_STATES, MOST_EXACT_STATES, Effort, can_start, is_possible, leanest_schedule, plan

__all__ = [
    "EXACT_STATES",
    "MOST_EXACT_STATES",
    "SHARES",
    "SPLIT_WORTH",
    "Bounds",
    "BucketRun",
    "Collective",
    "Effort",
    "KeepingCost",
    "Plan",
    "Problem",
    "Step",
    "Task",
    "can_start",
    "choose_kept",
    "choose_saved",
    "extend_kept",
    "is_possible",
    "leanest_schedule",
    "links_bound",
    "lower_bounds",
    "make_plan",
    "plan",
    "simulate",
    "splits_to_try",
]
