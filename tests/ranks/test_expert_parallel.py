"""Parameters on different meshes in one model: experts spread over `ep`, the rest copied there.

A mixture of experts on a mesh (efsdp, ep). Tokens travel to their expert and back by all-to-all over `ep`; each
rank's experts are sharded over `efsdp`, everything else over all ranks.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.implementations import compile_if_asked, pick_fully_shard
from support.meshes_parity import FullyShard, named_mesh
from support.torch_versions import NEEDS_MESH_PER_PARAMETER, ShardPlacementResult
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

NUM_EXPERTS = 4
DIM = 6


class Experts(nn.Module):
    """One matrix per expert; token group `e` of the input is for expert `e`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, DIM))
        self.group: dist.ProcessGroup | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            return torch.relu(torch.bmm(tokens, self.weight))
        weight = self.weight.to_local()
        num_local, num_ranks = weight.shape[0], NUM_EXPERTS // weight.shape[0]
        num_tokens = tokens.shape[1]
        arrived = exchange(tokens.reshape(-1, DIM), self.group).view(num_ranks, num_local, num_tokens, DIM)
        by_expert = arrived.transpose(0, 1).reshape(num_local, num_ranks * num_tokens, DIM)
        done = torch.bmm(by_expert, weight).view(num_local, num_ranks, num_tokens, DIM)
        returned = exchange(done.transpose(0, 1).reshape(-1, DIM), self.group)
        return torch.relu(returned.view(NUM_EXPERTS, num_tokens, DIM))


def exchange(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Equal parts of the rows to and from each rank."""
    parts = [rows.shape[0] // group.size()] * group.size()
    return all_to_all_single_autograd(rows.contiguous(), parts, parts, group)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate = nn.Linear(DIM, DIM)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.gate(self.norm(x))))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.output = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.log_softmax(self.output(x), dim=-1)


def expert_mesh() -> DeviceMesh:
    return named_mesh((2, 2), ("efsdp", "ep"))


def spread_experts(model: Mixture, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        split = distribute_tensor(layer.experts.weight.detach(), mesh["ep"], [Shard(0)])
        layer.experts.weight = nn.Parameter(split)
        layer.experts.group = mesh.get_group("ep")


def shard_modules(fully_shard: FullyShard, model: Mixture, mesh: DeviceMesh, whole: DeviceMesh) -> None:
    """A `fully_shard` call on the experts with their mesh, one on each layer with the other."""
    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh["efsdp"])
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)


def shard_parameters(fully_shard: FullyShard, model: Mixture, mesh: DeviceMesh, whole: DeviceMesh) -> None:
    """One unit a layer; `shard_placement_fn` gives the experts their mesh."""
    experts = {layer.experts.weight for layer in model.layers}
    infos = {mine: FSDPMeshInfo(mesh["efsdp"] if mine else whole, shard_mesh_dim=0) for mine in (True, False)}

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        mine = parameter in experts
        return ShardPlacementResult(placement=Shard(1) if mine else None, mesh_info=infos[mine])

    for unit in [*model.layers, model]:
        fully_shard(unit, mesh=whole, shard_placement_fn=place)


ARRANGEMENTS = {"modules": shard_modules, "parameters": shard_parameters}


def inputs_of(step: int) -> Iterator[Tensor]:
    """One batch per rank: (experts, tokens, dim)."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(dist.get_world_size()):
        yield torch.randn(NUM_EXPERTS, 3, DIM, generator=generator)


def train_mixture(implementation: str, arrangement: str) -> None:
    torch.manual_seed(42)
    reference = Mixture()
    models = {each: copy.deepcopy(reference) for each in ("fsdp2", implementation)}
    mesh = expert_mesh()
    whole = named_mesh((dist.get_world_size(),), ("all",))
    for each, model in models.items():
        spread_experts(model, mesh)
        ARRANGEMENTS[arrangement](pick_fully_shard(each), model, mesh, whole)
    model = models[implementation]
    expert = model.layers[0].experts.weight
    assert expert.device_mesh.mesh_dim_names == ("efsdp", "ep")
    assert model.output.weight.device_mesh.mesh_dim_names == ("all",)
    forwards = [models["fsdp2"], compile_if_asked(implementation, model)]
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (reference, *models.values())
    ]
    for step in range(3):
        batches = list(inputs_of(step))
        losses = [reference(batch)[..., 0].neg().mean() for batch in batches]
        torch.stack(losses).mean().backward()
        for forward in forwards if implementation != "fsdp2" else forwards[:1]:
            loss = forward(batches[dist.get_rank()])[..., 0].neg().mean()
            assert_close(loss, losses[dist.get_rank()])
            loss.backward()
        for (name, expected), one, other in zip(
            reference.named_parameters(), models["fsdp2"].parameters(), model.parameters(), strict=True
        ):
            assert isinstance(other, DTensor) and other.placements == one.placements, name
            assert_close(
                other.grad.to_local(), one.grad.to_local(), msg=lambda text, name=name: f"{name}: {text}"
            )
            # An expert's gradient holds the tokens of both ranks of `ep`, and is a mean over `efsdp` alone.
            scale = mesh["ep"].size() if "experts" in name else 1
            assert_close(
                other.grad.full_tensor(), expected.grad * scale, msg=lambda text, name=name: f"{name}: {text}"
            )
            expected.grad *= scale
        for optimizer in optimizers if implementation != "fsdp2" else optimizers[:2]:
            optimizer.step()
            optimizer.zero_grad()
        for (name, expected), parameter in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert_close(
                parameter.full_tensor().detach(),
                expected.detach(),
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize(
    ("implementation", "arrangement"),
    [
        ("fsdp2", "modules"),
        ("sharded", "modules"),
        pytest.param("compiled", "modules", marks=pytest.mark.slow),
        *(
            pytest.param(each, "parameters", marks=NEEDS_MESH_PER_PARAMETER)
            for each in ("fsdp2", "sharded", "compiled")
        ),
    ],
)
def test_mixture_of_experts(run_on_gloo_ranks, implementation, arrangement):
    run_on_gloo_ranks(4, train_mixture, implementation, arrangement)
