"""What may write to a shard, and cannot be read, keeps its gather in place."""

import operator

import pytest
import torch
from support.planner_graphs import PRICES
from support.small_graphs import GraphBuilder, aten
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

from graphshard.ir.collectives import ALL_GATHER
from graphshard.ir.mutation import base_of, writes_of
from graphshard.planner.schedule_graph import schedule_with_prices


def _name(value):
    """The same in every process, for the names of tests."""
    return "-".join(map(_name, value)) if isinstance(value, tuple) else getattr(value, "__name__", value)


def _some_function(value, number):
    return value.add_(number)


class _Module(torch.nn.Module):
    def forward(self, value):
        return value.add_(1.0)


def _graph(op, target, *, through=None, kwargs=None):
    """A product, something that is given a shard, and a product with the gathered shard."""
    build = GraphBuilder()
    x, shard = build.input("primals_0", 8, 8), build.input("primals_1", 4, 8)
    value = build(aten.relu.default, build(aten.mm.default, x, x))
    given = shard
    if through is not None:
        given = build.graph.create_node(*through, (shard,))
        given.meta["val"] = shard.meta["val"]
    arguments = () if kwargs else (given,) if op == "call_module" else (given, 1.0)
    named = {"kwargs": {"pointer": given}, "grid": [(1, 1, 1)]} if kwargs else {}
    node = build.graph.create_node(op, target, arguments, named)
    node.meta["val"] = None if kwargs else shard.meta["val"]
    build.graph.output([build(aten.mm.default, value, build.gather(shard, 2)), node])
    root = torch.nn.Module()
    root.part = _Module()
    return fx.GraphModule(root, build.graph), node


WRITERS = [
    ("call_method", "add_"),
    ("call_method", "__iadd__"),
    ("call_function", operator.iadd),
    ("call_function", torch.Tensor.add_),
    ("call_function", torch.relu_),
    ("call_function", torch.batch_norm),
    ("call_function", _some_function),
    ("call_module", "part"),
]


def _is_behind(gm, node):
    order = {each.name: place for place, each in enumerate(gm.graph.nodes)}
    (gather,) = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    return order[gather.name] > order[node.name]


@pytest.mark.parametrize(("op", "target"), WRITERS, ids=_name)
def test_what_may_write_to_a_shard_keeps_its_gather_behind_it(op, target):
    gm, node = _graph(op, target)
    plan = schedule_with_prices(gm, PRICES)
    assert _is_behind(gm, node) and not plan.buckets
    (note,) = plan.notes
    assert note.endswith("what a method, a module or a function without a schema may write to in place")


def test_a_kernel_that_writes_keeps_a_gather_in_place():
    gm, node = _graph("call_function", triton_kernel_wrapper_mutation, kwargs=True)
    (shard,) = node.all_input_nodes
    assert writes_of(gm.graph).possible == {shard} and not writes_of(gm.graph).known


THROUGH = [("call_method", "view_as"), ("call_function", torch.t), ("call_module", "part")]


@pytest.mark.parametrize("through", THROUGH, ids=_name)
def test_a_write_through_what_may_be_a_view_is_one_to_what_it_looks_at(through):
    gm, node = _graph("call_function", aten.add_.Tensor, through=through)
    view, shard = node.args[0], node.args[0].args[0]
    assert base_of(node) == view and shard in writes_of(gm.graph).all
    schedule_with_prices(gm, PRICES)
    assert _is_behind(gm, node)


@pytest.mark.parametrize(
    ("op", "target"),
    [("call_method", "mul"), ("call_function", operator.mul), ("call_function", torch.mul)],
    ids=_name,
)
def test_what_only_reads_a_shard_does_not(op, target):
    gm, node = _graph(op, target)
    plan = schedule_with_prices(gm, PRICES)
    assert not plan.notes and not _is_behind(gm, node)
