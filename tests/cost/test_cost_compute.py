"""Prices of nodes: counted by hand on small graphs, bounded by physics on the shipped cards."""

import operator
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from support.cost_cards import ROUND_CARD, round_card
from support.small_graphs import GROUP, GraphBuilder, aten
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.backend.inductor.partition import type_rng_states
from graphshard.cost import compute_seconds, known_cards, load_card, total_flops
from graphshard.cost.curves import Curve
from graphshard.cost.flops import causal_share, executed_flops, kernel_class, model_flops
from graphshard.cost.kernels import kernels_of
from graphshard.errors import CardError
from graphshard.ir.bucket_ops import PACK, UNPACK
from graphshard.ir.collectives import ALL_GATHER, WAIT
from graphshard.ir.node_args import schema_call

F32 = torch.float32
OVERHEAD = ROUND_CARD.kernel_overhead_seconds
BANDWIDTH = ROUND_CARD.memory_bandwidth
MM = aten.mm.default
DEVICE_PUT = torch.ops.prims.device_put.default


def _total(gm, card=ROUND_CARD):
    return sum(compute_seconds(gm, card).values())


def _kernels(gm):
    return kernels_of(list(gm.graph.nodes))


def _one_mm(m, k, n, dtype=F32):
    build = GraphBuilder()
    node = build(MM, build.input("a", m, k, dtype=dtype), build.input("b", k, n, dtype=dtype))
    return build.finish(node), node


# products ------------------------------------------------------------------------------------


def test_a_large_product_is_its_flops_over_the_peak():
    gm, node = _one_mm(1000, 2000, 3000)
    assert compute_seconds(gm, ROUND_CARD)[node] == pytest.approx(2 * 6e9 / 1e12 + OVERHEAD)


def test_a_thin_product_is_its_bytes_over_the_bandwidth():
    gm, node = _one_mm(1, 4000, 4000)
    num_bytes = 4 * (4000 + 4000 * 4000 + 4000)
    assert compute_seconds(gm, ROUND_CARD)[node] == pytest.approx(num_bytes / BANDWIDTH + OVERHEAD)


def test_the_peak_is_that_of_the_dtype_times_the_efficiency_of_the_size():
    card = round_card(efficiency={**ROUND_CARD.efficiency, "matmul": Curve(((1e9, 0.5), (1e10, 1.0)))})
    gm, _ = _one_mm(1000, 500, 1000, torch.bfloat16)
    assert _total(gm, card) == pytest.approx(1e9 / 2e12 / 0.5 + OVERHEAD)
    gm, _ = _one_mm(1000, 5000, 1000, torch.bfloat16)
    assert _total(gm, card) == pytest.approx(1e10 / 2e12 + OVERHEAD)


def test_a_dtype_the_card_does_not_know_is_an_error():
    gm, _ = _one_mm(8, 8, 8, torch.float16)
    with pytest.raises(CardError, match="no peak_flops for float16"):
        compute_seconds(gm, ROUND_CARD)


def test_the_large_product_of_an_h100_is_not_below_its_physical_floor():
    """bf16 16384 x 4096 x 14336 cannot take less than 1.945 ms at 989.4 TFLOP/s."""
    gm, _ = _one_mm(16384, 4096, 14336, torch.bfloat16)
    seconds = _total(gm, load_card("h100-sxm"))
    assert 1.945e-3 <= seconds <= 2 * 1.945e-3


