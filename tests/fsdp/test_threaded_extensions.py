"""All-gather extensions that are patched onto a class, with ranks as threads on a 2-D mesh."""

from pathlib import Path

import pytest
from support.threads_as_ranks import check_script


@pytest.mark.slow
def test_an_extension_of_a_patched_class_on_threads():
    """In a process of its own, since the class is one of torch. Both inner tensors are gathered and trained."""
    check_script(Path(__file__).parent / "threaded_extensions.py", 4)
