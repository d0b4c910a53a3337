"""A captured step casts values where ``fully_shard`` does: at what the root and each unit take and return."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import graphshard
from graphshard.capture import ShardingRules, capture_step
from graphshard.ir import output_values

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _WithPositions(nn.Module):
    """Adds a buffer to what its blocks take, and buffers keep their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.register_buffer("positions", torch.zeros(4, 8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions
        for block in self.blocks:
            x = block(x).float().relu()
        return x


def _products(graph) -> set[torch.dtype]:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    found = [node for target in products for node in graph.find_nodes(op="call_function", target=target)]
    return {source.meta["val"].dtype for node in found for source in node.all_input_nodes}


def test_units_cast_what_they_take():
    with torch.device("meta"):
        model, tokens = _WithPositions(), torch.zeros(2, 4, dtype=torch.long)
    rules = ShardingRules(mesh={"shard": 2}, units=["blocks.*"], mp_policy=BF16)
    captured = capture_step(model, (tokens,), rules=rules, loss=lambda output: output.mean())
    assert _products(captured.joint.graph) == {torch.bfloat16}


@pytest.mark.parametrize("checkpoint", [(), "units"])
def test_a_model_with_such_units_can_be_inspected(checkpoint):
    with torch.device("meta"):
        model, tokens = _WithPositions(), torch.zeros(2, 4, dtype=torch.long)
    report = graphshard.inspect(
        model, (tokens,), mesh={"shard": 2}, units=["blocks.*"], mp_policy=BF16, loss=torch.mean, checkpoint=checkpoint
    )
    assert report.throughput.dtype == "bfloat16"


def test_inputs_are_kept_as_they_are_given():
    """Their cast copy is an activation: the gradient of the first weight reads it."""
    with torch.device("meta"):
        model, x = nn.Linear(8, 4), torch.zeros(32, 8)
    for policy, copied in ((BF16, 2 * 32 * 8), (MixedPrecisionPolicy(), 0)):
        report = graphshard.inspect(model, (x,), mesh={"shard": 2}, mp_policy=policy, loss=lambda output: output.mean())
        assert report.memory.persistent["inputs"] == 4 * 32 * 8
        activations = list(report.memory.categories).index("activations")
        assert report.half("forward").memory[-1].num_bytes[activations] == copied


@pytest.mark.parametrize("casts", [True, False])
def test_inputs_are_not_cast_if_the_policy_says_so(casts):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=casts)

    class Takes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == (torch.bfloat16 if casts else torch.float32)
            return super().forward(x.bfloat16())

    rules = ShardingRules(mesh={"shard": 2}, mp_policy=policy)
    capture_step(Takes(8, 4, device="meta"), (torch.zeros(2, 8, device="meta"),), rules=rules, loss=torch.sum)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_root_and_units_cast_what_they_return(dtype):
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.unit(x)
            assert y.dtype == (dtype or torch.bfloat16)
            return F.linear(y.bfloat16(), self.head.weight)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=dtype)
    with torch.device("meta"):
        model, x = Reads(), torch.zeros(2, 8)
    rules = ShardingRules(mesh={"shard": 2}, units=["unit"], mp_policy=policy)
    captured = capture_step(model, (x,), rules=rules)
    (result,) = output_values(captured.forward.graph)[: captured.num_results]
    assert result.meta["val"].dtype == (dtype or torch.bfloat16)


def test_an_exported_program_casts_its_inputs():
    x = torch.ones(2, 8)
    exported = torch.export.export(nn.Linear(8, 4), (x,))
    report = graphshard.inspect(exported, mesh={"shard": 2}, mp_policy=BF16, loss=torch.mean)
    assert report.throughput.dtype == "bfloat16" and report.memory.persistent["inputs"] == 4 * 2 * 8
