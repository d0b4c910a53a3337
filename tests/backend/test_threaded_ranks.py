"""Ranks that are threads of one process, as in torch's own tests."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "threaded_ranks.py"


def test_threads_compile_at_the_same_moment():
    """In a process of its own: both threads are the first to ask for the backend, and for its modules."""
    answer = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=150)
    assert "trained: [0, 1]" in answer.stdout, answer.stdout + answer.stderr
