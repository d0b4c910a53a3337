"""How ranks agree outside of collectives: through the stores of their process groups, with time limits.

Imports: ``ir``.

Read first: ``group_store`` (where keys are written), ``agreement`` (fingerprints are compared before the first
collective), ``refusals`` (a rank that stops tells the others), ``shared_plan`` (one rank plans, the others follow),
``kept_plans`` (plans of earlier runs), ``transcript`` and ``repeated`` (a rank
with kept code says what it said before), ``agreed_seed`` (ranks that share a batch draw the same numbers),
``rendezvous`` (uncompiled ranks meet before they communicate), ``known_steps`` (where they need not), ``bounded_wait``
(collectives with a time limit).
"""

from .agreed_seed import agree_on_seed
from .agreement import agree_on_group
from .group_store import can_wait_in_compilation, count_in_group, has_threads_as_ranks, is_fake_group
from .kept_plans import keep_plan, read_plan
from .known_steps import Steps, StepWords
from .refusals import Refusals, refusing
from .repeated import say_again
from .shared_plan import Decision, PlanStore, decide_together
from .transcript import Transcript, recording

__all__ = [
    "Decision",
    "PlanStore",
    "Refusals",
    "StepWords",
    "Steps",
    "Transcript",
    "agree_on_group",
    "agree_on_seed",
    "can_wait_in_compilation",
    "count_in_group",
    "decide_together",
    "has_threads_as_ranks",
    "is_fake_group",
    "keep_plan",
    "read_plan",
    "recording",
    "refusing",
    "say_again",
]
