"""The bound where nothing can be measured: its form, and which calls it is for. No figure of a processor."""

import pytest
import torch
from support.small_graphs import GraphBuilder, aten
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.memory import UNMEASURED, KernelScratch
from graphshard.memory.scratch_calls import kernel_call, kernel_calls

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def _product(rows: int, summed: int, columns: int, dtype: torch.dtype = torch.bfloat16, op=aten.mm.default):
    build = GraphBuilder()
    return build(op, build.input("x", rows, summed, dtype=dtype), build.input("y", summed, columns, dtype=dtype))


def _convolution(dtype: torch.dtype = torch.float32, kernel: int = 3, transposed: bool = False):
    build = GraphBuilder()
    source = build.input("x", 2, 16, 32, 32, dtype=dtype)
    weight = build.input("w", 16, 16, kernel, kernel, dtype=dtype)
    padding = [kernel // 2] * 2
    return build(aten.convolution.default, source, weight, None, [1, 1], padding, [1, 1], transposed, [0, 0], 1)


def _attention(tokens: int, dtype: torch.dtype = torch.float32):
    build = GraphBuilder()
    return build(ATTENTION, *(build.input(name, 1, 2, tokens, 8, dtype=dtype) for name in "qkv"), 0.0, False)


def _bound(node, num_threads: int = 1) -> int:
    return KernelScratch(num_threads=num_threads).bytes_of(node, "cpu")


def test_operands_and_results_count_twice_and_once_more_a_thread():
    node = _product(640, 512, 768)
    elements = 640 * 512 + 512 * 768 + 640 * 768 + 3 * 64 * 64
    assert [_bound(node, number) for number in (1, 2, 8)] == [4 * (2 + number) * elements for number in (1, 2, 8)]


@pytest.mark.parametrize("make", [_product, _attention, _convolution], ids=["product", "attention", "convolution"])
def test_it_grows_with_threads(make):
    node = make(*{_product: (64, 64, 64), _attention: (128,), _convolution: ()}[make])
    bounds = [_bound(node, number) for number in (1, 2, 3)]
    assert 0 < bounds[0] < bounds[1] < bounds[2] and bounds[2] - bounds[1] == bounds[1] - bounds[0]


def test_without_a_number_of_threads_those_of_the_process_count(threads):
    node = _product(64, 64, 64)
    threads(3)
    assert UNMEASURED.bytes_of(node, "cpu") == _bound(node, 3)


def test_a_convolution_may_unfold_its_input():
    one, three, five = (_bound(_convolution(kernel=kernel)) for kernel in (1, 3, 5))
    places = 2 * 32 * 32
    of_weight = 4 * (2 + 1) * 16 * 16
    assert three - one == 4 * 2 * places * 16 * (9 - 1) + of_weight * (9 - 1)
    assert five - three == 4 * 2 * places * 16 * (25 - 9) + of_weight * (25 - 9)
    assert _bound(_convolution(torch.float64)) == 2 * _bound(_convolution()) == 2 * _bound(_convolution(torch.bfloat16))


def test_the_backward_of_a_convolution_counts_three_gradients():
    forward = _convolution()
    build = GraphBuilder()
    gradient, source = (build.input(name, 2, 16, 32, 32, dtype=torch.float32) for name in ("g", "x"))
    weight = build.input("w", 16, 16, 3, 3, dtype=torch.float32)
    settings = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    backward = build(aten.convolution_backward.default, gradient, source, weight, *settings)
    assert _bound(backward) > _bound(forward)
    assert _bound(_convolution(transposed=True)) == _bound(forward)  # of equal sizes


def test_scores_of_attention_are_computed_in_tiles():
    at_most = _bound(_attention(512)), _bound(_attention(1024)), _bound(_attention(2048))
    assert at_most[2] - at_most[1] == 2 * (at_most[1] - at_most[0])  # operands alone: a tile is not larger
    elements = 3 * 2 * 512 * 8 + 2 * 512 * 8 + 2 * 512 + 5 * 64 * 64
    assert at_most[0] == 4 * 3 * (elements + 2 * 256 * 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_of_blas_are_outside_of_the_allocator(dtype):
    assert _bound(_product(64, 64, 64, dtype)) == 0


def test_products_of_float32_that_may_be_computed_in_fewer_bits_are_not_blas(monkeypatch):
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert _bound(_product(64, 64, 64, torch.float32)) == _bound(_product(64, 64, 64)) > 0
        assert _bound(_product(64, 64, 64, torch.float64)) == 0
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    monkeypatch.setattr(torch.backends.mkldnn, "is_acl_available", lambda: True)
    assert _bound(_product(64, 64, 64, torch.float32)) > 0


def test_only_kernels_of_libraries_on_the_cpu_are_counted():
    build = GraphBuilder()
    source = build.input("x", 64, 64, dtype=torch.bfloat16)
    assert UNMEASURED.bytes_of(source, "cpu") == 0
    assert UNMEASURED.bytes_of(build(aten.relu.default, source), "cpu") == 0
    assert UNMEASURED.bytes_of(build(aten.mm.default, source, source), "cuda") == 0
    inverse = build(aten.linalg_inv_ex.default, build.input("a", 8, 8))
    assert UNMEASURED.bytes_of(inverse, "cpu") > 0


def test_the_same_call_is_one_however_it_is_written():
    build = GraphBuilder()
    left, right = (build.input(name, 4, 4, dtype=torch.bfloat16) for name in "xy")
    by_position = build(aten.mm.default, left, right)
    by_name = build(aten.mm.default, left, mat2=right)
    assert kernel_call(by_position) == kernel_call(by_name)
    assert len(kernel_calls(build.finish(by_position, by_name), None)) == 1


def test_symbolic_sizes_count_with_their_hints():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    node = _product(32, 64, 64)
    fixed = _bound(node)
    with mode:
        symbol = mode.from_tensor(torch.empty(32, 64, dtype=torch.bfloat16), static_shapes=False)
        result = symbol @ torch.empty(64, 64, dtype=torch.bfloat16)
    node.args[0].meta["val"], node.meta["val"] = symbol, result
    assert _bound(node) == fixed
    assert "bfloat16[32x64]@64x1" in str(kernel_call(node))
