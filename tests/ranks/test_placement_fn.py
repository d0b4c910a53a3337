"""`shard_placement_fn`: parameters cut along another dim, or over a mesh of their own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, UNCOMPILED, compile_if_asked, pick_fully_shard, world_mesh
from support.meshes_parity import Arrangement, FullyShard, check_full, make_adam, named_mesh, train_on_mesh
from support.torch_versions import NEEDS_MESH_PER_PARAMETER, ShardPlacementResult
from support.toy_models import WORKLOADS, Workload, build_mlp, mlp_workload
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close

from .test_refusals import expect_error


def largest_dim(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(-1)


def matrices_by_column(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


PLACEMENTS: dict[str, Callable[[nn.Parameter], Shard | None]] = {
    function.__name__: function for function in (largest_dim, last_dim, matrices_by_column)
}
EVEN_MLP = mlp_workload((8, 16), (16, 12), (12, 4))


def shard_over_world(workload: Workload, **options: object) -> Arrangement:
    def shard(fully_shard: FullyShard, model: nn.Module) -> None:
        for unit in [*workload.list_units(model), model]:
            fully_shard(unit, mesh=world_mesh(), **options)

    return Arrangement(shard=shard, num_batches=dist.get_world_size(), batch_index=dist.get_rank())


def train_with_placements(workload: Workload | str, implementation: str, placement: str) -> None:
    workload = WORKLOADS[workload] if isinstance(workload, str) else workload
    train_on_mesh(
        workload, implementation, shard_over_world(workload, shard_placement_fn=PLACEMENTS[placement])
    )


def train_even_mlp(implementation: str, placement: str) -> None:
    train_with_placements(EVEN_MLP, implementation, placement)


def largest_even_dim(parameter: nn.Parameter) -> Shard:
    """The largest dim, and dim 0 where that is another one that the ranks cannot share evenly."""
    placement = largest_dim(parameter)
    return placement if parameter.shape[placement.dim] % dist.get_world_size() == 0 else Shard(0)


def train_transformer(implementation: str) -> None:
    workload = WORKLOADS["transformer"]
    train_on_mesh(workload, implementation, shard_over_world(workload, shard_placement_fn=largest_even_dim))


def train_uneven_columns(implementation: str) -> None:
    """FSDP2 refuses to cut 7 and 5 columns over 2 or 4 ranks; graphshard pads any dim."""
    torch.manual_seed(42)
    workload = mlp_workload((7, 5), (5, 3))
    reference = workload.build()
    model = copy.deepcopy(reference)
    shard_over_world(workload, shard_placement_fn=matrices_by_column).shard(
        pick_fully_shard(implementation), model
    )
    forward = compile_if_asked(implementation, model)
    optimizers = [make_adam(each) for each in (reference, model)]
    world_size, rank = dist.get_world_size(), dist.get_rank()
    assert model[0].weight.placements == (Shard(1),)
    pieces = torch.chunk(reference[0].weight, world_size, dim=1)
    expected_piece = pieces[rank] if rank < len(pieces) else reference[0].weight[:, :0]
    assert_close(model[0].weight.to_local(), expected_piece)
    for step in range(4):
        batches = [workload.batch_of(index, step) for index in range(world_size)]
        losses = torch.stack([workload.loss(reference, batch) for batch in batches])
        losses.mean().backward()
        loss = workload.loss(forward, batches[rank])
        loss.backward()
        assert_close(loss, losses[rank])
        for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
            check_full(f"gradient of {name}", expected.grad, found.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
            check_full(name, expected.detach(), found)


class ShapeInside(nn.Module):
    """Remembers what its weight looks like in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        self.seen = (tuple(weight.shape), weight.is_contiguous(), type(weight) is DTensor)
        return x @ weight


def copy_uneven_columns(implementation: str) -> None:
    """A deep copy has contiguous shards too, of its own."""
    model = build_mlp((7, 5), (5, 3))
    pick_fully_shard(implementation)(model, mesh=world_mesh(), shard_placement_fn=matrices_by_column)
    for one, other in zip(model.parameters(), copy.deepcopy(model).parameters(), strict=True):
        check_full("copy", one.full_tensor().detach(), other)
        assert other.placements == one.placements
        assert other.to_local().numel() == 0 or other.to_local().data_ptr() != one.to_local().data_ptr()


def look_inside_forward(implementation: str) -> None:
    model = ShapeInside()
    pick_fully_shard(implementation)(model, mesh=world_mesh(), shard_placement_fn=matrices_by_column)
    model(torch.ones(2, 4)).sum().backward()
    assert model.seen == ((4, 6), True, False)


