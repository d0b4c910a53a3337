"""Compute that moves beside collectives which compute reads soon: what moves, what must not, what it brings."""

import importlib
import json
from dataclasses import replace

import pytest
import torch
from support.planner_graphs import MESH, PRICES, NodePrices, inputs_of, random_graph
from support.small_graphs import GraphBuilder, aten, products_and_sums, tensor_parallel_backward
from support.thorough import drawn

import graphshard
from graphshard.errors import PlanError
from graphshard.ir.collectives import ALL_REDUCE, REDUCE_SCATTER, WAIT, is_collective
from graphshard.pipeline.context import KnownPlan
from graphshard.planner import choose_moves as moves
from graphshard.planner.choose_moves import moved_compute
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.plan_graph import measured_peak, plan_graph
from graphshard.planner.schedule_graph import schedule_with_prices
from graphshard.planner.search.solve import plan
from graphshard.testing import run_on_all_ranks

#: The module; its package shows the function of the same name.
graph_plan = importlib.import_module("graphshard.planner.plan_graph")

#: A product takes 1.28 s, anything else 0.01 s, a sum over the tensor group 0.556 s.
GROUP = "tensor_group"


def _sum(build, value):
    return build(WAIT, build(ALL_REDUCE, value, "sum", GROUP))


def _moved(gm, prices=PRICES):
    return moved_compute(gm, problem_of_graph(gm, prices))


def test_gradients_of_weights_move_behind_the_start():
    gm = tensor_parallel_backward()
    assert products_and_sums(gm) == "gasr" * 3
    moving, moved = _moved(gm)
    assert products_and_sums(moving.gm) == "asgr" * 3
    collectives = [node.target for node in gm.graph.nodes if is_collective(node)]
    assert collectives == [REDUCE_SCATTER, ALL_REDUCE] * 3
    assert moved == [(1, "aten.mm.default", 0, (0,)), (3, "aten.mm.default", 2, (2,)), (5, "aten.mm.default", 4, (4,))]
    assert products_and_sums(gm) == "gasr" * 3, "the graph stays as it is"


def test_a_plan_with_moved_compute_hides_the_sums():
    gm = tensor_parallel_backward()
    came, planned = plan_graph(gm, PRICES, move_compute=False), plan_graph(gm, PRICES)
    assert products_and_sums(came.gm) == "gasr" * 3 and came.plan.num_moved == 0 and came.known.moves == ()
    assert planned.plan.num_moved == 3 and products_and_sums(planned.gm) == "asgr" * 3
    shown = [bucket for bucket in planned.plan.buckets if bucket.kind == "all_reduce"]
    assert len(shown) == 3 and not any(bucket.exposed_seconds for bucket in shown)
    assert planned.plan.seconds < came.plan.seconds - 2 * 0.5
    assert planned.plan.unplanned_seconds == came.plan.unplanned_seconds
    assert planned.plan.bounds.seconds <= planned.plan.seconds < came.plan.bounds.seconds
    assert "3 pieces of compute moved beside collectives" in str(planned.plan)
    assert "moved" not in str(came.plan)
    again = plan_graph(planned.gm, PRICES)
    assert again.plan.num_moved == 0 and products_and_sums(again.gm) == products_and_sums(planned.gm)


def test_only_as_much_moves_as_a_flight_takes():
    """Two gradients of weights stand in front of each sum, and the nearer one is enough."""
    build = GraphBuilder()
    grad, weight = build.input("tangents_0", 8, 8), build.input("primals_0", 8, 8)
    turned = build(aten.t.default, grad)
    products = [build(aten.mm.default, turned, weight) for _ in range(2)]
    summed = build(aten.relu.default, _sum(build, build(aten.mm.default, grad, weight)))
    gm = build.finish(*(build.reduction(product, 2) for product in products), summed)
    assert products_and_sums(gm) == "ggasr"
    moving, moved = _moved(gm)
    assert products_and_sums(moving.gm) == "gasgr" and len(moved) == 1
    slow = NodePrices(latency=1.5, bandwidth=2000.0, copies=50_000.0)
    moving, moved = _moved(gm, slow)
    assert products_and_sums(moving.gm) == "asggr" and len(moved) == 2


