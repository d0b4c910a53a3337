"""merge_sums: a product and the sum behind it are one product where that delays nothing."""

from dataclasses import replace

import pytest
import torch
from support.small_graphs import GraphBuilder, aten, one_axis, run_pass, run_twice, text_of
from torch._inductor.async_compile import AsyncCompile
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.backend.inductor.emitted_order import emitted_order
from graphshard.backend.inductor.inductor_config import compile_fx_inner
from graphshard.ir.rewrite import copy_graph
from graphshard.passes import MergeSums
from graphshard.pipeline.context import PassContext

CONTEXT = PassContext(mesh=one_axis(2))


class _Products(GraphBuilder):
    """Two products, of which the second does not need the first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.input("primals_1", 6, 4)
        self.a, self.b = self.input("primals_2", 6, 5), self.input("primals_3", 5, 4)
        self.c = self.input("primals_4", 4, 6)
        self.first = self(aten.mm.default, self.a, self.b)
        self.second = self(aten.mm.default, self.b, self.c)

    def sum(self, *summands, **factor):
        return self(aten.add.Tensor, *summands, **factor)


def _late_sum():
    build = _Products()
    late = build(aten.sin.default, build(aten.mm.default, build.b, build(aten.cos.default, build.c)))
    return build.finish(build.sum(build.other, build.first), build.sum(build.second, late))


def _ops(gm):
    return [node.target._opname for node in gm.graph.nodes if node.op == "call_function"]


def _check(gm, ops, kept_apart=0):
    """The pass makes these ops of a graph, and nothing else of its results."""
    before = copy_graph(gm)
    record = run_pass(MergeSums(), gm, CONTEXT)
    assert _ops(gm) == ops
    assert record.report.counts == {"merged": ops.count("addmm"), "kept apart": kept_apart}
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    inputs = [torch.randn(value.shape, dtype=value.dtype) for value in values]
    torch.testing.assert_close(gm(*inputs), before(*inputs))


def test_golden(golden):
    gm = _late_sum()
    golden(text_of(gm, CONTEXT), "merge_sums.before")
    record = run_pass(MergeSums(), gm, CONTEXT)
    golden(text_of(gm, CONTEXT), "merge_sums.after")
    assert record.report.counts == {"merged": 1, "kept apart": 1}


def test_a_graph_without_such_sums_is_left_alone(captured):
    graphs = captured("two_linears", 2)
    record = run_pass(MergeSums(), graphs.forward, graphs.context.for_forward())
    assert not record.report.changed and record.report.counts == {"merged": 0, "kept apart": 0}


def test_second_run_changes_nothing():
    first, second = run_twice(MergeSums(), _late_sum(), CONTEXT)
    assert first.report.changed and not second.report.changed


def test_the_product_stands_where_it_stood():
    build = _Products()
    _check(build.finish(build.sum(build.other, build.first), build.second), ["addmm", "mm"])


def test_a_product_does_not_wait_for_a_later_summand():
    build = _Products()
    late = build(aten.sin.default, build.other)
    _check(build.finish(build.sum(build.first, late), build.second), ["mm", "mm", "sin", "view", "add"], kept_apart=1)


def test_a_bias_that_is_gathered_where_it_is_read_is_no_later_summand():
    """A bucket brings it with the weight, in front of the product."""
    build = _Products()
    bias = build(aten.view.default, build.gather(build.input("primals_5", 2), 2), [4])
    gm = build.finish(build.sum(build.first, bias), build.second)
    run_pass(MergeSums(), gm, CONTEXT)
    assert _ops(gm) == ["mm", "all_gather_into_tensor", "wait_tensor", "view", "addmm"]


@pytest.mark.parametrize("read_by", [aten.relu.default, aten.t.default, aten.mm.default])
def test_on_accelerators_sums_before_pointwise_kernels_are_theirs(read_by):
    """Inductor merges there what another kernel reads."""
    build = _Products()
    total = build.sum(build.other, build.first)
    result = build(read_by, total, build.c) if read_by is aten.mm.default else build(read_by, total)
    gm = build.finish(result, build.second)
    record = run_pass(MergeSums(), gm, replace(CONTEXT, device_type="cuda"))
    assert record.report.counts["merged"] == (read_by is not aten.relu.default)


def test_of_two_products_the_later_one_takes_the_sum():
    build = _Products()
    third = build(aten.mm.default, build.a, build(aten.cos.default, build.b))
    _check(build.finish(build.sum(third, build.first), build.second), ["mm", "mm", "cos", "addmm"])


def test_sums_of_sums():
    build = _Products()
    third = build(aten.mm.default, build.a, build(aten.cos.default, build.b))
    total = build.sum(build.sum(build.first, build.other), third)
    _check(build.finish(total, build.second), ["addmm", "mm", "cos", "addmm"])


@pytest.mark.parametrize("shape", [(4,), (1, 4), (6, 1), (1,), ()], ids=str)
def test_a_summand_may_broadcast(shape):
    build = _Products()
    with build.graph.inserting_before(build.first):
        small = build.input("primals_5", *shape)
    _check(build.finish(build.sum(build.first, small), build.second), ["addmm", "mm"])


def _read_twice(build):
    return build.sum(build.first, build.other), build.first


def _twice_itself(build):
    return (build.sum(build.first, build.first),)


def _with_a_factor(build):
    return (build.sum(build.other, build.first, alpha=2),)


def _a_number(build):
    return (build.sum(build.first, 2.0),)


def _of_another_dtype(build):
    return (build.sum(build.first, build.input("primals_5", 6, 4, dtype=torch.float32)),)


def _that_broadcasts_the_product(build):
    return (build.sum(build.first, build.input("primals_5", 3, 6, 4)),)


@pytest.mark.parametrize(
    "made",
    [_read_twice, _twice_itself, _with_a_factor, _a_number, _of_another_dtype, _that_broadcasts_the_product],
)
def test_other_sums_stay(made):
    build = _Products()
    _check(build.finish(*made(build), build.second), ["mm", "mm", "add"])


def test_symbolic_sizes_stay():
    gm = make_fx(lambda a, b, c: c + a @ b, tracing_mode="symbolic")(*(torch.randn(4, 4) for _ in range(3)))
    record = run_pass(MergeSums(), gm, CONTEXT)
    assert not record.report.changed


def _emitted(gm):
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with torch._inductor.config.patch(fx_graph_cache=False):
        return emitted_order(compile_fx_inner(gm, values).source_code)


@pytest.mark.parametrize(
    "made",
    [
        _read_twice, _with_a_factor, _a_number, _of_another_dtype, _that_broadcasts_the_product,
        lambda build: (build.sum(build.other, build.first),),
        lambda build: (build.sum(build.first, build.other),),
    ],
)  # fmt: skip
def test_inductor_makes_the_same_products(made, monkeypatch):
    """Of the graph as it was and of the merged one; of this one in the order that it has."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    build = _Products()
    gm = build.finish(*made(build), build.second)
    left_to_inductor = _emitted(copy_graph(gm))
    run_pass(MergeSums(), gm, CONTEXT)
    merged = _emitted(gm)
    assert sorted(merged) == sorted(left_to_inductor)
    assert merged == [f"run {op}" for op in _ops(gm) if op != "add"]


def test_inductor_delays_no_product(monkeypatch):
    """Left alone, it would compute the first product last."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    gm = _late_sum()
    assert _emitted(copy_graph(gm)) == ["run mm", "run addmm", "run addmm"]
    run_pass(MergeSums(), gm, CONTEXT)
    assert _emitted(gm) == ["run addmm", "run mm", "run mm"]
