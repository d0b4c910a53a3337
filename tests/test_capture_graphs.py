"""What `graphshard.testing.capture_graphs` takes."""

import torch
from small_graphs import num_targets
from torch import Tensor, nn

import graphshard
from graphshard.collectives import ALL_GATHER
from graphshard.testing import capture_graphs


class Floored(nn.Module):
    """Writes a number where a mask is set, which the captured graph holds as a constant tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).clone()
        y[x > 0] = 0.5
        return y.sum()


def test_a_graph_with_a_constant(fake_group):
    model = graphshard.fully_shard(Floored(), mesh=fake_group(2))
    graphs = capture_graphs(model, torch.randn(2, 4))
    assert len(graphs.captured.graph.find_nodes(op="get_attr")) == 1
    assert num_targets(graphs.forward, ALL_GATHER) == 2
