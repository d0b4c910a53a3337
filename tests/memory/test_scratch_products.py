"""What products of 16 bits allocate for themselves: never more than is counted, whatever the strides and sizes."""

import pytest
import torch
from support.allocations import peak_bytes
from support.small_graphs import GraphBuilder, aten

from graphshard.memory.model import memory_timeline
from graphshard.memory.scratch import scratch_bytes
from graphshard.memory.scratch_products import is_packed

#: Rows, summed, columns.
SHAPES = [
    (64, 512, 256),
    (256, 512, 64),
    (1, 256, 256),
    (7, 3, 33),
    (256, 1, 256),
    (640, 513, 128),
    (768, 1024, 768),
    (128, 1536, 512),
    (512, 2048, 1024),
    (1000, 2048, 96),
]


def _transposed(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def _node(call, args: list[torch.Tensor]) -> torch.fx.Node:
    build = GraphBuilder()
    inputs = []
    for index, value in enumerate(args):
        inputs.append(build.input(f"x{index}", *value.shape, dtype=value.dtype))
        fake = inputs[-1].meta["val"]
        inputs[-1].meta["val"] = fake.as_strided(value.shape, value.stride())
    return build(call, *inputs)


def _calls(shape: tuple[int, int, int], dtype: torch.dtype):
    """Each product of the shape, with either operand as it lies and transposed."""
    rows, summed, columns = shape
    for make_left in (torch.randn, _transposed):
        for make_right in (torch.randn, _transposed):
            left, right = make_left(rows, summed, dtype=dtype), make_right(summed, columns, dtype=dtype)
            yield aten.mm.default, [left, right]
            yield aten.addmm.default, [torch.randn(columns, dtype=dtype), left, right]
            batches = make_left(2, rows, summed, dtype=dtype), make_right(2, summed, columns, dtype=dtype)
            yield aten.bmm.default, [*batches]
            yield aten.baddbmm.default, [torch.randn(2, rows, columns, dtype=dtype), *batches]


def _measured(call, args: list[torch.Tensor]) -> int:
    """Bytes beside the operands and the result, once the kernel for the shape has been made."""
    call(*args)
    result = call(*args)
    return min(peak_bytes(lambda: call(*args)) for _ in range(2)) - result.numel() * result.element_size()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_product_allocates_more_than_is_counted(shape, dtype, num_threads, threads):
    threads(num_threads)
    for call, args in _calls(shape, dtype):
        assert _measured(call, args) <= scratch_bytes(_node(call, args), "cpu"), call


@pytest.mark.parametrize("num_threads", [1, 2])
def test_no_product_of_groups_allocates_more_than_is_counted(num_threads, threads):
    threads(num_threads)
    args = [torch.randn(128, 256).bfloat16(), torch.randn(4, 256, 64).bfloat16()]
    args.append(torch.tensor([16, 32, 64, 128], dtype=torch.int32))
    counted = scratch_bytes(_node(aten._grouped_mm.default, args), "cpu")
    assert 0 < _measured(aten._grouped_mm.default, args) <= counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_other_types_are_counted_as_what_they_are(dtype):
    if is_packed(dtype):
        pytest.skip("this processor computes in float16")
    for call, args in _calls(SHAPES[0], dtype):
        assert (_measured(call, args), scratch_bytes(_node(call, args), "cpu")) == (0, 0)


def test_a_weights_gradient_takes_what_is_counted():
    args = [_transposed(64, 512, dtype=torch.bfloat16), torch.randn(512, 256, dtype=torch.bfloat16)]
    counted = scratch_bytes(_node(aten.mm.default, args), "cpu")
    assert counted / 1.4 <= _measured(aten.mm.default, args) <= counted


def test_a_left_operand_that_lies_by_rows_is_not_copied():
    rows, columns = torch.randn(64, 512, dtype=torch.bfloat16), _transposed(64, 512, dtype=torch.bfloat16)
    right = torch.randn(512, 256, dtype=torch.bfloat16)
    counted = [scratch_bytes(_node(aten.mm.default, [left, right]), "cpu") for left in (rows, columns)]
    assert counted[1] - counted[0] == 2 * 64 * (512 + 33)


def test_the_memory_model_counts_it_while_the_product_runs_only():
    build = GraphBuilder()
    left = build.input("primals_1", 64, 512, dtype=torch.bfloat16)
    right = build.input("primals_2", 512, 256, dtype=torch.bfloat16)
    product = build(aten.mm.default, left, right)
    gm = build.finish(product)
    timeline = memory_timeline(gm, kept=[left, right])
    live = dict(zip(timeline.nodes, timeline.live_bytes, strict=True))
    result = 2 * 64 * 256
    assert live[product] == result + scratch_bytes(product, "cpu")
    assert live[gm.graph.output_node()] == result
    assert memory_timeline(gm, kept=[left, right], device_type="cuda").peak_bytes == result


def test_only_products_are_counted():
    build = GraphBuilder()
    source = build.input("x", 64, 64, dtype=torch.bfloat16)
    assert scratch_bytes(source, "cpu") == scratch_bytes(build(aten.relu.default, source), "cpu") == 0
