"""What the ops of a graph do with placements on one mesh axis, by the rules of DTensor.

Imports: ``errors``, ``ir``. In reading order: ``values`` (a value of a graph and its placement), ``rules`` (one op),
``local_graph`` (a whole graph).
"""

from .local_graph import LocalGraph
from .rules import OpRules, Verdict, draws_numbers
from .values import PlacedValue

__all__ = ["LocalGraph", "OpRules", "PlacedValue", "Verdict", "draws_numbers"]