def test_no_flight_is_left_with_less_than_it_takes():
    """Between the second sum and its reader stands nothing, and what hides the first is not taken from it."""
    build = GraphBuilder()
    grad, weight = build.input("tangents_0", 8, 8), build.input("primals_0", 8, 8)
    product = build(aten.mm.default, build(aten.t.default, grad), weight)
    first = _sum(build, build(aten.mm.default, grad, weight))
    second = _sum(build, build(aten.mm.default, build(aten.relu.default, first), weight))
    gm = build.finish(build.reduction(product, 2), build(aten.relu.default, second))
    moving, moved = _moved(gm)
    assert products_and_sums(moving.gm) == "asgrasr" and [move.flight for move in moved] == [0]


@pytest.mark.parametrize(("num_between", "moves_far"), [(moves._REACH - 1, True), (moves._REACH, False)])
def test_compute_moves_past_few_flights(num_between, moves_far):
    """Sums that small products hide stand between a large one and the sum that nothing hides."""
    build = GraphBuilder()
    grad, weight = build.input("tangents_0", 8, 8), build.input("primals_0", 8, 8)
    large = build(aten.mm.default, build(aten.t.default, grad), weight)
    for _ in range(num_between):
        started = build(ALL_REDUCE, build(aten.mm.default, grad, weight), "sum", GROUP)
        beside = build(aten.mm.default, grad, weight)
        grad = build(aten.add.Tensor, build(WAIT, started), beside)
    last = _sum(build, build(aten.mm.default, grad, weight))
    gm = build.finish(build.reduction(large, 2), build(aten.relu.default, last))
    found = _moved(gm)
    assert (found is not None) is moves_far
    if found is not None:
        assert products_and_sums(found[0].gm).endswith("asgr")


def test_elementwise_work_does_not_move_alone():
    """It would be fused with less; with a product it does."""

    class DearElementwise(NodePrices):
        def compute_seconds(self, gm):
            found = super().compute_seconds(gm)
            return {node: 9.0 if node.target is aten.exp.default else each for node, each in found.items()}

    prices = DearElementwise(latency=0.3, bandwidth=2000.0, copies=50_000.0)
    build = GraphBuilder()
    grad, weight = build.input("tangents_0", 8, 8), build.input("primals_0", 8, 8)
    alone = build(aten.exp.default, grad)
    summed = build(aten.relu.default, _sum(build, build(aten.mm.default, grad, weight)))
    assert _moved(build.finish(build.reduction(alone, 2), summed), prices) is None
    gm = tensor_parallel_backward(extra=lambda build, product: build(aten.exp.default, product))
    moving, _ = _moved(gm, prices)
    names = [node.name for node in moving.gm.graph.nodes]
    assert names.index("all_reduce_default") < names.index("mm_default") < names.index("exp_default")


@pytest.mark.parametrize("needs_it", [False, True])
def test_a_group_moves_right_behind_the_start_or_where_it_can(needs_it):
    """What stands in front of the reader may be one kernel with it."""
    build = GraphBuilder()
    grad, weight = build.input("tangents_0", 8, 8), build.input("primals_0", 8, 8)
    product = build(aten.mm.default, build(aten.t.default, grad), weight)
    started = build(ALL_REDUCE, build(aten.mm.default, grad, weight), "sum", GROUP)
    behind = build(aten.cos.default, grad)
    both = build(aten.add.Tensor, product, behind if needs_it else product)
    summed = build(aten.relu.default, build(WAIT, started))
    gm = build.finish(build.reduction(both, 2), build(aten.mul.Tensor, summed, behind))
    moving, _ = _moved(gm)
    names = [node.name for node in moving.gm.graph.nodes]
    group = ["mm_default", "add_tensor"]
    between = ["cos_default", *group] if needs_it else [*group, "cos_default"]
    expected = ["all_reduce_default", *between, "relu_default"]
    assert [name for name in names if name in expected] == expected


