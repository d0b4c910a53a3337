"""The search for a schedule, on numbers alone: no file here knows of graphs.

Imports: ``ir`` (rows of shards), ``cost`` (prices).

Read first: ``problem`` (what is planned), ``simulate`` (what a schedule costs), ``solve`` (finds one), ``bound``
(how good one can be), ``plan`` (the result). Searches: ``exact``, ``beam``, ``list_schedule``, ``local_search``,
``condense``, ``feasible``.
"""

from .bound import Bounds, links_bound, lower_bounds
from .plan import Plan, make_plan
from .problem import Collective, Problem, Task
from .simulate import BucketRun, Step, simulate
from .solve import EXACT_STATES, MOST_EXACT_STATES, is_possible, leanest_schedule, plan

__all__ = [
    "EXACT_STATES",
    "MOST_EXACT_STATES",
    "Bounds",
    "BucketRun",
    "Collective",
    "Plan",
    "Problem",
    "Step",
    "Task",
    "is_possible",
    "leanest_schedule",
    "links_bound",
    "lower_bounds",
    "make_plan",
    "plan",
    "simulate",
]
