"""`graphshard::reshard` on real ranks: what `DTensor.redistribute` gives, forward and backward, for every pair."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing import assert_close

from graphshard.ir import RESHARD, placement_text

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Shard(2), Partial("sum"), Partial("avg"), Partial("max"))
SHAPES = ((4, 8, 12), (5, 3, 9), (1, 6, 2))


def _start(mesh: DeviceMesh, shape: tuple[int, ...], src: Placement, seed: int) -> DTensor:
    """A tensor in a placement; the terms of a partial one differ between the ranks."""
    rank = dist.get_rank() if src.is_partial() else 0
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    whole = torch.randn(shape, generator=generator)
    if src.is_partial():
        return DTensor.from_local(whole, mesh, [src], run_check=False)
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).redistribute(placements=[src])


def _move(tensor: Tensor, given: DTensor, src: Placement, dst: Placement) -> Tensor:
    mesh = given.device_mesh
    names = (placement_text(src), placement_text(dst))
    place = ("tp", mesh.size(), mesh.get_group().group_name, mesh.get_local_rank())
    return RESHARD(tensor, *names, given.shape, *place)


def _can_move_in_torch(src: Placement, dst: Placement) -> bool:
    """A user of DTensor cannot ask for terms."""
    return src == dst or not dst.is_partial()


def check_all_pairs() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    num_pairs = 0
    for seed, (shape, src, dst) in enumerate(itertools.product(SHAPES, PLACEMENTS, PLACEMENTS)):
        if not _can_move_in_torch(src, dst):
            continue
        given = _start(mesh, shape, src, seed).detach().requires_grad_()
        local = given.to_local().detach().clone().requires_grad_()
        expected = given.redistribute(placements=[dst])
        found = _move(local, given, src, dst)
        what = f"{shape} {src} -> {dst}"
        assert found.is_contiguous(), what
        is_copy = not (src.is_partial() and not dst.is_partial())
        tolerance = {"rtol": 0.0, "atol": 0.0} if is_copy else {}
        assert_close(found, expected.to_local(), msg=lambda text, what=what: f"{what}: {text}", **tolerance)
        if dst.is_partial() or src.is_partial():
            continue  # to_local of terms has another gradient
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        whole = DTensor.from_local(grad, mesh, [Replicate()], run_check=False).redistribute(placements=[dst])
        expected.backward(whole)
        found.backward(whole.to_local())
        assert_close(local.grad, given.grad.to_local(), rtol=0.0, atol=0.0, msg=what)
        num_pairs += 1
    _check_terms(mesh)
    return num_pairs


def _check_terms(mesh: DeviceMesh) -> None:
    """What DTensor does not offer: pieces and whole tensors as terms; and the gradients of terms."""
    for seed, kind in enumerate(("sum", "avg", "max", "min")):
        given = _start(mesh, SHAPES[0], Replicate(), seed)
        terms = _move(given.to_local(), given, Replicate(), Partial(kind))
        assert_close(_move(terms, given, Partial(kind), Replicate()), given.to_local())
    for seed, (shape, dim) in enumerate(itertools.product(SHAPES, range(3))):
        given = _start(mesh, shape, Shard(dim), seed)
        local = given.to_local().detach().requires_grad_()
        terms = _move(local, given, Shard(dim), Partial())
        assert_close(_move(terms, given, Partial(), Replicate()), given.full_tensor())
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        terms.backward(whole)
        placed = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        assert_close(local.grad, placed.redistribute(placements=[Shard(dim)]).to_local())
        term = torch.randn(shape).requires_grad_()
        piece = _move(term, given, Partial(), Shard(dim))
        piece.backward(placed.redistribute(placements=[Shard(dim)]).to_local())
        assert_close(term.grad, whole)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_reshard_is_redistribute(run_on_gloo_ranks, num_ranks):
    num_cut = 1 + 3  # Replicate and three dims
    assert run_on_gloo_ranks(num_ranks, check_all_pairs) == [num_cut**2 * len(SHAPES)] * num_ranks
