"""Weights that travel in fewer bytes, compiled: the gather extension is traced into the graph."""

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import list_collectives
from support.cost_cards import round_card
from support.implementations import GRAPHSHARD, compile_if_asked, pick_fully_shard, world_mesh
from support.low_precision import HeldFlat, Scaled
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import graphshard

CARD = "cpu-loopback"
Run = Callable[..., list[Any]]
aten = torch.ops.aten


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
    model = _sharded(implementation, rows, is_checkpointed)
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


def _sharded(implementation: str, rows: int, is_checkpointed: bool) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(Block(rows, is_checkpointed), Block(rows, False))
    shard = pick_fully_shard(implementation)
    shard(model[0], mesh=world_mesh(), reshard_after_forward=True)
    shard(model, mesh=world_mesh())
    return model


def _inspected(rows: int) -> list[tuple[str, str, str, int]]:
    """Half, kind, unit and bytes of the collectives in a report on the sharded model."""
    model = _sharded("compiled", rows, False)
    report = graphshard.inspect(model, [torch.ones(3, 4)], hardware=round_card(), loss=_loss)
    return [(half.name, one.kind, one.unit, one.num_bytes) for half in report.halves for one in half.collectives]


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def train_compiled(folder: str) -> list[tuple[str, str, str, int]]:
    """Compiled, losses, gradients and weights are those of the uncompiled model; the codes are what is gathered.

    With a card too, where casts and gathers move, and buckets hold codes of several blocks.
    """
    dump = {"dump": folder} if dist.get_rank() == 0 else {}
    for rows, is_checkpointed, options in ((6, False, dump), (5, True, {}), (6, False, {"hardware": CARD})):
        expected, found = (_train(each, rows, is_checkpointed, **options) for each in GRAPHSHARD)
        assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return _inspected(6)


def test_an_extension_is_traced(run_on_gloo_ranks: Run, tmp_path: Path) -> None:
    inspected, *_ = run_on_gloo_ranks(2, train_compiled, str(tmp_path))
    joint = next(tmp_path.glob("graph0.joint.*-tag_recompute.txt")).read_text()
    assert "i8[6, 4] = unshard(" in joint and "'0.linear.weight[0]'" in joint
    assert "bf16[6, 1] = unshard(" in joint and "'0.linear.weight[1]'" in joint
    scaled = [line for line in joint.splitlines() if " = mul(" in line and line.endswith("!recompute")]
    assert len(scaled) == 1, "the full weight of the block that reshards is not saved for its backward"
    sent = [line for line in joint.splitlines() if line.startswith("%convert") and line.endswith("!save")]
    assert len(sent) == 2
    for half in ("forward", "backward"):
        (text,) = (path.read_text() for path in tmp_path.glob(f"graph0.{half}.*-bucket_collectives.txt"))
        run = sorted(_gathered_bytes(line) for line in text.splitlines() if "= all_gather_into_tensor(" in line)
        assert sorted(size for name, kind, _, size in inspected if (name, kind) == (half, "all_gather")) == run
        assert text.count("= all_gather_into_tensor(") <= 6, "a bucket a unit and dtype"
    assert {unit for _, _, unit, _ in inspected} == {"0", "root"}


def _gathered_bytes(line: str) -> int:
    """Bytes of the result of a gather, by its line in a graph: ``%name: i8[6, 4] = ...``."""
    dtype, shape = re.match(r"%\w+: (\w+)\[([\d, ]*)\]", line).groups()
    itemsize = {"i8": 1, "u8": 1, "bf16": 2, "f32": 4}[dtype]
    return itemsize * math.prod(int(size) for size in shape.split(","))


class Rounded(Scaled):
    """Travels in bfloat16, and in nothing else."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        (rounded,) = gathered
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(rounded.to(dtype))
            return None
        full = rounded.to(dtype)
        return full, (rounded, full)


class Coded(Rounded):
    """Travels in 8 bits, and in nothing else."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return ((self._data * 64).round().clamp(-127, 127).to(torch.int8),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather((gathered[0].to(dtype) / 64,), metadata, dtype, out=out)


def _trained(implementation: str, kind: type) -> tuple[list[Tensor], list[tuple[str, int]]]:
    """Losses and weights of three steps, and the collectives of the last."""
    torch.manual_seed(5)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    for layer in layers:
        layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))
        pick_fully_shard(implementation)(layer, mesh=world_mesh(), reshard_after_forward=True)
    pick_fully_shard(implementation)(model, mesh=world_mesh())
    forward = compile_if_asked(implementation, model, hardware=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(3):
        x = torch.linspace(-1, 1, 32).view(4, 8).add(dist.get_rank()).requires_grad_()
        with list_collectives() if step == 2 else nullcontext([]) as listed:
            losses.append(forward(x).square().mean())
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(each.to_local()._data for each in model.parameters())], listed


def compare_with_fsdp2() -> None:
    """Uncompiled FSDP2 is the reference; this is graphshard compiled."""
    for kind in (Rounded, Coded, Scaled):
        (expected, of_fsdp2), (found, listed) = (_trained(each, kind) for each in ("fsdp2", "compiled"))
        assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert len(listed) >= 9
        if kind is Scaled:  # FSDP2 has one gather of bytes for codes and scales
            assert sum(size for _, size in listed) == sum(size for _, size in of_fsdp2)
        else:
            assert listed == of_fsdp2


def test_losses_and_collectives_are_those_of_fsdp2(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, compare_with_fsdp2)


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


def train_one_unit() -> None:
    """All parameters of a unit, weights and biases, have extensions; a checkpointed region reads two of them."""
    found = []
    for implementation in GRAPHSHARD:
        torch.manual_seed(7)
        model = nn.Sequential(Block(6, True), Block(6, False))
        for part in [part for part in model.modules() if isinstance(part, nn.Linear)]:
            part.weight = nn.Parameter(Rounded(getattr(part.weight, "_data", part.weight).detach().clone()))
            part.bias = nn.Parameter(Rounded(part.bias.detach().clone()))
        pick_fully_shard(implementation)(model, mesh=world_mesh(), reshard_after_forward=True)
        loss = compile_if_asked(implementation, model)(torch.full((3, 4), 0.5)).square().mean()
        loss.backward()
        found.append([loss.detach(), *(each.grad.to_local() for each in model.parameters())])
    assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_unit_has_several_extended_parameters(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, train_one_unit)


def test_what_cannot_be_traced_is_refused_on_every_rank(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, refuse_what_cannot_be_traced)
