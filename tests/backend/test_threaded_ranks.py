"""Ranks that are threads of one process, as in torch's own tests."""

from pathlib import Path

from support.thorough import is_thorough
from support.threads_as_ranks import check_script


def test_threads_compile_at_the_same_moment():
    """In a process of its own: both threads are the first to ask for the backend, and for its modules.

    What they compile second is interpreted in `make test`.
    """
    check_script(Path(__file__).parent / "threaded_ranks.py", 2, *(["thorough"] if is_thorough() else []))
