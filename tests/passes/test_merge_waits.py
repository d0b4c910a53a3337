"""merge_waits: one wait for each result of a collective."""

import operator

import pytest
import torch
from support.all_ranks import run_values
from support.small_graphs import (
    GROUP,
    GraphBuilder,
    aten,
    num_targets,
    one_axis,
    run_pass,
    run_twice,
    text_of,
)

from graphshard.ir.collectives import ALL_REDUCE, REDUCE_SCATTER, WAIT, is_collective, repeated_waits
from graphshard.ir.rewrite import copy_graph
from graphshard.passes import MergeWaits
from graphshard.pipeline.context import PassContext

c10d = torch.ops._c10d_functional
differentiable = torch.ops._c10d_functional_autograd
CONTEXT = PassContext(mesh=one_axis(2))


def _counts(*, derivatives=0, collectives=0, waits=0):
    return {"derivatives dropped": derivatives, "collectives merged": collectives, "waits merged": waits}


def _read_three_times():
    """A reduction with two waits, the second of which is waited for again."""
    build = GraphBuilder()
    source, weight = build.input("primals_1", 6, 4), build.input("primals_2", 4, 5)
    reduced = build(REDUCE_SCATTER, build(aten.sin.default, source), "sum", 2, GROUP)
    first = build(aten.mm.default, build(WAIT, reduced), weight)
    waited = build(WAIT, reduced)
    second = build(aten.mm.default, waited, weight)
    third = build(aten.cos.default, build(WAIT, waited))
    return build.finish(first, second, third)


def _coalesced():
    build = GraphBuilder()
    both = build(
        c10d.reduce_scatter_tensor_coalesced.default,
        [build.input("primals_1", 6, 2), build.input("primals_2", 4, 2)], "sum", 2, GROUP,
    )  # fmt: skip
    items = [build(operator.getitem, both, index) for index in (0, 1)]
    waits = [build(WAIT, item) for item in (*items, items[0])]
    return build.finish(*(build(aten.sin.default, wait) for wait in waits))


def assert_same_results(plain, merged):
    torch.manual_seed(0)
    shapes = [node.meta["val"].shape for node in plain.graph.find_nodes(op="placeholder")]
    inputs = [[torch.randn(shape).double() for shape in shapes] for _ in range(2)]
    before, after = (run_values(graph, inputs, CONTEXT.mesh) for graph in (plain, merged))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_golden(golden):
    gm = _read_three_times()
    golden(text_of(gm, CONTEXT), "merge_waits.before")
    record = run_pass(MergeWaits(), gm, CONTEXT)
    golden(text_of(gm, CONTEXT), "merge_waits.after")
    assert record.report.counts == _counts(waits=2)


def test_one_wait_each_is_left_alone(captured):
    graphs = captured("two_linears", 2)
    for gm, ctx in (
        (graphs.forward, graphs.context.for_forward()),
        (graphs.backward, graphs.context.for_backward()),
    ):
        record = run_pass(MergeWaits(), gm, ctx)
        assert not record.report.changed and record.report.counts == _counts()


def test_second_run_changes_nothing():
    first, second = run_twice(MergeWaits(), _read_three_times(), CONTEXT)
    assert first.report.changed and not second.report.changed


def test_collectives_lose_derivatives_of_their_own():
    """The joint graph has the gradient; the passes behind know the plain ops."""
    build = GraphBuilder()
    source = build.input("primals_1", 6, 4)
    gathered = build(differentiable.all_gather_into_tensor.default, source, 2, GROUP)
    reduced = build(differentiable.reduce_scatter_tensor.default, source, "sum", 2, GROUP)
    exchanged = build(differentiable.all_to_all_single.default, source, [3, 3], [3, 3], GROUP)
    gm = build.finish(*(build(WAIT, value) for value in (gathered, reduced, exchanged)))
    first, second = run_twice(MergeWaits(), gm, CONTEXT)
    assert first.report.changed and first.report.counts == _counts(derivatives=3)
    assert not second.report.changed
    plain = [c10d.all_gather_into_tensor.default, REDUCE_SCATTER, c10d.all_to_all_single.default]
    assert [node.target for node in gm.graph.nodes if is_collective(node)] == plain