@given(
    name=st.sampled_from(known_cards()),
    sides=st.tuples(*[st.integers(1, 20000)] * 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_product_is_faster_than_the_hardware(name, sides, dtype):
    card = load_card(name)
    m, k, n = sides
    gm, _ = _one_mm(m, k, n, dtype)
    num_bytes = (m * k + k * n + m * n) * dtype.itemsize
    floor = max(2 * m * k * n / card.peak(str(dtype)[6:]), num_bytes / card.memory_bandwidth)
    assert _total(gm, card) >= floor


@pytest.mark.parametrize(
    ("op", "shapes", "flops"),
    [
        (MM, [(3, 4), (4, 5)], 120),
        (aten.addmm.default, [(5,), (3, 4), (4, 5)], 120),
        (aten.bmm.default, [(2, 3, 4), (2, 4, 5)], 240),
        (aten.baddbmm.default, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 240),
    ],
    ids=str,
)
def test_flops_of_products(op, shapes, flops):
    build = GraphBuilder()
    node = build(op, *(build.input(f"x{i}", *shape, dtype=F32) for i, shape in enumerate(shapes)))
    assert model_flops(node) == executed_flops(node) == flops
    assert kernel_class(node) == "matmul"
    assert total_flops(build.finish(node)) == flops


def _call(op, *args, val=None, **kwargs):
    """A node whose tensor arguments, (shape, dtype) or a shape, are inputs; ``val`` where torch types only GPUs."""
    build = GraphBuilder()

    def is_shape(value):
        return isinstance(value, tuple)

    def input_of(value):
        shape, dtype = value if value and is_shape(value[0]) else (value, torch.bfloat16)
        return build.input(f"x{len(build.graph.nodes)}", *shape, dtype=dtype)

    placed = [input_of(value) if is_shape(value) else value for value in args]
    named = {name: input_of(value) if is_shape(value) else value for name, value in kwargs.items()}
    if val is None:
        return build(op, *placed, **named)
    node = build.graph.call_function(op, tuple(placed), named)
    node.meta["val"] = val
    return node


def _empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


FP8, FP4, INT8 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.int8
SCALES = ([], [0], [0], [], [0], [0])  # scales, recipes and swizzles of both operands


SCALED = (*SCALES, None, None)


@pytest.mark.parametrize(
    ("op", "args", "result", "flops"),
    [
        (aten.mm.dtype, [(3, 4), (4, 5), F32], (3, 5), 120),
        (aten.bmm.dtype, [(2, 3, 4), (2, 4, 5), F32], (2, 3, 5), 240),
        (aten.addmm.dtype, [(3, 5), (3, 4), (4, 5), F32], (3, 5), 120),
        (aten.baddbmm.dtype, [(2, 3, 5), (2, 3, 4), (2, 4, 5), F32], (2, 3, 5), 240),
        (aten.addbmm.default, [(3, 5), (2, 3, 4), (2, 4, 5)], (3, 5), 240),
        (aten._addmm_activation.default, [(5,), (3, 4), (4, 5)], (3, 5), 120),
        (aten._int_mm.default, [((3, 4), INT8), ((4, 5), INT8)], (3, 5), 120),
        (aten._scaled_mm.default, [((3, 4), FP8), ((4, 5), FP8), (1,), (1,)], (3, 5), 120),
        (aten._scaled_mm_v2.default, [((3, 4), FP8), ((4, 5), FP8), *SCALED], (3, 5), 120),
        (aten._scaled_mm_v2.default, [((3, 2), FP4), ((2, 5), FP4), *SCALED], (3, 5), 120),
        (aten._scaled_grouped_mm_v2.default, [((6, 4), FP8), ((2, 4, 5), FP8), *SCALED], (6, 5), 240),
        (aten._weight_int8pack_mm.default, [(3, 4), ((5, 4), INT8), (5,)], (3, 5), 120),
        (aten.mv.default, [(3, 4), (4,)], (3,), 24),
        (aten.addmv.default, [(3,), (3, 4), (4,)], (3,), 24),
        (aten.dot.default, [(4,), (4,)], (), 8),
        (aten.linear.default, [(2, 3, 4), (5, 4), (5,)], (2, 3, 5), 240),
        (aten.matmul.default, [(2, 3, 4), (4, 5)], (2, 3, 5), 240),
        (aten.matmul.default, [(7, 2, 3, 4), (7, 2, 4, 5)], (7, 2, 3, 5), 7 * 240),
        (aten.tensordot.default, [(2, 3, 4), (3, 4, 5), [1, 2], [0, 1]], (2, 5), 240),
        (aten._cudnn_rnn.default, [(6, 2, 4), []], (6, 2, 5), 0),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else None,
)
def test_every_product_has_flops_and_a_class(op, args, result, flops):
    node = _call(op, *args, val=_empty(*result))
    assert model_flops(node) == executed_flops(node) == flops
    assert kernel_class(node) == "matmul"


def test_flops_of_an_einsum():
    build = GraphBuilder()
    operands = [build.input("a", 2, 3, 4), build.input("b", 2, 4, 5)]
    node = build(aten.einsum.default, "bik,bkj->bij", operands)
    assert (kernel_class(node), model_flops(node)) == ("matmul", 240)


def test_flops_of_a_recurrent_network():
    """Composite, it runs a product with the inputs and one with the state at each step; so does the CPU's kernel."""
    build = GraphBuilder()
    sequence, state = build.input("x", 6, 2, 4), build.input("state", 1, 2, 5)
    weights = [build.input("w", 20, 4), build.input("r", 20, 5)]
    more = (False, 1, 0.0, False, False, False)
    node = build(aten.lstm.input, sequence, [state, state], weights, *more)
    assert (kernel_class(node), model_flops(node)) == ("matmul", 2 * 6 * 2 * 20 * (4 + 5))
    biases = [build.input(name, 20) for name in ("b", "c")]
    rest = (*weights, *biases, state, state, False, [], 2, 5, 1, True, False, False, False)
    layer = build.graph.call_function(aten.mkldnn_rnn_layer.default, (sequence, *rest))
    assert model_flops(layer) == model_flops(node)


def test_an_op_composed_of_what_needs_data_is_priced_by_its_bytes():
    labels = _call(aten.one_hot.default, ((6,), torch.int64), val=_empty(6, 4, dtype=torch.int64))
    assert (kernel_class(labels), model_flops(labels)) == (None, 0)


def test_no_product_of_8_bits_is_faster_than_the_hardware():
    card = load_card("h100-sxm")
    big = (8192, 8192)
    for op, dtype, rest in ((aten._int_mm.default, INT8, ()), (aten._scaled_mm_v2.default, FP8, (*SCALES, None, None))):
        build = GraphBuilder()
        operands = [build.input(name, *big, dtype=dtype) for name in "ab"]
        node = build.graph.call_function(op, (*operands, *rest))
        node.meta["val"] = _empty(*big)
        floor = 2 * 8192**3 / card.peak(str(dtype).removeprefix("torch."))
        assert floor < compute_seconds(build.finish(node), card)[node] < 2 * floor


def test_the_peak_is_that_of_the_operands_and_not_of_what_is_added():
    build = GraphBuilder()
    bias = build.input("bias", 1000, dtype=F32)
    a, b = (build.input(name, 1000, 1000, dtype=torch.bfloat16) for name in "ab")
    node = build.graph.call_function(aten._addmm_activation.default, (bias, a, b))
    node.meta["val"] = _empty(1000, 1000)
    assert compute_seconds(build.finish(node), ROUND_CARD)[node] == pytest.approx(2e9 / 2e12 + OVERHEAD)


@pytest.mark.parametrize("op", [aten.mm.default, aten.linear.default, aten.addmm.default], ids=str)
def test_arguments_by_name_count_as_those_by_position(op):
    shapes = [(64,)] * (op is aten.addmm.default) + [(64, 64)] * 2
    names = [each.name for each in op._schema.arguments]
    by_position = _call(op, *shapes)
    by_name = _call(op, **dict(reversed(list(zip(names, shapes, strict=False)))), val=by_position.meta["val"])
    assert model_flops(by_name) == model_flops(by_position) == 2 * 64**3


def test_defaults_in_front_of_an_argument_by_name_are_filled_in():
    by_name = _call(aten.conv2d.default, (1, 3, 8, 8), (4, 3, 3, 3), dilation=[2, 2])
    target, args, kwargs = schema_call(by_name)
    assert (target, args[2:], kwargs) == (aten.conv2d.default, (None, [1, 1], [0, 0], [2, 2]), {})
    assert model_flops(by_name) == 2 * 4 * 4 * 4 * 27


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.conv2d.default, ((2, 3, 8, 8), (4, 3, 3, 3), None, [1, 1], [1, 1])),
        (aten.conv2d.padding, ((2, 3, 8, 8), (4, 3, 3, 3), None, [1, 1], "same")),
    ],
    ids=str,
)
def test_flops_of_a_convolution_as_export_keeps_it(op, args):
    node = _call(op, *args)
    assert kernel_class(node) == "convolution"
    assert model_flops(node) == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


