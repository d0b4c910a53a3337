"""Placements on a further mesh axis for a plain model: tensor and sequence parallelism without other modules.

Imports: ``errors``, ``ir``. In reading order: ``names`` (patterns), ``held_values`` (values of modules that are to be
cut), ``styles`` (plans of others), ``ready_plans`` (plans by name), ``parallelize`` (the public function).
"""

from .held_values import Held
from .parallelize import hold_values, parallelize, state_placements
from .ready_plans import READY_PLANS, fitting_plans
from .styles import Stated

__all__ = [
    "READY_PLANS",
    "Held",
    "Stated",
    "fitting_plans",
    "hold_values",
    "parallelize",
    "state_placements",
]