def test_items_of_a_coalesced_collective_are_told_apart():
    gm = _coalesced()
    assert run_pass(MergeWaits(), gm, CONTEXT).report.counts["waits merged"] == 1
    assert [len(node.users) for node in gm.graph.nodes if node.target is WAIT] == [2, 1]


def test_memory_that_a_collective_writes_to_may_be_waited_for_again():
    build = GraphBuilder()
    memory = build(aten.sin.default, build.input("primals_1", 6, 4))
    waits = []
    first = build(c10d.all_reduce_.default, memory, "sum", GROUP)
    for source in (memory, first):
        waits.append(build(WAIT, source))
        waits.append(build(WAIT, waits[-1]))
        build(c10d.all_reduce_.default, memory, "sum", GROUP)
        waits.append(build(WAIT, source))
    gm = build.finish(*waits)
    assert repeated_waits(gm.graph) == {}
    assert not run_pass(MergeWaits(), gm, CONTEXT).report.changed


def test_parity():
    gm = _read_three_times()
    merged = copy_graph(gm)
    run_pass(MergeWaits(), merged, CONTEXT)
    assert (num_targets(gm, WAIT), num_targets(merged, WAIT)) == (3, 1)
    assert_same_results(gm, merged)


# equal collectives ---------------------------------------------------------------------------------


def _reduced_twice(*, between=None, returned=False, drawn=False, op="sum"):
    """A reduction of what is computed, and again through views; each is read once, or returned."""
    build = GraphBuilder()
    source = build.input("primals_1", 6, 4)
    value = build(aten.bernoulli.default, source) if drawn else build(aten.sin.default, source)
    waits = []
    for reduce_op in ("sum", op):
        seen = build(aten.bernoulli.default, source) if drawn else build(aten.alias.default, value)
        waits.append(build(WAIT, build(ALL_REDUCE, seen, reduce_op, GROUP)))
        if between is not None:
            build(between, value, 2.0)
    return build.finish(*(wait if returned else build(aten.cos.default, wait) for wait in waits))


def test_an_equal_collective_is_not_issued_again():
    gm = _reduced_twice()
    plain = copy_graph(gm)
    record = run_pass(MergeWaits(), gm, CONTEXT)
    assert record.report.counts == _counts(collectives=1, waits=1)
    assert (num_targets(gm, ALL_REDUCE), num_targets(gm, WAIT), num_targets(gm, aten.clone.default)) == (1, 1, 0)
    assert_same_results(plain, gm)


def test_a_result_that_is_returned_twice_is_copied():
    """A caller may write to either one."""
    gm = _reduced_twice(returned=True)
    plain = copy_graph(gm)
    assert run_pass(MergeWaits(), gm, CONTEXT).report.counts == _counts(collectives=1, waits=1)
    first, second = gm.graph.output_node().args[0]
    assert first.target is WAIT and second.target is aten.clone.default and second.args == (first,)
    assert_same_results(plain, gm)


@pytest.mark.parametrize(
    "different", [{"op": "max"}, {"drawn": True}, {"between": aten.mul_.Tensor}], ids=lambda each: next(iter(each))
)
def test_collectives_of_other_values_stay(different):
    gm = _reduced_twice(**different)
    assert not run_pass(MergeWaits(), gm, CONTEXT).report.changed
    assert num_targets(gm, ALL_REDUCE) == 2


def test_equal_coalesced_collectives_share_their_items():
    build = GraphBuilder()
    inputs = [build.input("primals_1", 6, 2), build.input("primals_2", 4, 2)]
    outputs = []
    for index in (0, 1, 0):
        both = build(c10d.reduce_scatter_tensor_coalesced.default, inputs, "sum", 2, GROUP)
        outputs.append(build(aten.sin.default, build(WAIT, build(operator.getitem, both, index))))
    gm = build.finish(*outputs)
    plain = copy_graph(gm)
    assert run_pass(MergeWaits(), gm, CONTEXT).report.counts == _counts(collectives=2, waits=1)
    assert (num_targets(gm, WAIT), num_targets(gm, operator.getitem)) == (2, 2)
    assert_same_results(plain, gm)
