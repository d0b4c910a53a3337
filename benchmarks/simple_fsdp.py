"""SimpleFSDP as a rival: each parameter is gathered where it is read, and Inductor's overlap pass does the rest.

The design is that of torchtitan's graph_trainer (arXiv 2411.00284), written anew in a few lines: a parametrization
gathers the shard, is recomputed for the backward, and reduces the gradient there. Inductor merges and moves the
collectives (``torch._inductor.fx_passes.overlap_scheduling``), told by us what the links take; what compute takes it
measures itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_COLLECTIVES = torch.ops._c10d_functional
_RECOMPUTED = {
    _COLLECTIVES.all_gather_into_tensor.default,
    _COLLECTIVES.wait_tensor.default,
    torch.ops.aten._to_copy.default,
}


class _Gather(torch.autograd.Function):
    """All ranks' rows in bfloat16; gradients are averaged in float32."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, num_ranks: int, group: str) -> Tensor:
        ctx.num_ranks, ctx.group = num_ranks, group
        return _COLLECTIVES.wait_tensor(
            _COLLECTIVES.all_gather_into_tensor(shard.to(torch.bfloat16), num_ranks, group)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        reduced = _COLLECTIVES.reduce_scatter_tensor(
            grad.float().contiguous(), "avg", ctx.num_ranks, ctx.group
        )
        return _COLLECTIVES.wait_tensor(reduced), None, None


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if op in _RECOMPUTED else CheckpointPolicy.MUST_SAVE


class _Gathered(nn.Module):
    def __init__(self, num_ranks: int, group: str) -> None:
        super().__init__()
        self.num_ranks, self.group = num_ranks, group

    def forward(self, shard: Tensor) -> Tensor:
        return checkpoint(
            _Gather.apply,
            shard,
            self.num_ranks,
            self.group,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, _policy),
        )


def shard_simply(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Cut all parameters by rows, which the ranks must divide, and gather them where they are read."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = parameter.detach().chunk(group.size())[group.rank()].clone()
            setattr(module, name, nn.Parameter(shard))
            gathered = _Gathered(group.size(), group.group_name)
            parametrize.register_parametrization(module, name, gathered, unsafe=True)
    return model


def compile_with_overlap(
    model: nn.Module, seconds_of: Callable[[str, int], float]
) -> Callable[..., Tensor]:
    """``torch.compile`` with Inductor's overlap pass; needs a GPU, since the pass asks for its rates.

    ``seconds_of`` says what a collective of a kind takes for so many bytes.
    """
    from torch._inductor import config

    call = torch.compile(model, fullgraph=True)
    patches = {
        "fx_graph_cache": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        "aten_distributed_optimizations.collective_bucketing": True,
        "aten_distributed_optimizations.custom_runtime_estimation": partial(_milliseconds, seconds_of),
    }

    def compiled(*args: Any) -> Tensor:
        with config.patch(patches), mock.patch.dict("os.environ", {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}):
            return call(*args)

    return compiled


def _milliseconds(
    seconds_of: Callable[[str, int], float], node: fx.Node, override_size: int | None = None
) -> float | None:
    """Of a collective alone; Inductor measures compute."""
    name = str(node.target)
    kind = next((kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind in name), None)
    if kind is None or not name.startswith(("_c10d_functional", "bucketing")):
        return None
    values = [source.meta["val"] for source in (*node.all_input_nodes, node)]
    values = [value for value in values if isinstance(value, Tensor)]
    size = max(value.numel() * value.element_size() for value in values)
    return 1e3 * seconds_of(kind, size if override_size is None else override_size)
