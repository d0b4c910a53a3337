"""What `graphshard.inspect` predicts for the examples is what real ranks need."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_examples_need_what_inspect_predicts_within_5_percent():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, str(BENCHMARKS / "memory.py"), "--within", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("predicted") == 3, done.stdout
