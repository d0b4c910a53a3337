"""What `graphshard.testing.capture_graphs` takes."""

import pytest
import torch
from support.small_graphs import GraphBuilder, ParameterSpec, aten, num_targets, unshard
from torch import Tensor, nn

import graphshard
from graphshard.errors import CaptureError
from graphshard.ir.collectives import ALL_GATHER
from graphshard.pipeline.context import context_from_shard_ops, read_shards_as_they_are
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


def test_an_unsharded_model_is_an_error(fake_group):
    with pytest.raises(CaptureError, match=r"nothing of the model is sharded.*graphshard.fully_shard.*inspect"):
        capture_graphs(nn.Linear(4, 4), torch.randn(2, 4))
    alone = graphshard.fully_shard(nn.Linear(4, 4), mesh=fake_group(1))
    assert num_targets(capture_graphs(alone, torch.randn(2, 4)).forward, ALL_GATHER) == 0


def test_shards_are_read_as_they_are():
    """A view of an input that changes nothing stands for the input where it is gathered; others stay."""
    build, spec = GraphBuilder(), ParameterSpec(shape=(6, 4))
    shard, wide = build.input("primals_1", 3, 4), build.input("primals_2", 12)
    idle, kept, shaped = (
        build(aten.view.default, source, size) for source, size in ((shard, [3, 4]), (shard, [3, 4]), (wide, [3, 4]))
    )
    first, second = unshard(build, idle, "a", spec, 2), unshard(build, shaped, "b", spec, 2)
    gm = build.finish(first, second, build(aten.relu.default, kept))
    read_shards_as_they_are(gm)
    gm.graph.lint()
    assert first.args[0] is shard and second.args[0] is shaped
    assert num_targets(gm, aten.view.default) == 2
    assert [binding.name for binding in context_from_shard_ops(gm).parameters] == ["a"]
