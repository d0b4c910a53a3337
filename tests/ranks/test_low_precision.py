"""Weights that travel in fewer bytes, compiled: the gather extension is traced into the graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, world_mesh
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

Run = Callable[..., list[Any]]
aten = torch.ops.aten


class Scaled(Tensor):
    """A weight in float32 that is gathered as 8-bit codes with a scale in bfloat16 for each row."""

    _data: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> Any:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_data"])

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self._data.abs().amax(1, keepdim=True).clamp(1e-6) / 127
        return ((self._data / scale).round().to(torch.int8), scale.to(torch.bfloat16)), "metadata"

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        codes, scale = gathered
        return codes.to(dtype) * scale.to(dtype), gathered

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(cls, lambda each: each._data, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func.__name__.split(".")[0].endswith("_"):
            return args[0]
        return pytree.tree_map_only(Tensor, cls, result)


class Block(nn.Module):
    """A layer whose weight has an extension, in a checkpointed region if asked."""

    def __init__(self, rows: int, is_checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, rows), nn.Linear(rows, 4)
        self.linear.weight = nn.Parameter(Scaled(self.linear.weight.detach().clone()))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.linear(x)))


def _train(implementation: str, rows: int, is_checkpointed: bool, **options: Any) -> list[Tensor]:
    """Losses and gradients of steps, one of them with two micro-batches, and the weights at the end."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(rows, is_checkpointed), Block(rows, False))
    shard = pick_fully_shard(implementation)
    shard(model[0], mesh=world_mesh(), reshard_after_forward=True)
    shard(model, mesh=world_mesh())
    forward = compile_if_asked(implementation, model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(3):
        for is_last in (False, True) if step == 2 else (True,):
            model.set_requires_gradient_sync(is_last)
            loss = forward(torch.full((3, 4), 0.3 + dist.get_rank() + is_last)).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [each.grad.to_local() for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    assert type(model[0].linear.weight.to_local()) is Scaled
    return [*found, *(getattr(each.to_local(), "_data", each.to_local()) for each in model.parameters())]


def train_compiled(folder: str) -> None:
    """Compiled, losses, gradients and weights are those of the uncompiled model; the codes are what is gathered."""
    dump = {"dump": folder} if dist.get_rank() == 0 else {}
    for rows, is_checkpointed in ((6, False), (5, True)):
        expected, found = (
            _train(each, rows, is_checkpointed, **(dump if rows == 6 else {})) for each in GRAPHSHARD
        )
        assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_extension_is_traced(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    run_on_gloo_ranks(2, train_compiled, str(tmp_path))
    joint = next(tmp_path.glob("graph0.joint.*-tag_recompute.txt")).read_text()
    assert "i8[6, 4] = unshard(" in joint and "'0.linear.weight[0]'" in joint
    assert "bf16[6, 1] = unshard(" in joint and "'0.linear.weight[1]'" in joint
    scaled = [line for line in joint.splitlines() if " = mul(" in line and line.endswith("!recompute")]
    assert len(scaled) == 1, "the full weight of the block that reshards is not saved for its backward"
    sent = [line for line in joint.splitlines() if line.startswith("%convert") and line.endswith("!save")]
    assert len(sent) == 2


class HeldFlat(Scaled):
    """Holds its rows one after the other, so that it cannot be padded along dim 0."""

    def __tensor_flatten__(self) -> Any:
        return ["_flat"], self._data.shape

    @property
    def _flat(self) -> Tensor:
        return self._data.flatten()

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], shape: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_flat"].view(shape))


class Nested(Scaled):
    """Holds a tensor subclass."""

    @property
    def _inner(self) -> Tensor:
        return Scaled(self._data)

    def __tensor_flatten__(self) -> Any:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], _: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_inner"]._data)


class OtherSignature(Scaled):
    """Torch never calls its `__tensor_unflatten__`, which takes no context, in code that is not compiled."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], size: Any, stride: Any) -> Any:
        return Scaled(inner["_data"])


REFUSED = [
    (OtherSignature, 5, r"0.weight .* OtherSignature.__tensor_unflatten__ does not make a OtherSignature"),
    (
        HeldFlat,
        5,
        r"0.weight .* cannot be compiled: shape \(5, 4\) is cut unevenly over 2 ranks, and _flat of HeldFlat",
    ),
    (Nested, 6, r"parameter 0.weight .* cannot be compiled: Nested holds tensor subclasses \(_inner\)"),
]


def refuse_what_cannot_be_traced() -> None:
    for kind, rows, text in REFUSED:
        model = nn.Sequential(nn.Linear(4, rows))
        model[0].weight = nn.Parameter(kind(model[0].weight.detach().clone()))
        pick_fully_shard("compiled")(model, mesh=world_mesh())
        with pytest.raises(Exception, match=text):
            compile_if_asked("compiled", model)(torch.ones(2, 4))


def test_what_cannot_be_traced_is_refused_on_every_rank(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, refuse_what_cannot_be_traced)
