"""What gather extensions compute of a shard in front of its gather moves with it, into buckets and ahead."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from support.cost_cards import round_card
from support.low_precision import Scaled
from support.small_graphs import aten, num_targets, run_pass, run_twice, text_of
from torch import fx, nn

from graphshard import fully_shard
from graphshard.cost import CostModel
from graphshard.cost.cards import LinkClass
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, is_collective, is_wait
from graphshard.ir.rewrite import copy_graph
from graphshard.passes import BucketCollectives, PlanCollectives, ScheduleCollectives
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.provenance import prepared_nodes, shards_behind
from graphshard.testing import CapturedGraphs, capture_graphs

HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)


class ByLargest(Scaled):
    """Codes whose scale is the largest value of all ranks, as float8 weights without precomputed scales."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        largest = funcol.all_reduce(self._data.abs().amax(), "max", mesh)
        return ((self._data / largest * 127).round().to(torch.int8),), largest

    def fsdp_post_all_gather(self, gathered: Any, largest: Any, dtype: Any, *, out: Any = None) -> Any:
        return gathered[0].to(dtype) * (largest / 127), gathered


class ByChance(Scaled):
    """Rounds at random: twice computed, it is another weight."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return ((self._data * 64 + torch.rand_like(self._data)).to(torch.int8),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return gathered[0].to(dtype) / 64, gathered


class Layer(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        for layer in (self.up, self.down):
            layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture(scope="module")
def extended() -> dict[type, CapturedGraphs]:
    return {}


@pytest.fixture
def graphs(fake_group: Callable[..., Any], extended: dict[type, CapturedGraphs]) -> Callable[[type], Any]:
    """The graphs of two layers of a kind, captured once; both halves as copies, with their contexts."""

    def capture(kind: type) -> dict[str, tuple[fx.GraphModule, PassContext]]:
        if kind not in extended:
            mesh = fake_group(2)
            model = nn.Sequential(Layer(kind), Layer(kind))
            for layer in model:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh)
            extended[kind] = capture_graphs(model, torch.ones(4, 8))
        known = extended[kind]
        return {
            "forward": (copy_graph(known.forward), known.context.for_forward()),
            "backward": (copy_graph(known.backward), known.context.for_backward()),
        }

    return capture


def test_golden(graphs, golden):
    gm, ctx = graphs(ByLargest)["forward"]
    golden(text_of(gm, ctx), "bucket_collectives.computed.before")
    run_pass(BucketCollectives(), gm, ctx, *HELD)
    golden(text_of(gm, ctx), "bucket_collectives.computed.after")
    run_pass(ScheduleCollectives(), gm, ctx, *HELD)
    golden(text_of(gm, ctx), "schedule_collectives.computed.after")


@pytest.mark.parametrize("kind", [Scaled, ByLargest])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_pieces_of_a_unit_are_one_gather_and_its_gradients_one_reduction(graphs, kind, half):
    """Codes, scales and biases are of several dtypes. Largest values of a unit are one all-reduce."""
    gm, ctx = graphs(kind)[half]
    first, second = run_twice(BucketCollectives(), gm, ctx, *HELD)
    assert first.report.changed and not second.report.changed
    assert not first.report.skipped
    assert all(shards_behind(one, ctx) for one in gm.graph.nodes if one.target is ALL_GATHER)
    assert num_targets(gm, ALL_GATHER) == 2, "full weights are gathered again, not saved"
    assert num_targets(gm, REDUCE_SCATTER) == (2 if half == "backward" else 0)
    assert num_targets(gm, ALL_REDUCE) == (2 if (kind, half) == (ByLargest, "forward") else 0)
    first, second = run_twice(ScheduleCollectives(), gm, ctx, *HELD, Fact.BUCKETED)
    assert not second.report.changed


def test_golden_of_a_plan(graphs, golden):
    """Latency is expensive: all largest values are one bucket, and so are all codes and biases."""
    gm, ctx = graphs(ByLargest)["forward"]
    card = round_card(intra_node=LinkClass(latency_seconds=1e-3, bandwidth=1e10, efficiency=1.0))
    ctx = replace(ctx, prices=CostModel.of_mesh(card, ctx.mesh))
    first, second = run_twice(PlanCollectives(), gm, ctx, *HELD)
    golden(text_of(gm, ctx) + f"{first.report.planned.plan}\n", "plan_collectives.computed.after")
    assert first.report.changed and not second.report.changed
    sent = [one for one in gm.graph.nodes if is_collective(one)]
    assert [one.target for one in sent] == [ALL_REDUCE, ALL_GATHER]


def test_a_gather_starts_before_the_compute_in_front_of_its_cast(graphs):
    """The second layer's codes travel while the first one computes."""
    gm, ctx = graphs(Scaled)["forward"]
    compute = [node for node in gm.graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
    before = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    assert order[before[-1]] > order[compute[-2]]
    run_pass(PlanCollectives(), gm, replace(ctx, prices=CostModel.of_mesh(round_card(), ctx.mesh)), *HELD)
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    last = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)[-1]
    (first_of_second,) = [node for node in gm.graph.nodes if node.name == compute[-2].name]
    assert order[last] < order[first_of_second]


def test_nothing_is_prepared_without_extensions(captured):
    graphs = captured("two_linears", 2)
    assert not prepared_nodes(graphs.forward, graphs.context.for_forward())


def test_what_is_drawn_at_random_stays_where_it_is(graphs):
    """The gather of such codes is reported as one that serves no unit. In the backward the codes are an input."""
    gm, ctx = graphs(ByChance)["forward"]
    record = run_pass(BucketCollectives(), gm, ctx, *HELD)
    codes = [node for node in gm.graph.nodes if node.target is ALL_GATHER and node.meta["val"].dtype == torch.int8]
    assert len(codes) == 4
    for node in codes:
        assert f"{node.name} (all_gather_into_tensor) serves no single unit" in record.report.skipped
    gm, ctx = graphs(ByChance)["backward"]
    assert not run_pass(BucketCollectives(), gm, ctx, *HELD).report.skipped


def test_gathers_in_flight_are_limited_behind_an_all_reduce_too(graphs):
    """Gathers of codes start behind the all-reduce of their largest values."""

    def most_open(limit: int) -> int:
        gm, ctx = graphs(ByLargest)["forward"]
        ctx = replace(ctx, prices=CostModel.of_mesh(round_card(), ctx.mesh))
        run_pass(PlanCollectives(max_gathers=limit, merge=False, exact_states=10, polishes=False), gm, ctx, *HELD)
        most = open_now = 0
        for node in gm.graph.nodes:
            open_now += node.target is ALL_GATHER
            open_now -= is_wait(node) and node.args[0].target is ALL_GATHER
            most = max(most, open_now)
        return most

    assert most_open(1) == 1 < most_open(0)
