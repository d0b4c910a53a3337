"""What attention's backward allocates on a GPU, beside what CUDA's allocator was asked for on an H100 (torch 2.11)."""

import pytest
import torch
from support.small_graphs import GraphBuilder, aten
from torch._subclasses.fake_tensor import FakeTensorMode

from graphshard.memory import UNMEASURED
from graphshard.memory.scratch_gpu import gpu_scratch_bytes

EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
FLASH = aten._scaled_dot_product_flash_attention_backward.default


def _backward(target, dtype, *shape):
    """A node of that backward, whose operands all have one shape."""
    build = GraphBuilder()
    with FakeTensorMode():
        value = torch.empty(shape, dtype=dtype)
    operands = []
    for index in range(4):
        node = build.input(f"primals_{index + 1}", 1)
        node.meta["val"] = value
        operands.append(node)
    node = operands[0].graph.call_function(target, tuple(operands))
    node.meta["val"] = (value, value, value)
    return node


def test_the_memory_efficient_kernel_as_measured():
    """120 pictures of 17 patches, 4 heads of 16: a workspace, the row sums, and the product that they are sums of."""
    node = _backward(EFFICIENT, torch.float32, 120, 4, 17, 16)
    assert gpu_scratch_bytes(node) == 7_872_000 + 32_640 + 522_240


@pytest.mark.parametrize(
    ("dtype", "shape", "sums"),
    [
        (torch.float32, (1, 1, 64, 64), 4100),
        (torch.float32, (1, 1, 65, 64), 2 * 4100),
        (torch.float32, (1, 1, 64, 65), 2 * 4100),
        (torch.bfloat16, (1, 1, 64, 128), 2 * 4100 + 2 * 64 * 128),
    ],
)
def test_the_memory_efficient_kernel_has_a_tile_for_each_block(dtype, shape, sums):
    tokens, head = shape[2:]
    node = _backward(EFFICIENT, dtype, *shape)
    assert gpu_scratch_bytes(node) == 4 * (sums + tokens + tokens * head)


@pytest.mark.parametrize(("tokens", "head", "rows"), [(128, 64, 128 * 65), (129, 65, 256 * 97)])
def test_flash_attention_sums_in_float32_over_rounded_sizes(tokens, head, rows):
    assert gpu_scratch_bytes(_backward(FLASH, torch.bfloat16, 2, 3, tokens, head)) == 4 * 6 * rows


def test_the_model_counts_it_on_gpus_alone():
    node = _backward(FLASH, torch.bfloat16, 1, 1, 128, 32)
    assert UNMEASURED.bytes_of(node, "cuda") == gpu_scratch_bytes(node) > 0
    assert UNMEASURED.bytes_of(node, "meta") == 0
    build = GraphBuilder()
    assert UNMEASURED.bytes_of(build(aten.relu.default, build.input("primals_1", 2)), "cuda") == 0
