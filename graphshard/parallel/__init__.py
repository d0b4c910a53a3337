"""Placements on a further mesh axis for a plain model: tensor and sequence parallelism without other modules.

Imports: ``errors``, ``ir``. In reading order: ``names`` (patterns), ``held_values`` (values of modules that are to be
cut), ``styles`` (plans of others), ``ready_plans`` (plans by name), ``weight_choices`` (what a search chooses),
``parallelize`` (states known placements).
"""

from .held_values import Held
from .parallelize import hold_values, parallelize, state_placements
from .ready_plans import READY_PLANS, fitting_plans
from .styles import Stated
from .weight_choices import Choice, WeightGroup, choice_of, parameters_of, parts_of, weight_groups

__all__ = [
    "READY_PLANS",
    "Choice",
    "Held",
    "Stated",
    "WeightGroup",
    "choice_of",
    "fitting_plans",
    "hold_values",
    "parallelize",
    "parameters_of",
    "parts_of",
    "state_placements",
    "weight_groups",
]
