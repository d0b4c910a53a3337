"""What attention on the CPU allocates for itself: what is counted, of the backward in 16 bits never more.

Threads beside the first also allocate what the profiler does not see: a row of sums each, and in 16 bits their blocks.
"""

import pytest
import torch
from support.allocations import peak_bytes
from support.small_graphs import GraphBuilder

from graphshard.ir.tensor_sizes import tensor_bytes
from graphshard.memory.scratch import scratch_bytes
from graphshard.memory.scratch_attention import ATTENTION, ATTENTION_BACKWARD
from graphshard.memory.scratch_products import is_packed

#: Batch, heads, queries, keys, head.
SHAPES = [
    (4, 4, 128, 128, 64),
    (2, 4, 64, 64, 16),
    (2, 8, 512, 512, 64),
    (2, 2, 192, 777, 33),
    (1, 2, 768, 64, 64),
    (1, 1, 33, 2048, 256),
    (1, 2, 1024, 1024, 128),
    (4, 4, 1, 512, 64),
]
DTYPES = [torch.float32, torch.float64, torch.float16]


def _by_tokens(batch: int, heads: int, tokens: int, head: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(batch, tokens, heads, head, dtype=dtype).transpose(1, 2)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    batch, heads, queries, keys, head = shape
    return [_by_tokens(batch, heads, tokens, head, dtype) for tokens in (queries, keys, keys)]


def _check(call, args: list, least: float) -> None:
    build, inputs = GraphBuilder(), []
    for index, value in enumerate(args):
        inputs.append(value)
        if isinstance(value, torch.Tensor):
            inputs[-1] = build.input(f"x{index}", *value.shape, dtype=value.dtype)
            fake = inputs[-1].meta["val"]
            inputs[-1].meta["val"] = fake.as_strided(value.shape, value.stride())
    node = build(call, *inputs)
    # Its own results: in torch 2.11 float64's sums are of float64, and fake ones of float32.
    measured = min(peak_bytes(lambda: call(*args)) for _ in range(2)) - sum(map(tensor_bytes, call(*args)))
    counted = scratch_bytes(node, "cpu")
    assert least * counted <= measured <= counted
    assert scratch_bytes(node, "cuda") == 0


def _check_both(shape: tuple[int, ...], dtype: torch.dtype, gradient: torch.Tensor | None = None) -> None:
    inputs = _inputs(shape, dtype)
    _check(ATTENTION, [*inputs, 0.0, False], 1.0)
    result, logsumexp = ATTENTION(*inputs, 0.0, False)
    gradient = torch.randn_like(result) if gradient is None else gradient
    is_one_thread = torch.get_num_threads() == 1
    least = (0.3 if is_one_thread else 0.05) if is_packed(dtype) else (1.0 if is_one_thread else 0.99)
    _check(ATTENTION_BACKWARD, [gradient, *inputs, result, logsumexp, 0.0, False], least)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_of_each_thread(shape, dtype, num_threads, threads):
    threads(num_threads)
    _check_both(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_lies_by_heads_is_copied(dtype):
    batch, heads, queries, _, head = shape = SHAPES[0]
    _check_both(shape, dtype, gradient=torch.randn(batch, heads, queries, head, dtype=dtype))
