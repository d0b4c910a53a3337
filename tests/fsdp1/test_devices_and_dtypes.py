"""Where a wrapper computes norms, and which dtype its buffers have, on a process group that does nothing."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.fsdp1 import wrap
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from graphshard import FullyShardedDataParallel


class Scaled(nn.Module):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.linear(x) * self.scale


class _SentError(Exception):
    """Raised in place of a collective."""


@pytest.mark.parametrize("offload", [None, CPUOffload(offload_params=True)])
def test_norms_are_compared_on_the_device_of_the_ranks(fake_group, offload):
    """Also if gradients are on the CPU: NCCL sends no tensor from there."""
    fake_group(2)
    model = wrap("sharded", nn.Linear(4, 4), cpu_offload=offload)
    model(torch.ones(2, 4)).sum().backward()
    on_meta = mock.patch.object(FullyShardedDataParallel, "compute_device", torch.device("meta"))
    with (
        on_meta,
        mock.patch.object(dist, "all_reduce", side_effect=_SentError) as send,
        pytest.raises(_SentError),
    ):
        model.clip_grad_norm_(1.0)
    (sent,), _ = send.call_args
    assert sent.device.type == "meta"


@pytest.mark.parametrize("checkpointed", ["not", "before", "after"])
def test_buffers_of_checkpointed_modules(fake_group, monkeypatch, checkpointed):
    """Cast for compute, and back for state dicts and in eval mode, whenever the module was wrapped to checkpoint it."""
    fake_group(2)
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    half = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    inner = checkpoint_wrapper(Scaled()) if checkpointed == "before" else Scaled()
    model = wrap("sharded", nn.Sequential(wrap("sharded", inner, mixed_precision=half)), mixed_precision=half)
    if checkpointed == "after":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Scaled))
    (buffer,) = model.buffers()
    assert buffer.dtype == torch.bfloat16
    assert model.state_dict()["0.scale"].dtype == torch.float32
    model.eval()
    (buffer,) = model.buffers()
    assert buffer.dtype == torch.float32
    model.train()
    (buffer,) = model.buffers()
    assert buffer.dtype == torch.bfloat16