def test_flops_of_a_convolution():
    build = GraphBuilder()
    image, weight = build.input("x", 2, 3, 8, 8, dtype=F32), build.input("w", 4, 3, 3, 3, dtype=F32)
    node = build(aten.convolution.default, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert kernel_class(node) == "convolution"
    assert model_flops(node) == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize("shapes", [[(2, 3, 4), (2, 4, 5)], [(6, 4), (2, 4, 5)]], ids=["batched", "ragged"])
def test_flops_of_grouped_products(shapes):
    """Every row meets one matrix, whether the groups are of equal size or lie one after the other."""
    build = GraphBuilder()
    operands = [build.input(f"x{i}", *shape, dtype=torch.bfloat16) for i, shape in enumerate(shapes)]
    node = build.graph.call_function(aten._grouped_mm.default, tuple(operands))
    assert model_flops(node) == 2 * 6 * 4 * 5


@pytest.mark.parametrize("causal", [False, True])
def test_attention_skips_what_is_masked(causal):
    build = GraphBuilder()
    q, k, v = (build.input(name, 2, 3, 16, 8, dtype=F32) for name in "qkv")
    forward = build(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, causal)
    whole = 2 * 2 * 3 * 16 * 16 * (8 + 8)
    assert kernel_class(forward) == "attention"
    assert model_flops(forward) == whole
    assert executed_flops(forward) == (whole * 17 / 32 if causal else whole)
    out, lse = (build(operator.getitem, forward, index) for index in range(2))
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    backward = build(op, out, q, k, v, out, lse, 0.0, causal)
    assert kernel_class(backward) == "attention_backward"
    assert model_flops(backward) == 2.5 * whole
    assert executed_flops(backward) == 2.5 * executed_flops(forward)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_whose_heads_share_keys(causal):
    """torch 2.11 counts no such attention; the kernels and the composite op do the same work."""
    q, kv = (2, 6, 16, 8), (2, 3, 16, 8)
    kernel = _call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, kv, kv, 0.0, causal, val=(_empty(*q),))
    composite = _call(aten.scaled_dot_product_attention.default, q, kv, kv, is_causal=causal, enable_gqa=True)
    for node in (kernel, composite):
        assert kernel_class(node) == "attention"
        assert model_flops(node) == 4 * 2 * 6 * 16 * 16 * 8
        assert executed_flops(node) == model_flops(node) * (causal_share(16, 16) if causal else 1)


def test_attention_composed_of_products_skips_nothing():
    q = (2, 3, 16, 8)
    node = _call(aten._scaled_dot_product_attention_math.default, q, q, q, None, 0.0, True)
    assert kernel_class(node) == "matmul"
    assert executed_flops(node) == model_flops(node) == 4 * 2 * 3 * 16 * 16 * 8


def _flash(shape, ends, longest, *, keys=None, causal=True):
    q, kv = shape, keys or shape
    more = (longest, longest, 0.0, causal, False)
    return _call(aten._flash_attention_forward.default, q, kv, kv, ends, ends, *more, val=(_empty(*shape),))


