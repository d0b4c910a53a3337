"""What the ops of a graph do with placements on one mesh axis, by the rules of DTensor.

Imports: ``errors``, ``ir``. In reading order: ``values`` (a value of a graph and its placement), ``sent_bytes`` (what
an answer of a rule costs), ``rules`` (one op), ``added_rows`` (the backward of an embedding), ``local_graph`` (a whole
graph), ``cut_region`` (values that are better cut than whole).
"""

from .cut_region import Region, RegionFinder, cut_inputs, is_slice, placed_call
from .local_graph import LocalGraph
from .rules import OpRules, Verdict, draws_numbers, remembered_rules
from .values import PlacedValue

__all__ = [
    "LocalGraph",
    "OpRules",
    "PlacedValue",
    "Region",
    "RegionFinder",
    "Verdict",
    "cut_inputs",
    "draws_numbers",
    "is_slice",
    "placed_call",
    "remembered_rules",
]
