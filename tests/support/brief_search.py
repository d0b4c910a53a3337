"""Plans for which the exact searches look at few states: for tests that are not about how good a plan is.

The searches are those of the fastest schedule and of the least memory. Few small changes of schedules are tried, too.
The beams, the bounds and all checks of a plan work as in training. A small graph is planned in a quarter of the time.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from graphshard.planner.search import Effort, local_search, solve
from graphshard.planner.search.exact import least_peak
from graphshard.planner.search.problem import Problem
from support.thorough import is_thorough

#: A search of 30,000 states takes half a second; it ends without a result where more are needed.
STATES = 1000

#: Steps and tasks of the schedules that small changes give; the planner looks at 200,000.
WORK = 10_000


@contextlib.contextmanager
def brief_search() -> Iterator[None]:
    """While this is open, plans take the best schedule of the beams unless an exact search ends after few states.

    So the smallest budget that an error names may be one that only the beams found.
    """
    states = Effort.states

    def few(effort: Effort, most: int) -> int:
        return min(STATES, states(effort, most))

    def briefly_leanest(problem: Problem, *, max_states: int) -> int | None:
        return least_peak(problem, max_states=min(STATES, max_states))

    with (
        mock.patch.object(Effort, "states", few),
        mock.patch.object(solve, "least_peak", briefly_leanest),
        mock.patch.object(local_search, "_MOST_WORK", WORK),
    ):
        yield


@contextlib.contextmanager
def briefly() -> Iterator[None]:
    """`brief_search` in `make test`, nothing in a thorough run; a decorator of one test too."""
    with contextlib.nullcontext() if is_thorough() else brief_search():
        yield
