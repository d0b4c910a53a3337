"""Placements on a further mesh axis for a plain model: tensor and sequence parallelism without other modules.

Imports: ``errors``, ``ir``. In reading order: ``names`` (patterns), ``held_values`` (values of modules that are to be
cut), ``styles`` (plans of others), ``parallelize`` (the public function).
"""

from .parallelize import parallelize

__all__ = ["parallelize"]
