"""Whether a run is `make test` or `make test-all`, and what that changes besides the tests marked slow."""

import pytest


def is_thorough(config: pytest.Config) -> bool:
    """Whether the run takes slow tests too: then no half is interpreted, and hypothesis draws more examples."""
    return "not slow" not in config.option.markexpr
