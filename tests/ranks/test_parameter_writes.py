"""Writes to a parameter inside a forward reach its shards, or end in an error that names the parameter and the line."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.implementations import (
    GRAPHSHARD,
    compile_if_asked,
    pick_fully_shard,
    shard_units,
    world_mesh,
)
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from graphshard.errors import ParameterStateError


def normalise(weight: Tensor) -> None:
    weight.copy_(F.normalize(weight, dim=1))


def scale_items(weight: Tensor) -> None:
    weight *= 0.5
    weight[1] = 0.0


def shrink_out(weight: Tensor) -> None:
    torch.mul(weight, 0.5, out=weight)


#: Each is called under no_grad with the parameter, as a method of a model would.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "copy": normalise,
    "clamp": lambda weight: weight.clamp_(-0.2, 0.2),
    "data": lambda weight: weight.data.clamp_(-0.2, 0.2),
    "view": lambda weight: weight.view(-1)[:5].zero_(),
    "transpose": lambda weight: weight.t().mul_(0.5),
    "detach": lambda weight: weight.detach().renorm_(2, 0, 0.1),
    "item": scale_items,
    "out": shrink_out,
    "inplace": lambda weight: F.relu(weight, inplace=True),
}


class Writing(nn.Module):
    """Changes its weight, which 2 ranks share unevenly, before each use."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = WRITES[write]
        self.weight = nn.Parameter(torch.randn(7, 4))
        self.last = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.weight)
        return self.last(torch.tanh(F.linear(x, self.weight)))


def batch_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def check_whole_parity(reference: nn.Module, model: nn.Module) -> None:
    """As ``check_sharded_parity``, on whatever mesh."""
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name)
        assert_close((param.full_tensor(), param.grad.full_tensor()), (expected, expected.grad))


def train_beside(
    reference: nn.Module,
    model: nn.Module,
    forward: Callable[..., Tensor],
    steps: int = 2,
    check: Callable[[nn.Module, nn.Module], None] = check_sharded_parity,
) -> None:
    """Trains both; the reference sees one batch, as every rank of the model does."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(steps):
        expected, found = reference(batch_of(step)), forward(batch_of(step))
        assert_close(found, expected)
        expected.square().mean().backward()
        found.square().mean().backward()
        check(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(param.full_tensor(), expected)


def train_writing(implementation: str, write: str) -> None:
    torch.manual_seed(0)
    reference = Writing(write)
    model = shard_units(implementation, copy.deepcopy(reference), [])
    train_beside(reference, model, compile_if_asked(implementation, model))


@pytest.mark.compiles("copy", "view", "out")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_write_is_kept(run_on_gloo_ranks, implementation, write):
    run_on_gloo_ranks(2, train_writing, implementation, write)


class Replacing(Writing):
    """Assigns to ``.data``, at which a graph of Dynamo breaks."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = F.normalize(self.weight, dim=1).detach()
        return self.last(torch.tanh(F.linear(x, self.weight)))


class WritingLater(Writing):
    """Reads its weight before a graph break, and writes to it behind it, two graphs before the next read."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        torch._dynamo.graph_break()
        with torch.no_grad():
            weight.mul_(0.5)
        torch._dynamo.graph_break()
        return self.last(torch.tanh(F.linear(x, self.weight)))


class WritingLists(Writing):
    """Ops on lists of tensors write to its weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_([self.weight, self.last.weight], [self.weight * 2, self.last.weight + 1], 0.5)
        return self.last(torch.tanh(F.linear(x, self.weight)))


