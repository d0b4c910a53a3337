"""What a run takes besides the tests marked slow, if it takes those: `make test-all` does, `make test` does not."""

import random
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

Value = TypeVar("Value")

#: What `make test` draws of the examples of a property, or of random cases: that share, and no fewer than so many.
SHARE, LEAST = 4, 3

_run: dict[str, bool] = {}


def note_run(config: pytest.Config) -> None:
    """Called once a run, before the tests are imported."""
    note_thorough("not slow" not in config.option.markexpr)


def note_thorough(is_thorough: bool) -> None:
    """Ranks are told by the run that calls them."""
    _run["is_thorough"] = is_thorough


def is_thorough() -> bool:
    """Whether the run takes slow tests too. Then nothing is interpreted that can be compiled."""
    return _run["is_thorough"]


def examples(number: int) -> settings:
    """Of a property that takes long: so many examples in a thorough run, a quarter of them in `make test`."""
    return settings(max_examples=number if is_thorough() else max(LEAST, number // SHARE))


def drawn(cases: Sequence[Value]) -> list[Value]:
    """Of random cases that test one property: all in a thorough run; in `make test` a quarter, the same in each run."""
    if is_thorough():
        return list(cases)
    number = min(len(cases), max(LEAST, len(cases) // SHARE))
    return [cases[place] for place in sorted(random.Random(0).sample(range(len(cases)), number))]