def test_attention_with_tokens_before_heads():
    """(batch, tokens, heads, width), or sequences in a row, each of which counts as the longest."""
    dense = _flash((2, 16, 3, 8), None, 16)
    assert model_flops(dense) == 4 * 2 * 3 * 16 * 16 * 8
    assert executed_flops(dense) == model_flops(dense) * causal_share(16, 16)
    in_a_row = _flash((32, 3, 8), ((3,), torch.int32), 16)
    assert model_flops(in_a_row) == model_flops(dense)
    assert executed_flops(in_a_row) == executed_flops(dense)
    few_queries = _flash((2, 4, 3, 8), None, 16, keys=(2, 16, 3, 8))
    assert executed_flops(few_queries) == model_flops(few_queries) == 4 * 2 * 3 * 4 * 16 * 8
    grads = [(2, 16, 3, 8)] * 6
    backward = _call(aten._efficient_attention_backward.default, *grads[:4], None, grads[0], None, None, 16, 16, val=())
    assert model_flops(backward) == 2.5 * model_flops(dense)
    assert kernel_class(backward) == "attention_backward"


@pytest.mark.parametrize(
    ("queries", "keys", "share"), [(1, 1, 1), (2, 2, 3 / 4), (1, 4, 1 / 4), (4, 1, 1), (0, 0, 0)]
)
def test_the_share_below_the_diagonal(queries, keys, share):
    assert causal_share(queries, keys) == share


def test_symbolic_sizes_count_with_their_hints():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = mode.from_tensor(torch.empty(7, 4))
    symbolic = mode.from_tensor(torch.empty(7, 4), static_shapes=False)
    assert isinstance(symbolic.shape[0], torch.SymInt)
    totals = []
    for value in (rows, symbolic):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = value
        weight = graph.placeholder("weight")
        weight.meta["val"] = mode.from_tensor(torch.empty(4, 4))
        y = graph.call_function(aten.exp.default, (x,))
        y.meta["val"] = value.clone()
        z = graph.call_function(MM, (y, weight))
        z.meta["val"] = value.new_empty(value.shape[0], 4)
        graph.output(z)
        totals.append(_total(fx.GraphModule(torch.nn.Module(), graph)))
    assert totals[0] == totals[1] > 0


def test_symbols_among_the_arguments_of_attention_count_with_their_hints():
    """CUDA's flash attention gives its longest sequences, which its backward takes."""
    build = GraphBuilder()
    q = build.input("q", 2, 4, 16, 8)
    node = build(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.empty(7, 4), static_shapes=False).shape[0]
    assert isinstance(size, torch.SymInt)
    flops = model_flops(node)
    node.meta["val"] = (*node.meta["val"], size)
    assert model_flops(node) == flops == 4 * 2 * 4 * 16 * 16 * 8


def test_arguments_that_cannot_be_remembered_count():
    build = GraphBuilder()
    node = build(MM, build.input("a", 2, 3), build.input("b", 3, 4))
    node.meta["val"] = {"not": "hashable"}
    assert model_flops(node) == 2 * 2 * 3 * 4


# fusion ------------------------------------------------------------------------------------------


def test_a_chain_of_pointwise_ops_counts_its_ends_once():
    build = GraphBuilder()
    x, y = (build.input(name, 1000, 1000, dtype=F32) for name in "xy")
    value = build(aten.add.Tensor, x, y)
    for _ in range(5):
        value = build(aten.mul.Tensor, value, x)
    gm = build.finish(value)
    (kernel,) = _kernels(gm)
    assert (kernel.read_bytes, kernel.written_bytes, kernel.vector_flops) == (8e6, 4e6, 6e6)
    assert _total(gm) == pytest.approx(12e6 / BANDWIDTH + OVERHEAD)


def test_what_others_read_of_a_chain_is_written():
    build = GraphBuilder()
    x = build.input("x", 100, 100, dtype=F32)
    first = build(aten.neg.default, x)
    second = build(aten.abs.default, first)
    product = build(MM, first, first)
    (kernel, _) = _kernels(build.finish(second, product))
    assert kernel.nodes == [first, second]
    assert (kernel.read_bytes, kernel.written_bytes) == (4e4, 8e4)


def test_a_product_between_splits_a_chain():
    build = GraphBuilder()
    x = build.input("x", 100, 100, dtype=F32)
    product = build(MM, build(aten.neg.default, x), x)
    gm = build.finish(build(aten.abs.default, product))
    assert [len(kernel.nodes) for kernel in _kernels(gm)] == [1, 1, 1]


def test_a_norm_over_rows_is_one_kernel():
    build = GraphBuilder()
    x, weight = build.input("x", 64, 32, dtype=F32), build.input("w", 32, dtype=F32)
    stats = build(aten.var_mean.correction, x, [1], correction=0, keepdim=True)
    var, mean = (build(operator.getitem, stats, index) for index in range(2))
    scale = build(aten.rsqrt.default, build(aten.add.Tensor, var, 1e-5))
    out = build(aten.mul.Tensor, build(aten.mul.Tensor, build(aten.sub.Tensor, x, mean), scale), weight)
    (kernel,) = _kernels(build.finish(out))
    assert (kernel.read_bytes, kernel.written_bytes) == (4 * (64 * 32 + 32), 4 * 64 * 32)


