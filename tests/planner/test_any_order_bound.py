"""The bound that holds in whatever order compute runs."""

import random

import pytest
from support.planner_graphs import PRICES, random_graph
from support.small_graphs import GraphBuilder, aten, tensor_parallel_backward
from support.thorough import drawn

from graphshard.ir.collectives import ALL_REDUCE, WAIT
from graphshard.ir.rewrite import apply_order, copy_graph
from graphshard.planner.any_order_bound import any_order_seconds
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.plan_graph import plan_graph
from graphshard.units import time_text

#: A product takes 1.28 s, anything else 0.01 s, a collective 0.3 s and 0.001 s for two bytes of its larger side.
PRODUCT, SMALL, SUM = 1.28, 0.01, 0.3 + 512 / 2000


def _bound(gm):
    return any_order_seconds(gm, problem_of_graph(gm, PRICES))


def _shuffled(gm, seed):
    """The graph with its nodes in another order that their data allow."""
    dice, copied = random.Random(seed), copy_graph(gm)
    waiting = [node for node in copied.graph.nodes if node.op not in ("placeholder", "output")]
    order = copied.graph.find_nodes(op="placeholder")
    placed = set(order)
    while waiting:
        ready = [node for node in waiting if placed.issuperset(node.all_input_nodes)]
        node = dice.choice(ready)
        order.append(node)
        placed.add(node)
        waiting.remove(node)
    apply_order(copied.graph, [*order, copied.graph.output_node()])
    return copied


@pytest.mark.parametrize("seed", drawn(range(16)))
def test_no_order_beats_it(seed):
    """Plans of small graphs are the best there are; which row of collectives is looked at depends on the order."""
    gm = random_graph(seed, num_steps=6)
    orders = [_shuffled(gm, order) for order in range(6)]
    plans = [plan_graph(order, PRICES, move_compute=False).plan for order in orders]
    bounds = [_bound(order) for order in orders]
    assert bounds == [plan.any_order_seconds for plan in plans]
    assert 0.0 < max(bounds) <= min(plan.seconds for plan in plans) + 1e-9


def test_a_chain_takes_all_of_its_time():
    """Product, sum, relu, product, sum, relu: nothing runs beside anything."""
    build = GraphBuilder()
    value = build.input("primals_0", 8, 8)
    for _ in range(2):
        product = build(aten.mm.default, value, value)
        value = build(aten.relu.default, build(WAIT, build(ALL_REDUCE, product, "sum", "tensor_group")))
    assert _bound(build.finish(value)) == pytest.approx(2 * (PRODUCT + SUM + SMALL))


@pytest.mark.parametrize(("num_beside", "rest"), [(0, 2 * SUM), (30, 2 * SUM - 0.3), (120, 0.0)])
def test_what_may_run_beside_collectives_in_a_row_does_so_once(num_beside, rest):
    build = GraphBuilder()
    value = beside = build.input("primals_0", 8, 8)
    for _ in range(num_beside):
        beside = build(aten.relu.default, beside)
    for _ in range(2):
        products = [build(aten.mm.default, value, value) for _ in range(2)]
        summed = build(aten.mm.default, *products)
        value = build(aten.relu.default, build(WAIT, build(ALL_REDUCE, summed, "sum", "tensor_group")))
    gm = build.finish(value, beside)
    assert _bound(gm) == pytest.approx(6 * PRODUCT + (2 + num_beside) * SMALL + rest)


def test_first_and_last():
    """The first product needs a gather, and behind the last one a reduction is left."""
    build = GraphBuilder()
    whole = build.gather(build.input("primals_0", 4, 8), 2)
    first = build(aten.mm.default, build(aten.t.default, whole), whole)
    gm = build.finish(*(build.reduction(build(aten.mm.default, first, first), 2) for _ in range(4)))
    assert _bound(gm) == pytest.approx(SUM + 5 * PRODUCT + SUM)


def test_a_link_that_is_busy_all_the_time():
    build = GraphBuilder()
    shards = [build.input(f"primals_{place}", 4, 8) for place in range(12)]
    value = build.input("primals_12", 8, 8)
    for shard in shards:
        value = build(aten.add.Tensor, value, build.gather(shard, 2))
    merged = 0.3 + 12 * 512 / 2000
    assert _bound(build.finish(value)) == pytest.approx(merged + SMALL, abs=2 * SMALL)


def test_plans_say_how_far_they_are_from_it():
    moved = plan_graph(tensor_parallel_backward(), PRICES).plan
    came = plan_graph(tensor_parallel_backward(), PRICES, move_compute=False).plan
    assert moved.any_order_seconds == came.any_order_seconds <= moved.seconds
    share = 100 * (moved.seconds / moved.any_order_seconds - 1)
    text = f"at least {time_text(moved.any_order_seconds)} in any: {share:.2f} %"
    assert text in str(moved) and "with compute in this order" in str(came)


def test_a_graph_without_compute_takes_nothing():
    build = GraphBuilder()
    gm = build.finish(build.input("primals_0", 2, 2))
    assert _bound(gm) == 0.0
    assert "in any" not in str(plan_graph(gm, PRICES).plan)