def test_compute_that_is_ready_moves_in_front_of_the_reader():
    """A forward that is computed again behind a sum reads nothing of it, and a gather."""
    build = GraphBuilder()
    grad, saved = build.input("tangents_0", 8, 8), build.input("primals_0", 8, 8)
    shard = build.input("primals_1", 4, 8)
    summed = _sum(build, build(aten.mm.default, grad, saved))
    read = build(aten.relu.default, summed)
    again = build(aten.mm.default, saved, build.gather(shard, 2))
    gm = build.finish(build(aten.mm.default, read, build(aten.relu.default, again)))
    moving, moved = _moved(gm)
    names = [node.name for node in moving.gm.graph.nodes]
    assert names.index("all_reduce_default") < names.index("mm_default_1") < names.index("relu_default")
    assert moved == [(0, "aten.mm.default", 1, (1,))]
    assert plan_graph(gm, PRICES).plan.seconds < plan_graph(gm, PRICES, move_compute=False).plan.seconds - 0.5


def _in_place(build, product):
    build(aten.add_.Tensor, product, 1.0)
    return product


def _random(build, product):
    return build(aten.rand_like.default, product)


def _method(build, product):
    node = build.graph.call_method("cosh", (product,))
    node.meta["val"] = product.meta["val"]
    return node


def _summed(build, product):
    """It makes a flight of its own, which compute reads at once."""
    return build(aten.relu.default, _sum(build, product))


@pytest.mark.parametrize("extra", [_in_place, _random, _method, _summed])
def test_what_must_keep_its_place(extra):
    """Gradients of weights stay in front of those of activations."""
    gm = tensor_parallel_backward(extra=extra)
    planned = plan_graph(gm, PRICES)
    assert products_and_sums(planned.gm).replace("s", "").replace("r", "") == "ga" * 3
    if extra is not _summed:  # whose flight takes the gradient of the activations
        assert _moved(gm) is None


def test_nothing_moves_whose_inputs_are_written_later():
    build = GraphBuilder()
    grad, weight = build.input("tangents_0", 8, 8), build.input("primals_0", 8, 8)
    scaled = build(aten.mul.Tensor, grad, 2.0)
    product = build(aten.mm.default, build(aten.t.default, scaled), weight)
    build(aten.add_.Tensor, scaled, 1.0)
    summed = build(aten.relu.default, _sum(build, build(aten.mm.default, scaled, weight)))
    gm = build.finish(build.reduction(product, 2), summed)
    assert _moved(gm) is None and products_and_sums(plan_graph(gm, PRICES).gm) == products_and_sums(gm)


def test_nothing_moves_for_less_than_it_is_worth(monkeypatch):
    gm = tensor_parallel_backward()
    assert _moved(gm, NodePrices(latency=1e-9, bandwidth=1e9, copies=1e9)) is None
    came, moved = plan_graph(gm, PRICES, move_compute=False).plan, plan_graph(gm, PRICES).plan
    saved = 1 - moved.bounds.seconds / came.bounds.seconds
    asked = []
    monkeypatch.setattr(graph_plan, "plan", lambda *args, **more: asked.append(1) or plan(*args, **more))
    monkeypatch.setattr(graph_plan, "WORTH", 1 - saved * 1.01)
    assert plan_graph(gm, PRICES).plan.num_moved == 0 and len(asked) == 1
    monkeypatch.setattr(graph_plan, "WORTH", 1 - saved * 0.8)
    assert plan_graph(gm, PRICES).plan.num_moved == 3
    monkeypatch.setattr(moves, "WORTH", 0.5)
    assert _moved(gm) is None


def test_a_graph_without_such_collectives_is_not_copied(monkeypatch):
    monkeypatch.setattr(moves, "Moving", None)
    build = GraphBuilder()
    value = build.input("primals_0", 8, 8)
    for place in range(3):
        value = build(aten.mm.default, value, build.gather(build.input(f"primals_{place + 1}", 4, 8), 2))
    gm = build.finish(value, build.reduction(build(aten.t.default, value), 2))
    assert plan_graph(gm, PRICES).plan.num_moved == 0


def test_within_a_budget_that_moves_would_break_nothing_moves():
    """What the gradient of a weight reads lives on until it runs."""
    gm = tensor_parallel_backward(4, extra=lambda build, product: build(aten.sum.dim_IntList, product, [1]))
    came, free = plan_graph(gm, PRICES, move_compute=False), plan_graph(gm, PRICES)
    assert free.plan.peak_bytes > came.plan.peak_bytes
    budget = free.plan.peak_bytes - 1
    within = plan_graph(gm, PRICES, memory_budget=budget).plan
    assert within.peak_bytes <= budget and within.seconds <= came.plan.seconds
    assert plan_graph(gm, PRICES, memory_budget=free.plan.peak_bytes).plan.num_moved == 4


