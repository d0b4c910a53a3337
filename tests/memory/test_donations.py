"""Which saved values Inductor may write over: what AOTAutograd donates, less what outlives the step."""

import operator
from types import SimpleNamespace

import pytest
import torch
from support.small_graphs import GraphBuilder, ParameterSpec, aten, unshard
from torch import fx
from torch._guards import TracingContext, tracing

from graphshard.capture.capture_step import capture_step
from graphshard.capture.rules import ShardingRules
from graphshard.ir.piece_ops import KEEP_PIECE, SPREAD
from graphshard.memory.donations import (
    donated_inputs,
    mark_donated,
    outputs_with_parameters,
    take_back_donations,
)
from graphshard.memory.model import DONATED

T = aten.t.default


def _forward():
    """Its result and what it saves: by name."""
    build = GraphBuilder()
    shard, x = build.input("primals_1", 4, 4), build.input("primals_2", 8, 4)
    full = unshard(build, shard, "w", ParameterSpec((8, 4)), 2)
    pieces = build(KEEP_PIECE, full, 0, 2, "shard_group")
    values = {
        "result": build(aten.sin.default, x),
        "full": full,
        "view of the full": build(T, full),
        "copy": build(operator.getitem, pieces, 0),
        "piece": build(operator.getitem, pieces, 1),
        "spread": build(SPREAD, full, 0, 2, "shard_group"),
        "own": build(aten.cos.default, full),
        "input": build(T, x),
        "gradient": build(aten.exp.default, x),
        "twice": build(aten.tan.default, x),
    }
    values["view of the result"] = build(aten.view.default, values["result"], [-1])
    values["twice as a view"] = build(T, values["twice"])
    return build.finish(*values.values()), {name: value.name for name, value in values.items()}


def _backward(forward: fx.GraphModule, names: dict[str, str]) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = {}
    for node in forward.graph.output_node().args[0][1:]:
        inputs[node.name] = graph.placeholder(node.name)
        inputs[node.name].meta["val"] = node.meta["val"]
    graph.output((inputs[names["gradient"]],))
    return fx.GraphModule(torch.nn.Module(), graph)


def _marked(backward: fx.GraphModule) -> list[str]:
    return [node.name for node in backward.graph.find_nodes(op="placeholder") if node.meta.get(DONATED)]


def test_full_parameters_views_and_pieces_of_them_are_told():
    forward, names = _forward()
    held = ("full", "view of the full", "copy", "piece", "spread")
    assert outputs_with_parameters(forward) == {names[name] for name in held}


def test_what_shares_memory_with_anything_that_lives_on_is_not_donated():
    forward, names = _forward()
    backward = _backward(forward, names)
    mark_donated(forward, backward, 1)
    assert _marked(backward) == [names["own"]]


def test_what_is_taken_back_is_not_donated_and_the_rest_is_marked():
    forward, names = _forward()
    backward = _backward(forward, names)
    inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    given = [inputs.index(names[name]) for name in ("full", "own", "twice", "twice as a view")]
    context = TracingContext(None)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=given)
    with tracing(context):
        assert donated_inputs() == tuple(given)
        take_back_donations(backward, outputs_with_parameters(forward))
        assert donated_inputs() == (inputs.index(names["own"]),)
        assert _marked(backward) == [names["own"]]
        again = _backward(forward, names)
        take_back_donations(again, {names["own"]})
        assert donated_inputs() == () and _marked(again) == []


@pytest.mark.parametrize("metadata", [None, SimpleNamespace(bw_donated_idxs=None)])
def test_nothing_is_donated_where_autograd_says_nothing(metadata):
    forward, names = _forward()
    backward = _backward(forward, names)
    assert donated_inputs() == ()
    context = TracingContext(None)
    context.fw_metadata = metadata
    with tracing(context):
        take_back_donations(backward, ())
        assert donated_inputs() == ()
    assert _marked(backward) == []


def test_a_captured_backward_has_the_marks():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    rules = ShardingRules(mesh={"shard": 2}, units=["0", "2"])
    step = capture_step(model, [torch.randn(4, 8)], rules=rules, loss=lambda result: result.square().mean())
    saved = [node for node in step.backward.graph.find_nodes(op="placeholder") if node.meta.get(DONATED)]
    assert saved and not any(node.name.startswith(("primals", "tangents", "unshard")) for node in saved)
