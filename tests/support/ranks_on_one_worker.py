"""How xdist hands files to workers: see docs/extend/testing.md. Imported only where xdist is installed."""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from .run_order import scope_of


class RanksOnOneWorker(LoadFileScheduling):
    """A file to each worker that is free, in the order of the tests; all tests with ranks count as one file.

    Ranks take a core each, and are started once a worker.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
