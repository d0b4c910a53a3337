"""Mixed precision as the graph shows it: what travels, what is added up, what stays in the shard's dtype."""

from __future__ import annotations

import pytest
import torch
from support.small_models import Blocks, TwoLinears
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from graphshard.ir.graph_text import dtype_text
from graphshard.testing import capture_graphs

#: Graphs run as they were captured here, which a real model is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:graphshard. this model was compiled by a backend:UserWarning")

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


def _dtypes(gm, target) -> set[str]:
    nodes = gm.graph.find_nodes(op="call_function", target=target)
    return {dtype_text(node.meta["val"].dtype) for node in nodes}


@pytest.mark.parametrize(
    ("policy", "travels", "reduced"),
    [
        (MixedPrecisionPolicy(param_dtype=bf16), "bf16", "bf16"),
        (MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=f32), "bf16", "f32"),
        (MixedPrecisionPolicy(param_dtype=f16), "f16", "f16"),
        (MixedPrecisionPolicy(reduce_dtype=bf16), "f32", "bf16"),
        (MixedPrecisionPolicy(), "f32", "f32"),
    ],
    ids=["bf16", "bf16, reduced in f32", "f16", "reduced in bf16", "none"],
)
def test_dtypes_of_the_collectives(fake_group, policy, travels, reduced):
    model = graphshard.fully_shard(TwoLinears(), mesh=fake_group(2), mp_policy=policy)
    graphs = capture_graphs(model, torch.randn(2, 4))
    assert _dtypes(graphs.forward, ALL_GATHER) == {travels}
    assert _dtypes(graphs.backward, REDUCE_SCATTER) == {reduced}
    gradients = [
        value.meta["val"].dtype for value in graphs.backward.graph.output_node().args[0] if value is not None
    ]
    assert gradients and set(gradients) == {f32}


def test_the_cast_stands_before_the_gather(fake_group):
    policy = MixedPrecisionPolicy(param_dtype=bf16)
    model = graphshard.fully_shard(TwoLinears(), mesh=fake_group(2), mp_policy=policy)
    graphs = capture_graphs(model, torch.randn(2, 4))
    for gather in graphs.forward.graph.find_nodes(op="call_function", target=ALL_GATHER):
        (cast,) = gather.all_input_nodes
        assert cast.target is torch.ops.prims.convert_element_type.default
        assert cast.all_input_nodes[0].op == "placeholder"


class WithTable(nn.Module):
    """An integer table beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x)[:, self.table]


def test_parameters_that_are_not_floating_point_keep_their_dtype(fake_group):
    policy = MixedPrecisionPolicy(param_dtype=bf16)
    model = graphshard.fully_shard(WithTable(), mesh=fake_group(2), mp_policy=policy)
    graphs = capture_graphs(model, torch.randn(2, 6))
    assert _dtypes(graphs.forward, ALL_GATHER) == {"bf16", "i64"}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("policy", "inside", "outside"),
    [
        (MixedPrecisionPolicy(param_dtype=bf16), bf16, bf16),
        (MixedPrecisionPolicy(param_dtype=bf16, output_dtype=f32), bf16, f32),
        (MixedPrecisionPolicy(output_dtype=torch.float64), f32, torch.float64),
    ],
)
def test_inputs_and_outputs_are_cast_inside_containers(fake_group, policy, inside, outside, is_compiled):
    seen = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, batch, *, scale):
            seen.append((batch["x"][0].dtype, batch["ids"].dtype, scale.dtype))
            return {"y": (batch["x"][0] @ self.weight) * scale, "ids": batch["ids"]}

    model = graphshard.fully_shard(Layer(), mesh=fake_group(1), mp_policy=policy)
    forward = torch.compile(model, backend="eager", fullgraph=False) if is_compiled else model
    batch = {"x": [torch.randn(2, 4)], "ids": torch.arange(2)}
    result = forward(batch, scale=torch.ones(()))
    assert seen[0] == (inside, torch.int64, inside)
    assert result["y"].dtype == outside and result["ids"].dtype == torch.int64
    assert batch["x"][0].dtype == f32


def test_inputs_are_left_alone_when_asked(fake_group):
    policy = MixedPrecisionPolicy(param_dtype=bf16, cast_forward_inputs=False)
    model = graphshard.fully_shard(nn.Linear(4, 4), mesh=fake_group(1), mp_policy=policy)
    assert model(torch.randn(2, 4, dtype=bf16)).dtype == bf16
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(2, 4))


def test_each_unit_has_its_own_policy(fake_group):
    mesh = fake_group(2)
    model = Blocks(2)
    graphshard.fully_shard(
        model.blocks[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=bf16, output_dtype=f32)
    )
    graphshard.fully_shard(model, mesh=mesh)
    graphs = capture_graphs(model, torch.randn(2, 6))
    assert _dtypes(graphs.forward, ALL_GATHER) == {"bf16", "f32"}
