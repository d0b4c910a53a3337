"""Python's garbage collector stays out of long work on graphs, and is afterwards as it was."""

import gc

import pytest

from graphshard.capture import no_garbage_collection, spared_by_garbage_collection


@pytest.mark.parametrize("was_on", [True, False])
def test_inside_no_garbage_is_collected(was_on):
    (gc.enable if was_on else gc.disable)()
    try:
        with no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


def test_what_lives_on_is_spared_by_garbage_collection():
    """What is frozen may still die of its own: only a few do here, and what is new within is not frozen."""
    gc.collect()
    assert gc.get_freeze_count() == 0
    with spared_by_garbage_collection():
        frozen = gc.get_freeze_count()
        new = [[] for _ in range(10_000)]
        with spared_by_garbage_collection():
            assert 0 < gc.get_freeze_count() < frozen + len(new)
        assert gc.get_freeze_count() > frozen - len(new)
    assert gc.get_freeze_count() == 0
