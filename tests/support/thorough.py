"""What a run takes besides the tests marked slow, if it takes those: `make test-all` does, `make test` does not."""

import pytest
from hypothesis import settings

#: What `make test` draws of the examples of a property: that share, and no fewer than so many.
SHARE, LEAST = 4, 3

_run: dict[str, bool] = {}


def note_run(config: pytest.Config) -> None:
    """Called once a run, before the tests are imported."""
    _run["is_thorough"] = "not slow" not in config.option.markexpr


def is_thorough() -> bool:
    """Whether the run takes slow tests too. Then nothing is interpreted that can be compiled."""
    return _run["is_thorough"]


def examples(number: int) -> settings:
    """Of a property that takes long: so many examples in a thorough run, a quarter of them in `make test`."""
    return settings(max_examples=number if is_thorough() else max(LEAST, number // SHARE))
