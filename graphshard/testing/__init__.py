"""For tests of graphs and passes, of users too: captured graphs, all ranks in one process, goldens.

Imports: all rooms below.

Read first: ``capture``, ``ranks``, ``golden``.
"""

from ..errors import CollectiveMismatchError
from .capture import CapturedGraphs, capture_graphs
from .golden import check_golden
from .ranks import run_on_all_ranks

__all__ = [
    "CapturedGraphs",
    "CollectiveMismatchError",
    "capture_graphs",
    "check_golden",
    "run_on_all_ranks",
]