def test_reductions_over_rows_and_over_columns_are_two_kernels():
    build = GraphBuilder()
    x = build.input("x", 64, 32, dtype=F32)
    rows, columns = (build(aten.sum.dim_IntList, x, [dim]) for dim in (1, 0))
    kernels = _kernels(build.finish(rows, columns))
    assert [kernel.nodes for kernel in kernels] == [[columns], [rows]] or [
        kernel.nodes for kernel in kernels
    ] == [[rows], [columns]]
    assert sum(kernel.read_bytes for kernel in kernels) == 2 * 4 * 64 * 32


def test_a_view_in_a_chain_costs_nothing_and_splits_nothing():
    build = GraphBuilder()
    x = build.input("x", 64, 32, dtype=F32)
    value = build(aten.view.default, build(aten.neg.default, x), [32, 64])
    (kernel,) = _kernels(build.finish(build(aten.abs.default, value)))
    assert (len(kernel.nodes), kernel.moved_bytes) == (2, 2 * 4 * 64 * 32)


def test_an_expanded_input_is_read_as_it_is_stored():
    build = GraphBuilder()
    row, x = build.input("row", 1, 32, dtype=F32), build.input("x", 64, 32, dtype=F32)
    (kernel,) = _kernels(build.finish(build(aten.add.Tensor, build(aten.expand.default, row, [64, 32]), x)))
    assert kernel.read_bytes == 4 * (32 + 64 * 32)


def test_a_slice_is_read_in_part():
    build = GraphBuilder()
    x = build.input("x", 64, 32, dtype=F32)
    (kernel,) = _kernels(build.finish(build(aten.neg.default, build(aten.slice.Tensor, x, 0, 0, 8))))
    assert kernel.read_bytes == 4 * 8 * 32


def test_exponentials_cost_arithmetic():
    build = GraphBuilder()
    x = build.input("x", 1000, 1000, dtype=F32)
    value = x
    for _ in range(4):
        value = build(aten.exp.default, value)
    assert _total(build.finish(value)) == pytest.approx(4 * 16 * 1e6 / ROUND_CARD.vector_flops + OVERHEAD)


def test_an_embedding_reads_rows_and_not_the_table():
    build = GraphBuilder()
    table, index = build.input("table", 10000, 16, dtype=F32), build.input("index", 8, dtype=torch.int64)
    (kernel,) = _kernels(build.finish(build(aten.embedding.default, table, index)))
    assert kernel.is_scattered
    assert kernel.moved_bytes == 4 * 8 * 16 + 8 * 8 + 4 * 8 * 16


def test_rows_that_are_read_again_count_again():
    """More tokens than words: what is read is linear in tokens, as formulas need it."""
    build = GraphBuilder()
    table, index = build.input("table", 4, 16, dtype=F32), build.input("index", 8, dtype=torch.int64)
    (kernel,) = _kernels(build.finish(build(aten.embedding.default, table, index)))
    assert kernel.moved_bytes == 4 * 8 * 16 + 8 * 8 + 4 * 8 * 16


def test_adding_rows_into_a_table_moves_the_rows():
    build = GraphBuilder()
    table, index = build.input("table", 10000, 16, dtype=F32), build.input("index", 8, dtype=torch.int64)
    rows = build.input("rows", 8, 16, dtype=F32)
    (kernel,) = _kernels(build.finish(build(aten.index_put.default, table, [index], rows, True)))
    assert kernel.is_scattered
    assert kernel.moved_bytes == 3 * (4 * 8 * 16 + 8 * 8)


def _unfused(op, *args, transposed=False, dtype=F32, **kwargs):
    """Kernels and seconds of one op between two products."""
    build = GraphBuilder()
    x = build.input("x", 1000, 1000, dtype=dtype)
    first = build(MM, x, x)
    node = build(op, build(aten.t.default, first) if transposed else first, *args, **kwargs)
    weight = build.input("w", node.meta["val"].shape[-1], 10, dtype=node.meta["val"].dtype)
    gm = build.finish(build(MM, build(aten.view.default, node, [-1, weight.meta["val"].shape[0]]), weight))
    return _kernels(gm)[1:-1], compute_seconds(gm, ROUND_CARD)[node]


@pytest.mark.parametrize(
    ("op", "args", "transposed"),
    [
        (aten.reshape.default, [[500, 2000]], True),
        (aten.flatten.using_ints, [], True),
        (aten.contiguous.default, [], True),
        (aten.clone.default, [], False),
        (aten.to.dtype, [F32, False, True], False),
    ],
    ids=str,
)
def test_a_copy_that_may_be_a_view_reads_and_writes(op, args, transposed):
    (kernel,), seconds = _unfused(op, *args, transposed=transposed)
    assert kernel.moved_bytes == 2 * 4e6
    assert seconds == pytest.approx(8e6 / BANDWIDTH + OVERHEAD)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.reshape.default, [[500, 2000]]),
        (aten.flatten.using_ints, []),
        (aten.contiguous.default, []),
        (aten.to.dtype, [F32]),
        (aten.to.device, ["cpu", F32]),
    ],
    ids=str,
)
def test_a_view_that_may_be_a_copy_costs_nothing(op, args):
    assert _unfused(op, *args) == ([], 0.0)


