"""Outputs of joint graphs by AOTAutograd's descriptions, and by position where there are none."""

import pytest
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTInput,
    TangentAOTInput,
)

from graphshard.pipeline import joint_outputs

WEIGHT, BIAS, BUFFER, TOKEN = ParamAOTInput("w"), ParamAOTInput("b"), BufferAOTInput("n"), ForwardTokenAOTInput(0)
RAGGED = PlainAOTInput(0)


def _joint(inputs, outputs) -> fx.Graph:
    """``outputs`` are pairs of an input that is returned (or None) and a description."""
    graph = fx.Graph()
    nodes = []
    for index, described in enumerate(inputs):
        nodes.append(graph.placeholder(f"primals_{index + 1}"))
        nodes[-1].meta["desc"] = described
    graph.placeholder("tangents_1").meta["desc"] = TangentAOTInput(PlainAOTOutput(0))
    output = graph.output(tuple(None if index is None else nodes[index] for index, _ in outputs))
    output.meta["desc"] = [described for _, described in outputs]
    return graph


def test_positions_where_nothing_is_described():
    graph = fx.Graph()
    weight, x = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    graph.placeholder("tangents_1")
    graph.output((x, weight, None))
    found = joint_outputs(graph)
    assert found.primals == (weight, x)
    assert (found.num_results, found.own_results) == (1, (0,))
    assert found.gradients == {weight: 1, x: 2}


def test_a_graph_without_tangents_is_none():
    graph = fx.Graph()
    graph.output((graph.placeholder("primals_1"),))
    assert joint_outputs(graph) is None


def test_tokens_and_written_inputs_are_no_results_of_the_model_and_tokens_have_no_gradient():
    graph = _joint(
        [TOKEN, WEIGHT, BUFFER],
        [(0, ForwardTokenAOTOutput(0)), (2, InputMutationAOTOutput(BUFFER)), (1, PlainAOTOutput(0)),
         (1, GradAOTOutput(WEIGHT)), (None, None)],
    )  # fmt: skip
    found = joint_outputs(graph)
    assert (found.num_results, found.own_results) == (3, (2,))
    assert {node.name: index for node, index in found.gradients.items()} == {"primals_2": 3}


@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_subclass_is_several_inputs_with_one_gradient_or_none(has_gradient):
    values = SubclassGetAttrAOTInput(RAGGED, "_values")
    inputs = [values, SubclassGetAttrAOTInput(RAGGED, "_offsets"), SubclassSizeAOTInput(RAGGED, 1), WEIGHT, BIAS]
    own = (0, SubclassGetAttrAOTOutput(GradAOTOutput(RAGGED), "_values")) if has_gradient else (None, None)
    graph = _joint(
        inputs, [(3, PlainAOTOutput(0)), own, (3, GradAOTOutput(WEIGHT)), (4, GradAOTOutput(BIAS))]
    )
    found = {node.name: index for node, index in joint_outputs(graph).gradients.items()}
    assert found == {"primals_4": 2, "primals_5": 3} | ({"primals_1": 1} if has_gradient else {})


def test_results_that_are_subclasses_are_results():
    described = [SubclassGetAttrAOTOutput(PlainAOTOutput(0), name) for name in ("a", "b")]
    graph = _joint([WEIGHT], [*((0, one) for one in described), (0, GradAOTOutput(WEIGHT))])
    assert joint_outputs(graph).own_results == (0, 1)
