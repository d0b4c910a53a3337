"""Parameters read in functions given to ``torch.cond``, ``scan``, ``map`` and ``while_loop``.

The forward gathers them at its begin, on every rank: a function that one rank alone runs cannot communicate.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, compile_if_asked, shard_units
from support.parity import check_sharded_parity
from support.torch_versions import TORCH
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing import assert_close

import graphshard


class Choosing(nn.Module):
    """One of two linear layers, units or not, by the sign of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return torch.cond(x.sum() > 0, lambda x: self.second(x), lambda x: self.other(x), (x,))


class Nested(nn.Module):
    """Two of them; the second one lies behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = Choosing(), Choosing(), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.last(self.two(x))


class Looping(nn.Module):
    """A layer in the functions of three loops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.first
        with torch.no_grad():
            _, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, layer(x)), (torch.tensor(0), x))
        _, x = scan(lambda sum, row: (torch.tanh(layer(sum)) + row, sum * 2), torch.zeros(5), x)
        return self.last(map_rows(lambda row: torch.sin(layer(row)), x))


def train(implementation: str, kind: type[nn.Module], units: list[str]) -> None:
    torch.manual_seed(0)
    reference = kind()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.get_submodule(name) for name in units])
    forward = compile_if_asked(implementation, model, fullgraph=kind is not Nested)
    for rank in range(dist.get_world_size()):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        (reference(x).sum() / dist.get_world_size()).backward()
        if rank == dist.get_rank():
            forward(x).sum().backward()
    check_sharded_parity(reference, model)
    for optimizer in (torch.optim.SGD(one.parameters(), 0.1) for one in (reference, model)):
        optimizer.step()
    assert_close(forward(x), reference(x))


@pytest.mark.parametrize(
    "kind, units",
    [
        pytest.param(Choosing, ["second"], id="cond"),
        pytest.param(Nested, ["one.other", "two"], id="behind a graph break", marks=pytest.mark.slow),
        pytest.param(Looping, ["first"], id="loops", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_parameters_are_gathered_before_the_operator(run_on_gloo_ranks, implementation, kind, units):
    run_on_gloo_ranks(2, train, implementation, kind, units)


def give_tensor_parallel_layer(implementation: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Choosing()
    parallelize_module(model.second, mesh["tp"], ColwiseParallel())
    graphshard.fully_shard(model, mesh=mesh["dp"])
    # torch 2.11 tells of an error in a function of an operator its type alone.
    said = r"parameter second\.weight of unit root is read .* given to cond"
    if TORCH == (2, 11):
        said = "UnsupportedShardingError"
    with pytest.raises(Exception, match=said):
        compile_if_asked(implementation, model)(torch.randn(3, 5))


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_distributed_tensors_are_refused(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, give_tensor_parallel_layer, implementation)