def test_a_cast_is_a_kernel_and_fuses_as_the_op_it_becomes():
    (kernel,), _ = _unfused(aten.to.dtype, F32, dtype=torch.bfloat16)
    assert (kernel.read_bytes, kernel.written_bytes) == (2e6, 4e6)
    totals = []
    for op in (aten.to.dtype, aten._to_copy.default):
        build = GraphBuilder()
        value = build(aten.neg.default, build.input("x", 100, 100, dtype=torch.bfloat16))
        cast = build(op, value, F32) if op is aten.to.dtype else build(op, value, dtype=F32)
        (kernel,) = _kernels(build.finish(build(aten.abs.default, cast)))
        totals.append((kernel.read_bytes, kernel.written_bytes, kernel.vector_flops))
    assert totals == [(2e4, 4e4, 3e4)] * 2


def test_sizes_that_are_symbols_copy_by_their_hints():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.empty(7, 4), static_shapes=False)
    with mode:
        turned = x.meta["val"].t()
        values = {aten.t.default: turned, aten.contiguous.default: turned.contiguous()}
    for op, value in values.items():
        x = graph.call_function(op, (x,))
        x.meta["val"] = value
    graph.output(x)
    (kernel,) = _kernels(fx.GraphModule(torch.nn.Module(), graph))
    assert kernel.moved_bytes == 2 * 4 * 28


I64 = torch.int64
ROWS, TABLE = ((8, 16), F32), ((10000, 16), F32)
ROWS_BYTES, PICKED_BYTES = 4 * 8 * 16, 8 * 8  # of eight rows, and of their indices


def _rows_kernel(op, *args, shape, **kwargs):
    """The kernel of a node that also takes a list of one index, (8,)."""
    node = _call(op, *args, val=_empty(*shape, dtype=F32), **kwargs)
    graph = node.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        index = graph.placeholder("index")
    index.meta["val"] = _empty(8, dtype=I64)
    node.args = tuple([index] if arg == ["index"] else arg for arg in node.args)
    graph.output(node)
    (kernel,) = _kernels(fx.GraphModule(torch.nn.Module(), graph))
    return kernel


PICKED = ((8,), I64)
PICKED_ELEMENTS = ((8, 16), I64)
MASK = ((8, 1), torch.bool)


@pytest.mark.parametrize(
    ("op", "args", "num_bytes"),
    [
        (aten.index_put.default, [["index"], ROWS, True], ROWS_BYTES + PICKED_BYTES),
        (aten._unsafe_index_put.default, [["index"], ROWS, True], ROWS_BYTES + PICKED_BYTES),
        (aten._unsafe_masked_index_put_accumulate.default, [MASK, ["index"], ROWS], ROWS_BYTES + PICKED_BYTES + 8),
        (aten.index_add.default, [0, PICKED, ROWS], ROWS_BYTES + PICKED_BYTES),
        (aten.index_copy.default, [0, PICKED, ROWS], ROWS_BYTES + PICKED_BYTES),
        (aten.index_reduce.default, [0, PICKED, ROWS, "amax"], ROWS_BYTES + PICKED_BYTES),
        (aten.scatter.src, [0, PICKED_ELEMENTS, ROWS], 3 * ROWS_BYTES),
        (aten.scatter_add_.default, [0, PICKED_ELEMENTS, ROWS], 3 * ROWS_BYTES),
        (aten.scatter_reduce.two, [0, PICKED_ELEMENTS, ROWS, "sum"], 3 * ROWS_BYTES),
        (aten.scatter.value, [0, PICKED_ELEMENTS, 0.0], 3 * ROWS_BYTES),
    ],
    ids=str,
)
def test_what_writes_rows_moves_them_and_not_the_table(op, args, num_bytes):
    kernel = _rows_kernel(op, TABLE, *args, shape=(10000, 16))
    assert kernel.is_scattered
    assert (kernel.read_bytes, kernel.written_bytes) == (2 * num_bytes, num_bytes)


@pytest.mark.parametrize(
    ("op", "args", "num_bytes"),
    [
        (aten.index_select.default, [0, PICKED], PICKED_BYTES),
        (aten._unsafe_index.Tensor, [["index"]], PICKED_BYTES),
        (aten._unsafe_masked_index.default, [MASK, ["index"], 0.0], PICKED_BYTES + 8),
    ],
    ids=str,
)
def test_what_reads_rows_moves_them_and_not_the_table(op, args, num_bytes):
    kernel = _rows_kernel(op, TABLE, *args, shape=(8, 16))
    assert kernel.is_scattered
    assert kernel.moved_bytes == 2 * ROWS_BYTES + num_bytes


