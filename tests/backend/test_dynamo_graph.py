"""What a graph of Dynamo says of its models."""

import torch.distributed as dist

from graphshard.backend.dynamo_graph import label_models
from graphshard.coordination import group_store


class _Model:
    """As a model's tree: its process groups, and its places there."""

    def __init__(self, *groups):
        self.numbers, self._groups = {}, groups

    def groups(self):
        return self._groups


def test_models_are_counted_in_each_group_and_keep_their_place(monkeypatch):
    stores = {"a": dist.HashStore(), "b": dist.HashStore()}

    class Group:
        def __init__(self, name):
            self.name = name

        def rank(self):
            return 0

    monkeypatch.setattr(group_store, "group_by_name", Group)
    monkeypatch.setattr(group_store, "store_of", lambda group: stores[group.name])
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    one, other = _Model("a"), _Model("a", "b")
    assert label_models([one]) == {"a": "1"}
    assert label_models([other]) == {"a": "2", "b": "1"}
    assert label_models([one]) == {"a": "1"}
    assert label_models([one, other]) == {"a": "1+2", "b": "1"}
