"""A module of factories, as users write them for the command line."""

MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, scale=1.0):
        return self.second(torch.relu(self.first(x))) * scale

class Breaks(Model):
    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return y.sum()

class Selects(Model):
    def forward(self, x):
        y = self.first(x)
        return y[y > 0].sum()

def loss(output):
    return output.square().mean()

def make():
    with torch.device("meta"):
        return Model(), (torch.empty(2, 4),), {"scale": 2.0}

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def deep():
    with torch.device("meta"):
        return Deep(), (torch.empty(2, 4),)

def short():
    with torch.device("meta"):
        return Model(), (torch.empty(2, 4),)

def exported():
    return torch.export.export(Model(), (torch.ones(2, 4),)), (torch.ones(2, 4),)

def wide():
    with torch.device("meta"):
        return Model(), (torch.empty(2, 5),)

def breaks():
    return Breaks(), (torch.ones(2, 4),)

def selects():
    return Selects(), (torch.ones(2, 4),)

def nothing():
    return None

def only_a_model():
    return Model()

def tensor_as_args():
    return Model(), torch.ones(2, 4)

def fails():
    raise KeyError("no weights here")

number = 3

from torch.distributed.tensor import Shard

placements = {"first.*": Shard(0), "second.weight": Shard(1)}
odd = {"third.weight": Shard(0)}
"""