def keep_a_mesh_per_parameter(implementation: str) -> None:
    """One unit on (a, b): its weights are sharded over all ranks, its biases over axis b alone."""
    torch.manual_seed(0)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = named_mesh((2, world_size // 2), ("a", "b"))
    whole = FSDPMeshInfo(named_mesh((world_size,), ("all",)), shard_mesh_dim=0)
    inner = FSDPMeshInfo(mesh["b"], shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        if parameter.ndim == 2:
            return ShardPlacementResult(placement=Shard(1), mesh_info=whole)
        return ShardPlacementResult(placement=None, mesh_info=inner)

    reference = build_mlp((4, 8), (8, 4))
    model = copy.deepcopy(reference)
    pick_fully_shard(implementation)(model, mesh=whole.mesh, shard_placement_fn=place)
    assert model[0].weight.to_local().shape == (8, 4 // world_size)
    assert model[0].weight.device_mesh.mesh_dim_names == ("all",)
    assert model[0].bias.to_local().shape == (8 // (world_size // 2),)
    assert model[0].bias.device_mesh.mesh_dim_names == ("b",)
    inputs = torch.randn(world_size, 3, 4)
    losses = [reference(each).square().mean() for each in inputs]
    compile_if_asked(implementation, model)(inputs[rank]).square().mean().backward()
    by_rank = [torch.autograd.grad(loss, list(reference.parameters()), retain_graph=True) for loss in losses]
    my_group = mesh["b"].mesh.tolist()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        ranks = range(world_size) if parameter.ndim == 2 else my_group
        expected = torch.stack([by_rank[each][index] for each in ranks]).mean(0)
        assert parameter.grad.device_mesh == parameter.device_mesh
        assert_close(parameter.grad.full_tensor(), expected, msg=lambda text, name=name: f"{name}: {text}")


@dataclass(frozen=True, slots=True)
class BadPlacement:
    """A placement that is refused, FSDP2's exception type, and what graphshard's message must hold."""

    placement: object
    kind: type[Exception]
    graphshard_says: str


BAD_PLACEMENTS = {
    "dim too large": BadPlacement(
        Shard(2), AssertionError, r"0\.weight \(8, 4\).*0 to 1.*1\.weight \(4, 8\)"
    ),
    "not a placement": BadPlacement("rows", ValueError, r"'rows'.*0\.weight \(8, 4\).*Shard\(dim\)"),
    "number": BadPlacement(1, ValueError, r"returned 1 for.*0\.weight"),
}


def refuse_placement(implementation: str, name: str) -> None:
    bad = BAD_PLACEMENTS[name]
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    with expect_error(implementation, bad.kind, graphshard_says=bad.graphshard_says):
        pick_fully_shard(implementation)(
            model, mesh=world_mesh(), shard_placement_fn=lambda parameter: bad.placement
        )


def refuse_replication() -> None:
    """FSDP2 fails on its `dim` attribute or an assertion; graphshard says what may be returned."""
    with expect_error("sharded", ValueError, graphshard_says=r"Replicate\(\).*weight.*Shard\(dim\)"):
        pick_fully_shard("sharded")(
            nn.Linear(4, 4), mesh=world_mesh(), shard_placement_fn=lambda parameter: Replicate()
        )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_mlp_cut_along_other_dims(run_on_gloo_ranks, implementation, placement, world_size):
    run_on_gloo_ranks(world_size, train_even_mlp, implementation, placement)


@pytest.mark.parametrize("placement", ["last_dim", "matrices_by_column"])
def test_compiled_mlp_cut_along_other_dims(run_on_gloo_ranks, placement):
    run_on_gloo_ranks(2, train_even_mlp, "compiled", placement)


@pytest.mark.parametrize(
    "implementation", ["fsdp2", "sharded", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_transformer_cut_along_largest_dims(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_transformer, implementation)


@pytest.mark.parametrize(("implementation", "world_size"), [("sharded", 2), ("sharded", 4), ("compiled", 4)])
def test_uneven_columns(run_on_gloo_ranks, implementation, world_size):
    run_on_gloo_ranks(world_size, train_uneven_columns, implementation)


def test_copy_of_uneven_columns(run_on_gloo_ranks):
    run_on_gloo_ranks(2, copy_uneven_columns, "sharded")


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_full_parameter_is_contiguous_in_forward(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, look_inside_forward, implementation)


@NEEDS_MESH_PER_PARAMETER
@pytest.mark.parametrize("implementation", ["fsdp2", *GRAPHSHARD])
def test_mesh_per_parameter(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, keep_a_mesh_per_parameter, implementation)


@pytest.mark.parametrize("name", BAD_PLACEMENTS)
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_bad_placement_is_refused(run_on_gloo_ranks, implementation, name):
    run_on_gloo_ranks(2, refuse_placement, implementation, name)


def test_replication_is_refused(run_on_gloo_ranks):
    run_on_gloo_ranks(2, refuse_replication)
