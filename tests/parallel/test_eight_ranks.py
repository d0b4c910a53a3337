"""Copies, shards and tensor parallelism at once: eight ranks as threads of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "eight_ranks.py"
TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_trains_on_a_mesh_of_three_axes():
    """2 x 2 x 2: parameters after each step are those of the unsharded model on all batches."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=150, env=environment)
    assert f"trained: {list(range(8))}" in answer.stdout, answer.stdout + answer.stderr
