"""Does a model sharded over some axes of a mesh train like the unsharded one, and like FSDP2 on the same mesh?

Ranks with the same place on the data-parallel axes see the same batch. Values are compared as full tensors
with the unsharded model, and shard by shard, mesh and placements included, with FSDP2.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from support.implementations import compile_if_asked, pick_fully_shard
from support.thorough import is_thorough
from support.toy_models import Workload

FullyShard = Callable[..., nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How a workload is spread over the ranks."""

    shard: Callable[[FullyShard, nn.Module], object]
    """(fully_shard, model) -> anything; parallelises and shards the model in place."""
    num_batches: int
    """Ranks on the data-parallel axes."""
    batch_index: int
    """This rank's place on them."""


@functools.cache
def named_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh object per process: DTensor's caches mix up equal meshes, and FSDP2 asks for the same object."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def check_like_unsharded(reference: nn.Module, model: nn.Module, *, tolerance: float | None = None) -> None:
    """Names, values, gradients and their absence; every local piece contiguous."""
    expected = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        check_full(name, expected[name].detach(), parameter, tolerance)
        gradient, expected_gradient = parameter.grad, expected[name].grad
        assert (gradient is None) == (expected_gradient is None), f"gradient of {name}"
        if gradient is not None:
            assert gradient.placements == parameter.placements, name
            check_full(f"gradient of {name}", expected_gradient, gradient, tolerance)


def check_full(name: str, expected: Tensor, found: Tensor, tolerance: float | None = None) -> None:
    """A DTensor whose full tensor is `expected`."""
    assert isinstance(found, DTensor), f"{name} is a {type(found).__name__}"
    assert found.shape == expected.shape and found.is_contiguous(), name
    assert found.to_local().is_contiguous(), f"{name}: {found.to_local().stride()}"
    assert_close(
        found.full_tensor().detach(),
        expected,
        atol=tolerance,
        rtol=tolerance,
        msg=lambda text: f"{name}: {text}",
    )


def check_like_fsdp2(fsdp2: nn.Module, model: nn.Module) -> None:
    """Every shard where FSDP2 has it, with its values."""
    for (name, one), (other_name, other) in zip(
        fsdp2.named_parameters(), model.named_parameters(), strict=True
    ):
        assert other_name == name
        for theirs, ours, what in ((one, other, name), (one.grad, other.grad, f"gradient of {name}")):
            assert (theirs is None) == (ours is None), what
            if theirs is None:
                continue
            assert ours.placements == theirs.placements, f"{what}: {ours.placements}, not {theirs.placements}"
            assert ours.device_mesh == theirs.device_mesh, f"{what}: {ours.device_mesh}"
            assert ours.device_mesh.mesh_dim_names == theirs.device_mesh.mesh_dim_names, what
            assert ours.stride() == theirs.stride() and ours.requires_grad == theirs.requires_grad, what
            assert_close(
                ours.to_local(),
                theirs.to_local(),
                msg=lambda text, what=what: f"{what} against FSDP2: {text}",
            )


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)


def train_on_mesh(
    workload: Workload,
    implementation: str,
    arrangement: Arrangement,
    *,
    num_steps: int | None = None,
    tolerance: float | None = None,
    clip_to: float | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """Adam steps of the unsharded model, of FSDP2's and of the implementation's; returns the latter.

    Four steps, in `make test` two. `options` are those of the backend.
    """
    if num_steps is None:
        num_steps = 4 if is_thorough() else 2
    torch.manual_seed(42)
    reference = workload.build()
    model, fsdp2 = copy.deepcopy(reference), copy.deepcopy(reference)
    arrangement.shard(pick_fully_shard(implementation), model)
    arrangement.shard(pick_fully_shard("fsdp2"), fsdp2)
    check_like_unsharded(reference, model)
    check_like_fsdp2(fsdp2, model)
    forward = compile_if_asked(implementation, model, **options or {})
    optimizers = [make_adam(each) for each in (reference, fsdp2, model)]
    for step in range(num_steps):
        batches = [workload.batch_of(index, step) for index in range(arrangement.num_batches)]
        expected = torch.stack([workload.loss(reference, batch) for batch in batches])
        expected.mean().backward()
        losses = [workload.loss(each, batches[arrangement.batch_index]) for each in (fsdp2, forward)]
        for loss in losses:
            assert_close(loss.detach(), expected[arrangement.batch_index].detach())
            loss.backward()
        if clip_to is not None:
            norms = [
                nn.utils.clip_grad_norm_(each.parameters(), clip_to) for each in (reference, fsdp2, model)
            ]
            values = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
            assert_close(values[1:], [values[0]] * 2)
            assert values[0] > clip_to, "nothing was clipped"
        check_like_unsharded(reference, model, tolerance=tolerance)
        check_like_fsdp2(fsdp2, model)
        for optimizer in optimizers:
            optimizer.step()
        check_like_unsharded(reference, model, tolerance=tolerance)
        check_like_fsdp2(fsdp2, model)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return model
