"""merge_waits: one wait for each result of a collective."""

import operator

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

from graphshard.ir.collectives import REDUCE_SCATTER, WAIT, is_collective, repeated_waits
from graphshard.ir.rewrite import copy_graph
from graphshard.passes import MergeWaits
from graphshard.pipeline.context import PassContext

c10d = torch.ops._c10d_functional
differentiable = torch.ops._c10d_functional_autograd
CONTEXT = PassContext(mesh=one_axis(2))


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


def test_golden(golden):
    gm = _read_three_times()
    golden(text_of(gm, CONTEXT), "merge_waits.before")
    record = run_pass(MergeWaits(), gm, CONTEXT)
    golden(text_of(gm, CONTEXT), "merge_waits.after")
    assert record.report.counts == {"waits merged": 2, "derivatives dropped": 0}


def test_one_wait_each_is_left_alone(captured):
    graphs = captured("two_linears", 2)
    for gm, ctx in (
        (graphs.forward, graphs.context.for_forward()),
        (graphs.backward, graphs.context.for_backward()),
    ):
        record = run_pass(MergeWaits(), gm, ctx)
        assert not record.report.changed and record.report.counts == {"waits merged": 0, "derivatives dropped": 0}


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
    assert first.report.changed and first.report.counts == {"waits merged": 0, "derivatives dropped": 3}
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
    torch.manual_seed(0)
    inputs = [[torch.randn(6, 4).double(), torch.randn(4, 5).double()] for _ in range(2)]
    before, after = (run_values(graph, inputs, CONTEXT.mesh) for graph in (gm, merged))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
