"""Stores of process groups: their keys, and the one place that makes them."""

from pathlib import Path

import pytest
import torch.distributed as dist

import graphshard
from graphshard.coordination import count_in_group, group_store, is_fake_group


@pytest.fixture
def store(monkeypatch):
    """That of the groups "a" and "b", whose ranks are 1."""

    class Group:
        def rank(self):
            return 1

    store = dist.HashStore()
    monkeypatch.setattr(group_store, "group_by_name", lambda name: Group())
    monkeypatch.setattr(group_store, "store_of", lambda group: store)
    return store


@pytest.mark.parametrize(
    ("uses", "key"),
    [
        ((), "graphshard/a/key"),
        (("refusals",), "graphshard/a/refusals/key"),
        (("meet", "3"), "graphshard/a/meet/3/key"),
        (("plans", ""), "graphshard/a/plans//key"),
        (("plans", "1+2"), "graphshard/a/plans/1+2/key"),
    ],
)
def test_each_use_has_a_prefix(store, uses, key):
    group_store.group_store("a", *uses).set("key", "value")
    assert store.check([key]) and store.get(key) == b"value"


def test_each_rank_counts_for_itself_in_each_group(store):
    assert [count_in_group("a", "models"), count_in_group("a", "models"), count_in_group("b", "models")] == [1, 2, 1]
    assert store.check(["graphshard/a/models/1", "graphshard/b/models/1"])


def test_a_fake_group_is_told_from_a_real_one(fake_group, monkeypatch):
    mesh = fake_group(2)
    assert is_fake_group(mesh.get_group().group_name)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    assert not is_fake_group(mesh.get_group().group_name)


def test_stores_are_made_in_one_place():
    folder = Path(graphshard.__file__).parent
    assert [file.name for file in folder.rglob("*.py") if "PrefixStore(" in file.read_text()] == ["group_store.py"]
