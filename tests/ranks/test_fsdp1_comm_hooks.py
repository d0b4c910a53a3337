"""register_comm_hook: a function of the user reduces gradients, as under torch's FSDP1."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1 import full_gradients, wrap
from support.implementations import GRAPHSHARD, compile_if_asked
from support.toy_models import build_mlp
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, reduce_scatter_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close

from graphshard.errors import ConflictingCommError, OptionError, UnsupportedShardingError

LINEARS = ModuleWrapPolicy({nn.Linear})


def compress(state: DefaultState, grad: torch.Tensor, piece: torch.Tensor) -> None:
    """As torch's hooks of low precision, which call a stream and so need a GPU: they replace the tensors' memory."""
    grad.data = grad.data.to(torch.bfloat16)
    piece.data = piece.data.to(torch.bfloat16)
    reduce_scatter_hook(state, grad, piece)
    piece.data = piece.data.to(torch.float32)


def halve(state: DefaultState, grad: torch.Tensor, piece: torch.Tensor) -> None:
    reduce_scatter_hook(state, grad, piece)
    piece.div_(2)


def reduce_by_hooks(implementation: str) -> None:
    found: dict[tuple[str, str], Any] = {}
    for kind in ("fsdp1", implementation):
        for hook in (None, reduce_scatter_hook, halve, compress):
            torch.manual_seed(0)
            wrapper = wrap(kind, build_mlp((4, 5), (5, 2)), auto_wrap_policy=LINEARS)
            if hook is not None:
                wrapper.register_comm_hook(DefaultState(wrapper.process_group), hook)
            forward = compile_if_asked(kind, wrapper)
            with wrapper.no_sync():
                forward(torch.ones(2, 4) * (1.0 + dist.get_rank())).sum().backward()
            forward(torch.arange(8.0).view(2, 4)).sum().backward()
            found[kind, getattr(hook, "__name__", "none")] = full_gradients(wrapper)
        assert_close(found[kind, "reduce_scatter_hook"], found[kind, "none"])
        halved = {name: grad / 2 for name, grad in found[kind, "none"].items()}
        assert_close(found[kind, "halve"], halved)
        assert_close(found[kind, "compress"], found[kind, "none"], rtol=2e-2, atol=2e-2)
        differs = [not torch.equal(found[kind, "compress"][name], grad) for name, grad in found[kind, "none"].items()]
        assert any(differs)
    for name in ("none", "halve", "compress"):
        assert_close(found[implementation, name], found["fsdp1", name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_hooks(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, reduce_by_hooks, implementation)


def refuse_hooks() -> None:
    wrapper = wrap("sharded", build_mlp((4, 5), (5, 2)), auto_wrap_policy=LINEARS)
    state = DefaultState(wrapper.process_group)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = wrap("sharded", nn.Linear(2, 2), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    whole = wrap("sharded", nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)
    cases = [
        (wrapper[0], halve, ConflictingCommError, AssertionError, "on an inner wrapper"),
        (wrapper, 3, OptionError, ValueError, "3 cannot be called"),
        (hybrid, halve, ConflictingCommError, AssertionError, "reduces over two axes"),
        (whole, halve, UnsupportedShardingError, NotImplementedError, "NO_SHARD has none"),
    ]
    wrapper.register_comm_hook(state, halve)
    for model, hook, kind, base, text in [
        *cases,
        (wrapper, halve, ConflictingCommError, AssertionError, "this model has a hook"),
    ]:
        assert issubclass(kind, base)
        with pytest.raises(kind, match=text):
            model.register_comm_hook(state, hook)
    assert copy.deepcopy(wrapper)._state.has_comm_hook


def test_refusals(run_on_gloo_ranks):
    run_on_gloo_ranks(2, refuse_hooks)
