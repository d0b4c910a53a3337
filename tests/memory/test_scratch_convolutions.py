"""What convolutions allocate for themselves: never more than is counted, on shapes with every trait that matters."""

from collections.abc import Callable

import pytest
import torch
from support.allocations import peak_bytes
from support.small_graphs import GraphBuilder, aten

from graphshard.ir.tensor_sizes import tensor_bytes
from graphshard.memory.model import memory_timeline
from graphshard.memory.scratch import scratch_bytes

#: Batch, input channels, size, output channels, kernel, stride, groups.
SHAPES = [
    (8, 16, 64, 64, 3, 1, 1),
    (8, 64, 32, 16, 3, 1, 1),
    (8, 3, 64, 64, 7, 2, 1),
    (8, 64, 32, 64, 1, 1, 1),
    (4, 32, 32, 32, 3, 1, 32),
    (2, 64, 16, 128, 3, 2, 1),
    (1, 3, 64, 256, 16, 16, 1),
    (2, 256, 8, 256, 3, 1, 1),
    (1, 16, 32, 16, 3, 1, 1),
]


def _calls(shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format):
    """The op and the arguments of a convolution and of its backward, on real tensors."""
    batch, channels, size, features, kernel, stride, groups = shape
    source = torch.randn(batch, channels, size, size, dtype=dtype).to(memory_format=memory_format)
    weight = torch.randn(features, channels // groups, kernel, kernel, dtype=dtype)
    padding = [kernel // 2 if stride < kernel else 0] * 2
    settings = ([stride] * 2, padding, [1, 1], False, [0, 0], groups)
    result = torch.randn_like(aten.convolution.default(source, weight, None, *settings))
    yield aten.convolution.default, (source, weight, None, *settings)
    yield aten.convolution_backward.default, (result, source, weight, [0], *settings, [True, True, False])


def _node(call: Callable, args: tuple) -> torch.fx.Node:
    build = GraphBuilder()
    inputs = {}
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            inputs[index] = build.input(f"x{index}", *value.shape, dtype=value.dtype)
            if not value.is_contiguous():
                fake = inputs[index].meta["val"]
                inputs[index].meta["val"] = fake.to(memory_format=torch.channels_last)
    return build(call, *(inputs.get(index, value) for index, value in enumerate(args)))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_no_convolution_allocates_more_than_is_counted(shape, dtype, memory_format, num_threads, threads):
    threads(num_threads)
    for call, args in _calls(shape, dtype, memory_format):
        node = _node(call, args)
        measured = min(peak_bytes(lambda: call(*args)) for _ in range(2))  # noqa: B023
        scratch = measured - tensor_bytes(node.meta["val"])
        assert scratch <= scratch_bytes(node, "cpu"), (call, measured)


def test_what_is_counted_is_near_what_large_ones_allocate():
    calls = list(_calls((8, 16, 64, 64, 3, 1, 1), torch.float32, torch.contiguous_format))
    for (call, args), nearness in zip(calls, (0.75, 0.95), strict=True):
        node = _node(call, args)
        measured = min(peak_bytes(lambda: call(*args)) for _ in range(2))  # noqa: B023
        assert measured - tensor_bytes(node.meta["val"]) >= nearness * scratch_bytes(node, "cpu")


def test_the_memory_model_counts_it_while_the_convolution_runs_only():
    build = GraphBuilder()
    source = build.input("primals_1", 2, 16, 8, 8, dtype=torch.float32)
    weight = build.input("primals_2", 32, 16, 3, 3, dtype=torch.float32)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    node = build(aten.convolution.default, source, weight, None, *settings)
    gm = build.finish(node)
    timeline = memory_timeline(gm, kept=[source, weight])
    live = dict(zip(timeline.nodes, timeline.live_bytes, strict=True))
    result, scratch = 4 * 2 * 32 * 64, 4 * (2 * 32 * 64 + 2 * 16 * 64 + 32 * 16 * 9)
    assert (live[node], live[gm.graph.output_node()]) == (result + scratch, result)
    assert memory_timeline(gm, kept=[source, weight], device_type="cuda").peak_bytes == result


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_without_onednn_convolutions_are_unfolded(monkeypatch):
    call, args = next(_calls((8, 64, 32, 16, 3, 1, 1), torch.float32, torch.contiguous_format))
    node = _node(call, args)
    blocked = scratch_bytes(node, "cpu")
    with torch.backends.mkldnn.flags(enabled=False):
        measured = peak_bytes(lambda: call(*args)) - tensor_bytes(node.meta["val"])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert blocked < measured <= scratch_bytes(node, "cpu")
