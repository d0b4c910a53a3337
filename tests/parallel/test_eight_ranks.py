"""Copies, shards and tensor parallelism at once: eight ranks as threads of one process."""

from pathlib import Path

import pytest
from support.threads_as_ranks import check_script


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "vit"])
def test_trains_on_a_mesh_of_three_axes(name):
    """2 x 2 x 2: parameters after each of ten steps are those of the unsharded model on all batches."""
    check_script(Path(__file__).parent / "eight_ranks.py", 8, name, "10", timeout_s=550)
