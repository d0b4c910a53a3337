"""How ranks agree outside of collectives: over the stores of their process groups, with time limits.

Imports: ``ir``.

Read first: ``agreement`` (fingerprints before the first collective), ``refusals`` (a rank that stops tells the
others), then ``shared_plan`` (one rank plans, the others follow) and ``rendezvous`` (uncompiled ranks meet).
"""

from .agreement import agree_on_group
from .refusals import Refusals, refusing
from .rendezvous import meet
from .shared_plan import PlanStore, decide_together

__all__ = [
    "PlanStore",
    "Refusals",
    "agree_on_group",
    "decide_together",
    "meet",
    "refusing",
]
