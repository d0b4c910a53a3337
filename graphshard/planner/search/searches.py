"""The searches that are worth their time: which are tried, in which order, and which are left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from .beam import Beam, good_schedule
from .condense import both_ends
from .list_schedule import Rule
from .machine import Machine
from .problem import Problem
from .simulate import cost_of

#: Searches whose buckets end at multiples of a length: quick, and mostly the best.
ALIGNED = tuple(Beam(width=8, shared_by=1, aligned=length) for length in (6, 4, 8, 5, 9, 3, 7, 12, 2, 18))

#: Searches with buckets of any length. If the first is slower by ``FAR_BEHIND`` than the best so far, the others are
#: left out.
NARROW, FAR_BEHIND = 2, 1.1
FREE = (
    *(Beam(width=NARROW, shared_by=share) for share in (9, 3, 1, 16)),
    Beam(width=NARROW, shared_by=1, splits_small=True),
)

#: Searches for every problem, in the order in which they are tried.
BEAMS = (Beam(width=NARROW, merges=False), *ALIGNED, *FREE)

#: Searches that take longer, for problems of at most ``MANY`` collectives. One is left out if its narrow twin found
#: nothing, or was slower by ``BEHIND`` than the best so far.
BEHIND = 1.03
WIDE_BEAMS = (
    Beam(width=8, shared_by=9),
    Beam(width=8, shared_by=16),
    Beam(width=8, shared_by=1, splits_small=True),
)
MANY = 150

#: List schedules, tried if no beam came close to the bound.
RULES = tuple(
    Rule(num_gathers=gathers, num_reductions=reductions)
    for gathers, reductions in itertools.product((1, 8, 32, 64), repeat=2)
)

#: A larger problem runs so many of the searches with buckets of any length: the best on a sample of about ``SAMPLE``
#: collectives.
SAMPLE, NUM_DEAR = 120, 2

#: Searches for problems whose buckets are all fixed.
FIXED_SEARCHES: tuple[Beam | Rule, ...] = (
    Beam(width=NARROW),
    Rule(num_gathers=1, num_reductions=1),
    Beam(width=8),
)


def is_hopeless(search: Beam | Rule, found: Mapping[Beam | Rule, float]) -> bool:
    """Whether searches like this one, which took less, were far behind the best so far."""
    if search in WIDE_BEAMS:
        assert isinstance(search, Beam)
        twin = found.get(replace(search, width=NARROW), math.inf)
        return bool(found) and twin > BEHIND * min(found.values())
    return search in FREE and FREE[0] in found and found[FREE[0]] > FAR_BEHIND * min(found.values())


def promising(problem: Problem) -> Iterator[Beam]:
    """The searches worth their time: first the one without merging, which is the quickest, then best first.

    For a large problem all are narrow: the quick ones, and of the others those that do best on its two ends.
    """
    yield BEAMS[0]
    if len(problem.collectives) <= MANY:
        yield from (*BEAMS[1:], *WIDE_BEAMS)
        return
    ends = both_ends(problem, SAMPLE)
    machine = Machine(ends, budget_bytes=ends.budget_bytes)
    free = Machine(ends, budget_bytes=None)
    narrow = [replace(beam, width=NARROW) for beam in BEAMS[1:]]
    costs = []
    for place, beam in enumerate(narrow):
        steps = good_schedule(ends, beam, machine=machine)
        cost = cost_of(ends, steps, free) if steps is not None else (float("inf"), 0)
        costs.append((*cost, place))
    ranked = [narrow[place] for *_, place in sorted(costs)]
    dear = [beam for beam in ranked if not beam.aligned]
    yield from (beam for beam in ranked if beam not in dear[NUM_DEAR:])
