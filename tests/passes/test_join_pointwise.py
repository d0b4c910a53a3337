"""join_pointwise: a pointwise value is made beside the kernel that reads the same, where that holds less memory."""

import pytest
import torch
from support.small_graphs import GraphBuilder, aten, one_axis, run_pass, run_twice, text_of
from torch._inductor.async_compile import AsyncCompile
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.backend.inductor.inductor_config import compile_fx_inner
from graphshard.ir.rewrite import copy_graph
from graphshard.memory.kept_inputs import kept_inputs
from graphshard.memory.model import DONATED, memory_timeline
from graphshard.passes import JoinPointwise
from graphshard.pipeline.context import PassContext

CONTEXT = PassContext(mesh=one_axis(2))
MM, MUL, ADD, EXP = aten.mm.default, aten.mul.Tensor, aten.add.Tensor, aten.exp.default


class _Gated(GraphBuilder):
    """The backward of a gated MLP: of the gradient of its product, two values, and the product of each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, *self.others = (self.input(name, 16, 8) for name in ("up", "gate", "one", "two"))
        for saved in (self.up, self.gate, *self.others):
            saved.meta[DONATED] = True
        self.down, self.weight = self.input("down", 4, 8), self.input("weight", 8, 4)
        self.tangent = self.input("tangents_1", 16, 4)
        self.grad = self(MM, self.tangent, self.down)
        self.first = self(MUL, self.grad, self(EXP, self.gate))
        self.first_product = self(MM, self.first, self.weight)

    def second(self):
        """Made of the gradient, the gate, and the other half, which it is written over."""
        part = self(aten.sigmoid.default, self.gate)
        slope = self(ADD, self(MUL, self.gate, self(ADD, part, 1)), part)
        return self(MUL, self(MUL, self.grad, self.up), slope)

    def product(self, value):
        return self(MM, value, self.weight)


def _gated():
    build = _Gated()
    return build.finish(build.first_product, build.product(build.second()))


def _names(gm):
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


def _inputs(gm):
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [torch.randn(value.shape, dtype=value.dtype) for value in values]


def _live(gm):
    timeline = memory_timeline(gm, kept=kept_inputs(gm))
    return {node.name: size for node, size in zip(timeline.nodes, timeline.live_bytes, strict=True)}


def _stays(gm):
    before = _names(gm)
    record = run_pass(JoinPointwise(), gm, CONTEXT)
    assert not record.report.changed and record.report.counts == {"joined": 0}
    assert _names(gm) == before


def test_golden(golden):
    gm = _gated()
    golden(text_of(gm, CONTEXT), "join_pointwise.before")
    record = run_pass(JoinPointwise(), gm, CONTEXT)
    golden(text_of(gm, CONTEXT), "join_pointwise.after")
    assert record.report.changed and record.report.counts == {"joined": 1}


def test_a_graph_without_such_values_is_left_alone(captured):
    graphs = captured("two_linears", 2)
    record = run_pass(JoinPointwise(), graphs.forward, graphs.context.for_forward())
    assert not record.report.changed and record.report.counts == {"joined": 0}


def test_second_run_changes_nothing():
    first, second = run_twice(JoinPointwise(), _gated(), CONTEXT)
    assert first.report.changed and not second.report.changed


def test_less_is_held_and_nothing_else_computed():
    gm = _gated()
    before = copy_graph(gm)
    run_pass(JoinPointwise(), gm, CONTEXT)
    assert sorted(_names(gm)) == sorted(_names(before))
    # Beside the product of the first value were the gradient, the gate and the other half; now there is the second.
    at_first_product = [_live(graph)["mm_default_1"] for graph in (before, gm)]
    assert at_first_product[0] - at_first_product[1] == 2 * 8 * 16 * 8
    assert max(_live(gm).values()) <= max(_live(before).values())
    inputs = _inputs(gm)
    for value, expected in zip(gm(*inputs), before(*inputs), strict=True):
        assert torch.equal(value, expected)


def test_several_values_stand_in_their_order():
    """The second of two that move reads what the first brought along; the third has nothing to do with them."""
    build = _Gated()
    part = build(aten.sin.default, build.gate)
    values = [build.second()]
    values += [build(MUL, build(MUL, build.grad, other), part) for other in build.others]
    gm = build.finish(build.first_product, *map(build.product, values))
    record = run_pass(JoinPointwise(), gm, CONTEXT)
    assert record.report.counts == {"joined": 3}
    gm.graph.lint()
    names = _names(gm)
    assert max(names.index(value.name) for value in values) < names.index(build.first_product.name)


def _not_written_over(build):
    del build.up.meta[DONATED]
    return build.second()


def _made_of_what_comes_later(build):
    return build(MUL, build(MUL, build.grad, build.up), build(EXP, build(MM, build.tangent, build.down)))


def _of_nothing_that_is_read_before(build):
    return build(MUL, build.up, build(EXP, build.others[0]))


def _of_a_smaller_value_that_is_read_before(build):
    rows = build(aten.slice.Tensor, build.others[0], 0, 0, 1)
    build.first_product = build.product(build(MUL, build.first, rows))
    return build(MUL, build.up, rows)


def _of_a_value_that_a_larger_kernel_reads_before(build):
    row = build(aten.slice.Tensor, build.down, 0, 0, 2)
    repeated = build(MUL, build(aten.unsqueeze.default, build.others[0], 0), build(aten.unsqueeze.default, row, 1))
    build.first_product = build.product(build(aten.view.default, repeated, [32, 8]))
    return build(MUL, build.up, build(EXP, build.others[0]))


def _of_a_value_that_is_read_in_part_before(build):
    rows = build(EXP, build(aten.slice.Tensor, build.others[0], 0, 0, 4))
    build.first_product = build(MM, build(MM, rows, build.weight), build.down)
    return build(MUL, build.up, build(EXP, build.others[0]))


def _behind_a_write(build):
    value = build.second()
    build(aten.copy_.default, build.gate, build.others[0])
    return value


@pytest.mark.parametrize(
    "made",
    [
        _not_written_over, _made_of_what_comes_later, _of_nothing_that_is_read_before,
        _of_a_smaller_value_that_is_read_before, _of_a_value_that_a_larger_kernel_reads_before,
        _of_a_value_that_is_read_in_part_before, _behind_a_write,
    ],
)  # fmt: skip
def test_other_values_stay(made):
    build = _Gated()
    _stays(build.finish(build.first_product, build.product(made(build))))


def test_a_value_that_another_kernel_reads_stays():
    """Inductor may make it there."""
    build = _Gated()
    value = build.second()
    _stays(build.finish(build.first_product, build.product(value), build(aten.sum.default, value)))


def test_a_value_with_a_part_that_is_read_elsewhere_stays():
    build = _Gated()
    part = build(EXP, build.gate)
    value = build(MUL, build(MUL, build.grad, build.up), part)
    _stays(build.finish(build.first_product, build.product(value), build.product(part)))


def test_values_that_share_a_part_go_to_one_place():
    """The first may go behind a later kernel, and brings the part there; the second stays."""
    build = _Gated()
    late = build(MM, build.first_product, build.down)
    late_product = build.product(build(MUL, build.grad, build(EXP, late)))
    part = build(aten.sin.default, build.gate)
    read = zip((late, build.grad), build.others, strict=True)
    one, two = (build(MUL, build(MUL, gradient, other), part) for gradient, other in read)
    gm = build.finish(late_product, build.product(one), build.product(two))
    record = run_pass(JoinPointwise(), gm, CONTEXT)
    assert record.report.counts == {"joined": 1}
    gm.graph.lint()


def test_nothing_follows_what_has_moved():
    """The last value could go behind the second, of what stands between the first two; but the second moves away."""
    build = _Gated()
    late = build(MM, build.first_product, build.down)
    second = build.product(build.second())
    value = build(MUL, build(MUL, late, build.others[0]), build.grad)
    gm = build.finish(second, build.product(value))
    record = run_pass(JoinPointwise(), gm, CONTEXT)
    assert record.report.counts == {"joined": 1}
    gm.graph.lint()


def test_symbolic_sizes_stay():
    def backward(tangents_1, up, gate, weight):
        grad = tangents_1.sin() @ tangents_1.t()
        first = (grad * gate.exp()) @ weight
        return first, ((grad * up) * gate.sigmoid()) @ weight

    inputs = [torch.randn(8, 8) for _ in range(4)]
    for mode, num_joined in (("fake", 1), ("symbolic", 0)):
        gm = make_fx(backward, tracing_mode=mode)(*inputs)
        for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            node.name = ("tangents_1", "up", "gate", "weight")[index]
            node.meta[DONATED] = index in (1, 2)
        assert run_pass(JoinPointwise(), gm, CONTEXT).report.counts == {"joined": num_joined}


def test_inductor_makes_both_in_one_kernel(monkeypatch):
    """Of the graph as it was and of the joined one: what stands in the graph is what runs."""
    calls = []
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    for is_joined in (False, True):
        gm = _gated()
        if is_joined:
            run_pass(JoinPointwise(), gm, CONTEXT)
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        with torch._inductor.config.patch(fx_graph_cache=False):
            source = compile_fx_inner(gm, values).source_code
        lines = source.partition("def call")[2].splitlines()
        calls.append([line.split("(")[0].strip() for line in lines if "cpp_fused" in line or "extern_kernels" in line])
    assert calls[0] == calls[1]
    assert [name.startswith("cpp_fused") for name in calls[1]] == [False, True, False, False]
