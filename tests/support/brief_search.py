"""Plans for which the exact search looks at few states: for tests that are not about how good a plan is.

The beams, the bounds and all checks of a plan work as in training. A small graph is planned in a quarter of the time.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from graphshard.planner.search import Effort
from support.thorough import is_thorough

#: A search of 30,000 states takes half a second; it ends without a result where more are needed.
STATES = 1000


@contextlib.contextmanager
def brief_search() -> Iterator[None]:
    """While this is open, plans take the best schedule of the beams unless the exact search ends after few states."""
    states = Effort.states

    def few(effort: Effort, most: int) -> int:
        return min(STATES, states(effort, most))

    with mock.patch.object(Effort, "states", few):
        yield


@contextlib.contextmanager
def briefly() -> Iterator[None]:
    """`brief_search` in `make test`, nothing in a thorough run; a decorator of one test too."""
    with contextlib.nullcontext() if is_thorough() else brief_search():
        yield
