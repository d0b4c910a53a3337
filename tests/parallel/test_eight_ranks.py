"""Copies, shards and tensor parallelism at once: eight ranks as threads of one process."""

from pathlib import Path

import pytest
from support.threads_as_ranks import check_script


@pytest.mark.slow
def test_trains_on_a_mesh_of_three_axes():
    """2 x 2 x 2: parameters after each step are those of the unsharded model on all batches."""
    check_script(Path(__file__).parent / "eight_ranks.py", 8)