def test_rows_are_found_by_the_names_of_arguments():
    node = _call(aten.index_select.default, index=PICKED, dim=0, self=TABLE, val=_empty(8, 16, dtype=F32))
    node.graph.output(node)
    (kernel,) = _kernels(fx.GraphModule(torch.nn.Module(), node.graph))
    assert kernel.moved_bytes == 2 * ROWS_BYTES + PICKED_BYTES
    node = _call(aten.index_add.default, source=ROWS, self=TABLE, dim=0, index=PICKED, val=_empty(10000, 16, dtype=F32))
    node.graph.output(node)
    (kernel,) = _kernels(fx.GraphModule(torch.nn.Module(), node.graph))
    assert kernel.moved_bytes == 3 * (ROWS_BYTES + PICKED_BYTES)


@pytest.mark.parametrize("dims", [{"dim": [0]}, {"dim": [1]}], ids=str)
def test_the_direction_of_a_reduction_is_found_by_the_name_of_its_argument(dims):
    kernels = []
    for by_name in (False, True):
        build = GraphBuilder()
        x = build.input("x", 64, 64, dtype=F32)
        first = build(aten.sum.dim_IntList, x, **dims) if by_name else build(aten.sum.dim_IntList, x, *dims.values())
        kernels.append(_kernels(build.finish(first, build(aten.sum.dim_IntList, x, [1]))))
    assert len(kernels[0]) == len(kernels[1]) == (2 if dims == {"dim": [0]} else 1)


@pytest.mark.parametrize(("rows", "is_scattered"), [(8, False), (40000, True)])
def test_the_gradient_of_an_embedding_fills_its_table_and_adds_the_rows(rows, is_scattered):
    """A stream while the table moves more than the rows, which are read twice and written."""
    grad = ((rows, 16), F32)
    kernel = _rows_kernel(
        aten.embedding_dense_backward.default, grad, ((rows,), I64), 10000, -1, False, shape=(10000, 16)
    )
    num_bytes = rows * (4 * 16 + 8)
    assert (kernel.read_bytes, kernel.written_bytes) == (2 * num_bytes, 4 * 10000 * 16 + num_bytes)
    assert kernel.is_scattered == is_scattered


# communication -----------------------------------------------------------------------------------


def test_collectives_waits_views_and_items_cost_nothing_and_bucket_copies_their_bytes():
    build = GraphBuilder()
    shards = [build.input(f"primals_{i}", 1000, dtype=F32) for i in (1, 2)]
    packed = build(PACK, shards, 1)
    started = build(ALL_GATHER, packed, 4, GROUP)
    waited = build(WAIT, started)
    pieces = build(UNPACK, waited, 4, [1000, 1000])
    item = build(operator.getitem, pieces, 0)
    view = build(aten.view.default, item, [40, 100])
    gm = build.finish(view)
    seconds = compute_seconds(gm, ROUND_CARD)
    assert list(seconds) == list(gm.graph.nodes)
    assert seconds[packed] == pytest.approx(2 * 8000 / BANDWIDTH + OVERHEAD)
    assert seconds[pieces] == pytest.approx(2 * 32000 / BANDWIDTH + OVERHEAD)
    free = set(gm.graph.nodes) - {packed, pieces}
    assert all(seconds[node] == 0.0 for node in free)


def test_operations_of_causal_attention_are_whole_numbers_at_any_length():
    """Formulas are fitted to them; a float is off by one at such lengths."""
    assert all(causal_share(size, size) * (2 * size * size) == size * (size + 1) for size in (3, 49152, 98304))
    assert isinstance(causal_share(49152, 49152), Fraction)


@pytest.mark.parametrize("op", [aten._to_copy.default, aten.to.dtype_layout, DEVICE_PUT], ids=str)
def test_what_moves_between_host_and_device_is_bound_by_the_bus(op):
    build = GraphBuilder()
    x = build.input("x", 1000, 1000, dtype=F32)
    there = torch.device("meta")
    args, kwargs = ((x, there), {}) if op is DEVICE_PUT else ((x,), {"device": there})
    moved = build.graph.call_function(op, args, kwargs)
    moved.meta["val"] = torch.empty(1000, 1000, device="meta")
    assert _total(build.finish(moved)) == pytest.approx(4e6 / ROUND_CARD.host_bandwidth + OVERHEAD)


# whole models ------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        q = self.norm(x).view(2, 8, 2, 8).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + self.down(F.gelu(self.up(x)))


def _graphs(model, x):
    found = []

    def keep(gm, _):
        found.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    torch._dynamo.reset()
    return found


def test_a_model_forward_and_backward():
    forward, backward = _graphs(torch.nn.Sequential(*[Block() for _ in range(2)]), torch.randn(2, 8, 16))
    tokens, width, layers = 16, 16, 2
    products = layers * 2 * tokens * width * 8 * width
    attention = layers * 2 * 2 * 2 * 8 * 8 * 16
    assert total_flops(forward) == products + attention
    assert total_flops(backward) == pytest.approx(2 * products + 2.5 * attention - 0)
    for gm in (forward, backward):
        seconds = compute_seconds(gm, ROUND_CARD)
        assert list(seconds) == list(gm.graph.nodes)
        assert all(value >= 0 for value in seconds.values())
        kernels = _kernels(gm)
        assert sum(len(kernel.nodes) for kernel in kernels) == len(
            {node for kernel in kernels for node in kernel.nodes}
        )
        busy = {node for node, value in seconds.items() if value}
        assert busy == {node for kernel in kernels for node in kernel.nodes}
        num_products = sum(kernel_class(node) is not None for node in gm.graph.nodes)
        assert num_products < len(kernels) < 4 * num_products


