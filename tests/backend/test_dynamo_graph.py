"""What a graph of Dynamo says of its models."""

import torch
import torch.distributed as dist
from torch import nn

import graphshard
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


def test_models_of_one_class_share_a_graph(fake_group):
    """Their units and trees are no part of what Dynamo compares."""
    mesh = fake_group(2)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        for module in (model[0], model):
            graphshard.fully_shard(module, mesh=mesh)
        torch.compile(model, backend="graphshard")(torch.ones(2, 4)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