class AssigningLater(Writing):
    """Assigns to ``.data`` of what it has read before a graph break, and reads both again."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        torch._dynamo.graph_break()
        weight.data = weight.detach() * 0.5
        first = F.linear(x, weight)
        torch._dynamo.graph_break()
        return self.last(torch.tanh(first + F.linear(x, weight) + F.linear(x, self.weight)))


def train_replacing(implementation: str, kind: type[Writing], num_shards: int) -> None:
    torch.manual_seed(0)
    reference = kind("copy")
    mesh = init_device_mesh("cpu", (2 // num_shards, num_shards), mesh_dim_names=("other", "shard"))
    model = pick_fully_shard(implementation)(copy.deepcopy(reference), mesh=mesh["shard"])
    forward = compile_if_asked(implementation, model, fullgraph=kind is WritingLists)
    train_beside(reference, model, forward, check=check_whole_parity)


@pytest.mark.compiles("AssigningLater-2", "WritingLists-2")
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("kind", [Replacing, WritingLater, WritingLists, AssigningLater])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_assignments_and_writes_behind_a_graph_break_are_kept(
    run_on_gloo_ranks, implementation, kind, num_shards
):
    run_on_gloo_ranks(2, train_replacing, implementation, kind, num_shards)


class ReadingOld(Writing):
    """The graph that writes to an earlier read of the weight reads it again."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        torch._dynamo.graph_break()
        with torch.no_grad():
            weight.mul_(0.5)
        return self.last(F.linear(x, self.weight))


class AssigningDTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.only.weight.data = self.only.weight.detach() * 0.5
        return self.only(x)


def lose_writes() -> None:
    """What no code of ours sees where it happens is an error where the parameter is read next."""
    model = torch.compile(shard_units("compiled", ReadingOld("copy"), []), backend="graphshard")
    with pytest.raises(ParameterStateError, match="weight, read before a graph break, are written in place behind it"):
        model(batch_of(0))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = AssigningDTensor()
    parallelize_module(model.only, mesh["tp"], ColwiseParallel())
    pick_fully_shard("sharded")(model, mesh=mesh["dp"])
    assigned = r"only\.weight is a DTensor whose \.data is assigned to in a forward of root"
    with pytest.raises(ParameterStateError, match=assigned):
        model(batch_of(0))
    for implementation in GRAPHSHARD:
        model = shard_units(implementation, nn.Sequential(nn.Linear(4, 5)), [])
        forward = compile_if_asked(implementation, model)
        forward(batch_of(0))
        model.to(torch.float64).to(torch.float32)  # gives them other storages too
        forward(batch_of(0))
        for param in model.parameters():
            param.data = param.data * 2
        # Uncompiled, full parameters are shown until the backward, and these are assigned to.
        told = {"sharded": r"0\.weight, 0\.bias were written to between", "compiled": r"0\.weight: its \.data was"}
        with pytest.raises(ParameterStateError, match=told[implementation]):
            forward(batch_of(0))


def test_writes_that_would_be_lost(run_on_gloo_ranks):
    run_on_gloo_ranks(2, lose_writes)