class AsWritten(torch.nn.Module):
    """Products that torch.export keeps as they are written, and decomposes if it is asked to."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(64, 64, 3)
        self.up, self.down = (torch.nn.Linear(*sizes, bias=False) for sizes in ((1024, 4096), (4096, 1024)))

    def forward(self, image, x):
        y = torch.einsum("bsd,nd->bsn", self.up(x), self.down.weight)
        return self.conv(image), y, x @ self.down.weight


def test_an_exported_graph_costs_about_what_it_costs_decomposed():
    exported = torch.export.export(AsWritten(), (torch.randn(8, 64, 32, 32), torch.randn(2, 512, 1024)))
    plain, decomposed = exported.graph_module, exported.run_decompositions().graph_module
    written = {aten.linear.default, aten.conv2d.default, aten.einsum.default, aten.matmul.default}
    assert written <= {node.target for node in plain.graph.nodes}
    assert not written & {node.target for node in decomposed.graph.nodes}
    assert total_flops(plain) == total_flops(decomposed)
    card = load_card("h100-sxm")
    assert _total(plain, card) == pytest.approx(_total(decomposed, card), rel=0.1)


def test_norms_and_a_gelu_are_one_loop_over_rows_and_in_the_backward_one_more_over_columns():
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    forward, backward = _graphs(model, torch.randn(8, 16, requires_grad=True))
    assert [len(_kernels(gm)) for gm in (forward, backward)] == [1, 2]


class LlamaBlock(torch.nn.Module):
    """One layer of Llama 3.1 8B but for its rotations, in bfloat16."""

    def __init__(self, width=4096, hidden=14336, kv_width=1024):
        super().__init__()
        sizes = {"q": (width, width), "k": (width, kv_width), "v": (width, kv_width), "o": (width, width)}
        sizes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        for name, (before, after) in sizes.items():
            setattr(self, name, torch.nn.Linear(before, after, bias=False, dtype=torch.bfloat16))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        def heads(value):
            split = value.unflatten(-1, (-1, 128)).transpose(1, 2)
            return split.repeat_interleave(32 // split.shape[1], 1)

        y = self.norms[0](x)
        q, k, v = heads(self.q(y)), heads(self.k(y)), heads(self.v(y))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def test_the_compute_of_llama_8b_fits_between_the_peak_and_a_published_step():
    """torchtitan: 6,667 tokens/s on each of 8 H100s with FSDP and compile, 2 x 8192 tokens a step, 2.46 s.

    That step also recomputes, updates and has an output layer, so the layers alone must take less; and no
    H100 computes them faster than their FLOPs at its peak.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        graphs = _graphs(LlamaBlock(), torch.randn(2, 8192, 4096, dtype=torch.bfloat16, requires_grad=True))
    card = load_card("h100-sxm")
    seconds = 32 * sum(_total(gm, card) for gm in graphs)
    executed = 32 * sum(executed_flops(node) for gm in graphs for node in gm.graph.nodes)
    assert executed / card.peak("bfloat16") < seconds < 2 * 8192 / 6667
    assert seconds > 0.5 * 2 * 8192 / 6667


# recomputed ops that may draw random numbers ---------------------------------------------------


def _halves_with_recomputed_attention():
    """Forward and backward of checkpointed attention, with the partitioner's wrappers around it."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch.utils.checkpoint import checkpoint

    halves = []

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sin()

    def keep(gm, _):
        halves.append(gm)
        return make_boxed_func(gm)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: checkpoint(attend, *args, use_reentrant=False), backend=backend, fullgraph=True
    )
    compiled(q, k, v).sum().backward()
    torch._dynamo.reset()
    return halves


@pytest.mark.skipif(
    torch.__version__ >= (2, 14), reason="torch 2.14 wraps no attention without dropout, and the CPU has none with it"
)
def test_an_op_in_a_wrapper_costs_what_it_costs_alone():
    forward, backward = _halves_with_recomputed_attention()
    scores = 2 * 64 * 64 * 8 * 2  # elements of two heads, multiplied and added
    for gm, wrapper in ((forward, "run_and_save_rng_state"), (backward, "run_with_rng_state")):
        (node,) = [node for node in gm.graph.nodes if str(node.target) == wrapper]
        assert "val" not in node.meta, "torch gives it a value now: type_rng_states is not needed any more"
        type_rng_states(gm)
        result = node.meta["val"][1] if wrapper == "run_and_save_rng_state" else node.meta["val"]
        assert result[0].shape == (1, 2, 64, 8)
        assert kernel_class(node) == "attention"
        assert model_flops(node) == 2 * scores
        assert executed_flops(node) == pytest.approx(2 * scores * causal_share(64, 64))
        seconds = compute_seconds(gm, ROUND_CARD)[node]
        assert seconds >= executed_flops(node) / ROUND_CARD.peak("float32")
    type_rng_states(backward)  # nothing is left to do