def test_another_rank_follows():
    """Its graph has other names, and its card says that nothing can be hidden."""
    gm, other = tensor_parallel_backward(), tensor_parallel_backward()
    for node in other.graph.nodes:
        if node.op == "call_function":
            node._rename(f"other_{node.name}")
    planned = plan_graph(gm, PRICES)
    known = KnownPlan.from_dict(json.loads(json.dumps(planned.known.to_dict())))
    assert known == planned.known and len(known.moves) == 3
    slower = NodePrices(latency=9.0, bandwidth=2000.0, copies=50_000.0)
    followed = plan_graph(other, slower, known=known)
    assert followed.known == planned.known and followed.plan.num_moved == 3
    assert products_and_sums(followed.gm) == products_and_sums(planned.gm)


@pytest.mark.parametrize(
    "wrong",
    [
        (1, "aten.mm.default", 7, (0,)),
        (1, "aten.conv.default", 0, (0,)),
        (99, "aten.mm.default", 0, (0,)),
        (0, "aten.mm.default", 0, (0,)),
        (1, "aten.mm.default", 1, (0,)),
        (1, "aten.mm.default", 0, ()),
    ],
)
def test_a_plan_that_moves_what_is_not_there_cannot_be_followed(wrong):
    """No such product; no such collective; one without a flight; the product that the sum reads; other collectives."""
    gm = tensor_parallel_backward()
    known = replace(plan_graph(gm, PRICES).known, moves=(wrong,))
    with pytest.raises(PlanError, match=rf"moves {wrong[1]} number {wrong[2]} beside collective {wrong[0]}"):
        plan_graph(gm, PRICES, known=known)


#: Seeds of random graphs whose compute moves, and of others.
MOVED, OTHERS = (1, 10, 11, 12, 19, 21, 23, 26, 29, 30), (0, 2, 14, 18, 28, 37)


@pytest.mark.parametrize("seed", [*drawn(MOVED), *drawn(OTHERS)])
def test_moved_compute_gives_equal_results_and_is_no_slower(seed):
    gm = random_graph(seed, num_steps=14)
    came, planned = plan_graph(gm, PRICES, move_compute=False), plan_graph(gm, PRICES)
    assert bool(planned.plan.num_moved) is (seed in MOVED)
    assert planned.plan.seconds <= came.plan.seconds * (0.99 if seed in MOVED else 1 + 1e-9)
    inputs = inputs_of(gm, seed)
    expected = run_on_all_ranks(gm, inputs, MESH)
    found = run_on_all_ranks(planned.gm, inputs, MESH)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert planned.plan.peak_bytes == measured_peak(planned.gm, None)


@pytest.mark.parametrize("seed", drawn(MOVED[::2]))
def test_moves_do_not_depend_on_names(seed):
    gm, renamed = random_graph(seed, num_steps=14), random_graph(seed, num_steps=14, rename="a")
    one, other = plan_graph(gm, PRICES), plan_graph(renamed, PRICES)
    assert one.known == other.known and one.plan.seconds == other.plan.seconds


def test_both_entries_leave_compute_where_it_is_if_asked():
    gm, kept = tensor_parallel_backward(), tensor_parallel_backward()
    assert schedule_with_prices(kept, PRICES, move_compute=False).num_moved == 0
    assert products_and_sums(kept) == "gasr" * 3
    assert schedule_with_prices(gm, PRICES).num_moved == 3 and products_and_sums(gm) == "asgr" * 3
    large = tensor_parallel_backward(width=2048)
    options = {"hardware": "h100-sxm", "groups": {GROUP: 2, "shard_group": 2}}
    assert graphshard.schedule_graph(large, **options).num_moved == 3 and products_and_sums(large) == "asgr" * 3
    large = tensor_parallel_backward(width=2048)
    assert graphshard.schedule_graph(large, **options, move_compute=False).num_moved == 0
    assert products_and_sums(large) == "gasr" * 3