class WritesBelow(nn.Module):
    """A method of a submodule, a unit of its own, writes outside of that unit's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Writing("copy"), nn.Linear(4, 4)

    def shrink(self, linear: nn.Linear) -> None:
        with torch.no_grad():
            linear.weight.mul_(0.5)
            linear.weight.clamp_(-0.2, 0.2)
            linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.shrink(self.first.last)
        x = self.second(self.first(x))
        self.shrink(self.second)  # after its use
        return x


def train_below(implementation: str, unit: bool) -> None:
    torch.manual_seed(0)
    reference = WritesBelow()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.first, model.second] if unit else [])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    forward = compile_if_asked(implementation, model)
    for step in range(2):
        with torch.no_grad():
            assert_close(forward(batch_of(step)), reference(batch_of(step)))
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_submodule_is_written(run_on_gloo_ranks, implementation, unit):
    run_on_gloo_ranks(2, train_below, implementation, unit)


def train_settings(implementation: str, setting: str) -> None:
    options = {
        "kept": {"reshard_after_forward": False},
        "resharded": {"reshard_after_forward": True},
        "columns": {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }[setting]
    torch.manual_seed(0)
    reference = Writing("copy")
    model = copy.deepcopy(reference)
    pick_fully_shard(implementation)(model, mesh=world_mesh(), **options)
    forward = compile_if_asked(implementation, model)
    for step in range(2):
        expected, found = reference(batch_of(step)), forward(batch_of(step))
        assert_close(found, expected)
        expected.square().mean().backward()
        found.square().mean().backward()
        for one, other in zip(reference.parameters(), model.parameters(), strict=True):
            assert_close(other.full_tensor(), one)
            assert_close(other.grad.full_tensor(), one.grad)


@pytest.mark.compiles("columns", "offloaded")
@pytest.mark.parametrize("setting", ["kept", "resharded", "columns", "offloaded"])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_write_under_settings(run_on_gloo_ranks, implementation, setting):
    run_on_gloo_ranks(2, train_settings, implementation, setting)


class ZeroesARow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[0].zero_()
        return F.linear(x, self.weight)


def write_in_low_precision(implementation: str) -> None:
    """What is not written keeps all digits of the shard."""
    torch.manual_seed(0)
    reference = ZeroesARow()
    model = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pick_fully_shard(implementation)(model, mesh=world_mesh(), mp_policy=policy)
    with torch.no_grad():
        reference(batch_of(0))
        compile_if_asked(implementation, model)(batch_of(0))
    assert torch.equal(model.weight.full_tensor(), reference.weight)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_write_in_a_lower_dtype(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, write_in_low_precision, implementation)


def write_on_hybrid_mesh(implementation: str) -> None:
    torch.manual_seed(0)
    reference = Writing("copy")
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pick_fully_shard(implementation)(model, mesh=mesh)
    with torch.no_grad():
        expected, found = reference(batch_of(0)), compile_if_asked(implementation, model)(batch_of(0))
    assert_close(found, expected)
    assert_close(model.weight.full_tensor(), reference.weight)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_write_with_hybrid_sharding(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, write_on_hybrid_mesh, implementation)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.5)

    def forward(self, indices: Tensor) -> Tensor:
        return self.table(indices)


def look_up_other_rows(implementation: str) -> None:
    """Each rank looks up other rows; the table is that of one process which looks up all of them."""
    torch.manual_seed(0)
    reference = Looking()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    indices = [torch.tensor([0, 4]), torch.tensor([1, 3])]
    expected = reference(torch.cat(indices))
    found = compile_if_asked(implementation, model)(indices[dist.get_rank()])
    assert_close(found, expected.chunk(2)[dist.get_rank()])
    (expected.square().sum() / 2).backward()
    found.square().sum().backward()
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_max_norm_of_rows_that_one_rank_reads(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, look_up_other_rows, implementation)


class WritesTheBatch(nn.Module):
    """A running mean in a parameter, as codebooks keep it: other data on each rank."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "checkpoint":
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.where == "recorded":
            self.weight.mul_(0.5)
        else:
            self.mean.mul_(0.9).add_(x.mean(0).detach())
        return F.linear(x - self.mean, self.weight)

    def inner(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return F.linear(x, self.weight)


def refuse_a_write(implementation: str, where: str, message: str) -> None:
    model = shard_units(implementation, WritesTheBatch(where), [])
    forward = compile_if_asked(implementation, model)
    with pytest.raises(Exception, match=message) as caught:
        forward(batch_of(dist.get_rank())).sum().backward()
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, ParameterStateError)


@pytest.mark.parametrize(
    ("implementation", "where", "message"),
    [
        ("sharded", "here", r"parameter mean is written in place.*different values.*all_reduce"),
        (
            "compiled",
            "here",
            r"mean is written.* at .*test_parameter_writes.py:\d+ \(self.mean.*different values",
        ),
        ("sharded", "recorded", r"parameter weight is written in place.*gradients are enabled.*no_grad"),
        (
            "compiled",
            "recorded",
            r"weight is written.*gradients are enabled.*\.py:\d+ \(self.weight.mul_.*no_grad",
        ),
        ("sharded", "checkpoint", r"parameter weight changed in place.*checkpointed region"),
        (
            "compiled",
            "checkpoint",
            r"weight is written in place in a checkpointed region.*\(self.weight.data.mul_",
        ),
    ],
)
def test_write_that_cannot_be_kept(run_on_gloo_ranks, implementation, where, message):
    run_on_gloo_ranks(2, refuse_a_write, implementation, where, message)


class ReadsData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.weight.data.mean()


def read_data() -> None:
    torch.manual_seed(0)
    reference = ReadsData()
    model = shard_units("sharded", copy.deepcopy(reference), [])
    with torch.inference_mode():
        assert_close(model(batch_of(0)), reference(batch_of(0)))
    check_sharded_parity(reference, model)
    before = model.weight._local_tensor._version
    model(batch_of(0)).sum().backward()
    assert model.weight._local_tensor._version == before


def test_data_that_is_only_read(run_on_gloo_ranks):
    run_on_gloo_ranks(2, read_data)
