"""`dp_mesh_dims`: one mesh for all parallelisms, every parameter and activation a DTensor on it."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.implementations import UNCOMPILED, pick_fully_shard
from support.meshes_parity import Arrangement, FullyShard, named_mesh, train_on_mesh
from support.torch_versions import NEEDS_MESH_DIMS, DataParallelMeshDims
from support.toy_models import Workload
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import graphshard
from graphshard.errors import UnsupportedShardingError
from graphshard.fsdp.state import placements

from .test_refusals import expect_error

pytestmark = NEEDS_MESH_DIMS

JOINS_SHARD_AXES = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.12: FSDP2 leaves two shard axes apart, graphshard joins them"
)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(6, 8)
        self.contract = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(F.relu(self.expand(x)))


class OnMesh(nn.Module):
    """Once it has a mesh: rows are split over its axes of data parallelism, and copied over `tp`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FeedForward() for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, self.split(Shard(0), Replicate()), run_check=False)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=self.split(Shard(0), Replicate())).to_local()
        return x * 2.0

    def split(self, on_data: object, on_tp: object) -> list[object]:
        return [on_tp if name == "tp" else on_data for name in self.mesh.mesh_dim_names]


WORKLOAD = Workload(
    build=OnMesh,
    list_units=lambda model: list(model.layers),
    draw_batch=lambda generator, size: (torch.randn(size, 6, generator=generator),),
    loss=lambda forward, batch: (forward(*batch) * torch.arange(6.0) - 1.0).square().mean(),
)


def put_on_mesh(model: OnMesh, mesh: DeviceMesh) -> None:
    model.mesh = mesh
    cuts = {"expand.weight": Shard(0), "expand.bias": Shard(0), "contract.weight": Shard(1)}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = cuts.get(f"{path.rpartition('.')[2]}.{name}", Replicate())
            spread = distribute_tensor(parameter.detach(), mesh, model.split(Replicate(), cut))
            module.register_parameter(name, nn.Parameter(spread))


MESHES = {
    # name: shape, axes, shard, replicate
    "shard": ((2, 2), ("dp", "tp"), "dp", None),
    "hybrid": ((2, 2, 1), ("copy", "dp", "tp"), "dp", "copy"),
    "hybrid_tp": ((1, 2, 2), ("copy", "dp", "tp"), "dp", "copy"),
    "two_shard_axes": ((2, 2, 1), ("dp", "cp", "tp"), ("dp", "cp"), None),
    "tp_first": ((2, 2), ("tp", "dp"), "dp", None),
    "copies_only": ((2, 2), ("dp", "tp"), None, "dp"),
}


def train_on_named_axes(implementation: str, name: str) -> None:
    shape, axes, shard_names, replicate_names = MESHES[name]
    mesh = named_mesh(shape, axes)
    dims = DataParallelMeshDims(shard=shard_names, replicate=replicate_names)

    def shard(fully_shard: FullyShard, model: nn.Module) -> None:
        put_on_mesh(model, mesh)
        for unit in [*model.layers, model]:
            fully_shard(unit, mesh=mesh, dp_mesh_dims=dims)

    coordinates = dict(zip(axes, mesh.get_coordinate(), strict=True))
    index = 0
    for axis, size in zip(axes, shape, strict=True):
        if axis != "tp":
            index = index * size + coordinates[axis]
    num_batches = mesh.size() // mesh["tp"].size()
    arrangement = Arrangement(shard=shard, num_batches=num_batches, batch_index=index)
    train_on_mesh(WORKLOAD, implementation, arrangement)


def refuse(implementation: str, name: str) -> None:
    mesh = named_mesh((2, 2), ("dp", "tp"))
    other = named_mesh((4, 1), ("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    model = nn.Linear(4, 4, bias=False)
    if name == "cut already":
        spread = distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()])
        model.weight = nn.Parameter(spread)
    elif name == "other mesh":
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), other, [Replicate()] * 2))
    elif name == "unknown axis":
        dims = DataParallelMeshDims(shard="data")
    elif name == "no names":
        mesh = init_device_mesh("cpu", (2, 2))
    elif name == "no axis":
        dims = SimpleNamespace(shard=None, replicate=None, shard_names=(), replicate_names=())
    says = {
        "plain": r"weight \(4, 4\) must be a DTensor",
        "cut already": r"weight is .*Shard.*'dp'.*Replicate",
        "other mesh": r"weight must be a DTensor on .*not on",
        "unknown axis": r"'data'.*\('dp', 'tp'\)",
        "no names": r"axes are None",
        "no axis": r"shard=\(\) and replicate=\(\)",
    }
    with expect_error(implementation, ValueError, graphshard_says=says[name]):
        pick_fully_shard(implementation)(model, mesh=mesh, dp_mesh_dims=dims)


def refuse_as_on_torch_2_11() -> None:
    mesh = named_mesh((2, 2), ("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()] * 2))
    with (
        mock.patch.object(placements, "from_local_takes_grad_placements", False),
        pytest.raises(UnsupportedShardingError, match=r"parameter weight: dp_mesh_dims needs torch 2\.12"),
    ):
        graphshard.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def refuse_number_of_ranks(implementation: str) -> None:
    mesh = named_mesh((dist.get_world_size(), 1), ("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()] * 2))
    with expect_error(
        implementation, NotImplementedError, graphshard_says=r"reshard_after_forward=2.*weight"
    ):
        pick_fully_shard(implementation)(
            model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), reshard_after_forward=2
        )


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(each, marks=JOINS_SHARD_AXES if each == "two_shard_axes" else [])
            for each in MESHES
            if each != "hybrid_tp"
        ),
        pytest.param("hybrid_tp", marks=pytest.mark.slow),  # its axes are those of `hybrid`, its ranks those of `shard`
    ],
)
def test_training_on_named_axes(run_on_gloo_ranks, name):
    run_on_gloo_ranks(4, train_on_named_axes, "sharded", name)


@pytest.mark.parametrize(
    "name",
    [
        "copies_only",
        *(
            pytest.param(each, marks=[pytest.mark.slow, *([JOINS_SHARD_AXES] if each == "two_shard_axes" else [])])
            for each in MESHES
            if each != "copies_only"
        ),
    ],
)
def test_compiled_training_on_named_axes(run_on_gloo_ranks, name):
    run_on_gloo_ranks(4, train_on_named_axes, "compiled", name)


@pytest.mark.parametrize(
    "name", ["plain", "cut already", "other mesh", "unknown axis", "no names", "no axis"]
)
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_misuse_is_refused(run_on_gloo_ranks, implementation, name):
    run_on_gloo_ranks(4, refuse, implementation, name)


def test_refused_as_on_torch_2_11(run_on_gloo_ranks):
    run_on_gloo_ranks(4, refuse_as_on_torch_2_11)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_number_of_ranks_is_refused(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, refuse_number_of_ranks, implementation)
