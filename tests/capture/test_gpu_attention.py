"""Attention of captures for GPUs. The kernels do not exist on the CPU: their fakes say what they give."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.capture.capture_step import capture_step, plain_module
from graphshard.capture.gpu_attention import gpu_attention
from graphshard.capture.rules import ShardingRules

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARDS = {
    FLASH: aten._scaled_dot_product_flash_attention_backward.default,
    EFFICIENT: aten._scaled_dot_product_efficient_attention_backward.default,
    CPU: aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _run(dtype, *shapes, **options):
    """The result on meta tensors, and the calls of kernels of attention; none where it is made of products."""
    with _Recording() as recording:
        given = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
        result = gpu_attention(*given, **options)
    return result, [call for call in recording.calls if call[0] in (FLASH, EFFICIENT)]


def _kernel(dtype, *shapes, **options):
    result, calls = _run(dtype, *shapes, **options)
    assert result.shape == (*shapes[0][:-1], shapes[2][-1]) and result.dtype is dtype
    return calls[0][0] if calls else None


SAME = ((2, 4, 24, 16),) * 3
GROUPED = ((2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16))
LONGER = ((2, 4, 24, 16), (2, 4, 48, 16), (2, 4, 48, 16))


@pytest.mark.parametrize(
    ("dtype", "shapes", "options", "expected"),
    [
        (BF16, SAME, {}, FLASH),
        (torch.float16, SAME, {"is_causal": True, "dropout_p": 0.1}, FLASH),
        (BF16, GROUPED, {"enable_gqa": True}, FLASH),
        (BF16, LONGER, {}, FLASH),
        (BF16, LONGER, {"is_causal": True}, EFFICIENT),
        (BF16, ((2, 4, 24, 512),) * 3, {}, EFFICIENT),
        (BF16, (*SAME[:2], (2, 4, 24, 32)), {}, EFFICIENT),
        (BF16, ((2, 4, 24, 20),) * 3, {}, FLASH),
        (F32, SAME, {}, EFFICIENT),
        (F32, SAME, {"enable_gqa": True}, EFFICIENT),
        (F32, ((2, 4, 24, 20),) * 3, {}, EFFICIENT),
        (F32, ((2, 4, 24, 18),) * 3, {}, None),
        (F32, GROUPED, {"enable_gqa": True}, None),
        (torch.float64, SAME, {}, None),
        (BF16, ((4, 24, 16),) * 3, {}, None),
    ],
)  # fmt: skip
def test_the_kernel_follows_from_dtype_and_sizes(dtype, shapes, options, expected):
    assert _kernel(dtype, *shapes, **options) == expected


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("mask_dtype", [None, torch.bool], ids=str)
def test_a_mask_is_of_all_scores_and_its_rows_are_aligned(dtype, mask_dtype):
    mask = torch.empty(1, 1, 24, 21, dtype=mask_dtype or dtype, device="meta")
    shapes = ((2, 4, 24, 16), (2, 4, 21, 16), (2, 4, 21, 16))
    _, ((kernel, args, _),) = _run(dtype, *shapes, attn_mask=mask)
    assert kernel is EFFICIENT and args[3].dtype is dtype
    assert args[3].shape == (2, 4, 24, 21) and args[3].stride() == (0, 0, 24, 1)


def test_a_mask_of_one_column_needs_products():
    mask = torch.empty(2, 4, 24, 1, device="meta").expand(2, 4, 24, 24)
    assert _kernel(F32, *SAME, attn_mask=mask) is None


def test_heads_of_odd_sizes_are_padded_and_scaled_as_they_were():
    _, ((_, args, kwargs),) = _run(BF16, *((2, 4, 24, 20),) * 3)
    assert [each.shape[-1] for each in args[:3]] == [24] * 3
    assert kwargs["scale"] == pytest.approx(20**-0.5)
    _, ((_, _, kwargs),) = _run(BF16, *((2, 4, 24, 20),) * 3, scale=0.5)
    assert kwargs["scale"] == 0.5


@pytest.mark.parametrize(("dtype", "shapes"), [(BF16, SAME), (F32, SAME)])
def test_kernels_that_the_user_forbids_are_not_taken(dtype, shapes):
    with sdpa_kernel([SDPBackend.MATH]):
        assert _kernel(dtype, *shapes) is None
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        assert _kernel(dtype, *shapes) == EFFICIENT


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "bool"}], ids=str)
def test_products_give_what_attention_gives(options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 6, dtype=torch.float64) for _ in range(3))
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(5, 5) > 0.3}
    torch.testing.assert_close(gpu_attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))
    grouped = q, k[:, :2], v[:, :2]
    torch.testing.assert_close(
        gpu_attention(*grouped, enable_gqa=True), F.scaled_dot_product_attention(*grouped, enable_gqa=True)
    )


class _Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


class _Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0].square().mean()


X = torch.randn(3, 20, 64)


def _exported():
    return plain_module(torch.export.export(_Plain(), (X,)))


def _attention(captured):
    kernels = {*BACKWARDS, *BACKWARDS.values()}
    nodes = [*captured.forward.graph.nodes, *captured.backward.graph.nodes]
    return [node.target for node in nodes if node.target in kernels]


@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
@pytest.mark.parametrize("make", [_Plain, _Multihead, _exported])
def test_captures_for_gpus_have_their_kernels(make, dtype):
    rules = ShardingRules(mesh={"shard": 2}, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    for device_type, kernel in (("cuda", FLASH if dtype is BF16 else EFFICIENT), ("cpu", CPU), (None, CPU)):
        captured = capture_step(make(), (X,), rules=rules, device_type=device_type)
        assert _attention(captured) == [kernel, BACKWARDS[kernel]]


def test_checkpointed_attention_of_gpus():
    rules = ShardingRules(mesh={"shard": 2})
    model = nn.Sequential(_Plain())
    captured = capture_step(model, (X,), rules=rules, checkpoint=["0"], device_type="cuda")
    assert _attention(captured) == [EFFICIENT, EFFICIENT, BACKWARDS[EFFICIENT]]


def test_the_memory_of_both_layouts_is_told_apart():
    """A gathered batch in the second dim: the CPU keeps that order in what attention gives, the GPU does not."""
    rules = ShardingRules(mesh={"shard": 2})
    strides = []
    for device_type in ("cuda", "cpu"):
        captured = capture_step(copy.deepcopy(_Multihead()), (X,), rules=rules, device_type=device_type)
        (node,) = (node for node in captured.forward.graph.nodes if node.target in (EFFICIENT, CPU))
        strides.append(node.meta["val"][0].stride())
    # X has 3 tokens of 20 sequences: (sequences, heads, tokens, head).
    assert strides == [(192, 16, 64, 1), (64, 16, 1280, 1)]
