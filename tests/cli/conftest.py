"""Fixtures of the tests of the command."""

import pytest


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """The cards that runs of this machine's user have kept are no cards of the tests."""
    monkeypatch.setenv("GRAPHSHARD_CACHE", str(tmp_path / "cache"))
