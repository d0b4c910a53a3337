"""Models and calls that FSDP2 refuses, or that only just work there."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.implementations import (
    EVERY,
    UNCOMPILED,
    compile_if_asked,
    pick_fully_shard,
    shard_units,
    world_mesh,
)
from support.parity import check_sharded_parity
from support.toy_models import build_mlp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from graphshard.ir.collectives import WAIT

from .test_refusals import expect_error


def batch_of(rank: int, dim: int = 6) -> Tensor:
    return torch.randn(4, dim, generator=torch.Generator().manual_seed(rank))


def backward_of_mean(reference: Callable[..., Tensor], dim: int = 6) -> None:
    for rank in range(dist.get_world_size()):
        (reference(batch_of(rank, dim)).float().square().sum() / dist.get_world_size()).backward()


def backward(forward: Callable[..., Tensor], dim: int = 6) -> None:
    forward(batch_of(dist.get_rank(), dim)).float().square().sum().backward()


class TwoDtypes(nn.Module):
    """A float32 and a float64 layer in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(6, 5)
        self.wide = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.single(x)).double())


def train_two_dtypes(implementation: str) -> None:
    torch.manual_seed(42)
    reference = TwoDtypes()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    forward = compile_if_asked(implementation, model)
    if implementation == "fsdp2":
        with pytest.raises(AssertionError, match="uniform original parameter dtype"):
            backward(forward)
        return
    backward_of_mean(reference)
    backward(forward)
    check_sharded_parity(reference, model)
    if implementation != "compiled":
        with CommDebugMode() as communication:
            forward(batch_of(dist.get_rank()))
        assert communication.get_total_counts() == 1, "the parameters travel as bytes, in one gather"


@pytest.mark.parametrize("implementation", EVERY)
def test_two_dtypes_in_a_unit(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_two_dtypes, implementation)


def train_list_as_root(implementation: str) -> None:
    """The outermost unit is a list of modules; nothing above it is sharded."""
    torch.manual_seed(42)
    reference = build_mlp((6, 5), (5, 3))
    model = copy.deepcopy(reference)
    pick_fully_shard(implementation)([model[0], model[2]], mesh=world_mesh())
    forward = compile_if_asked(implementation, model)
    if implementation == "fsdp2":
        with pytest.raises(RuntimeError, match="root"):
            backward(forward)
        return
    for _ in range(2):
        backward_of_mean(reference)
        backward(forward)
        check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_list_unit_without_a_root(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_list_as_root, implementation)


def run_inner_unit_first(implementation: str) -> None:
    """The first forward of all is an inner unit's; the root's comes after it."""
    torch.manual_seed(42)
    reference = build_mlp((6, 5), (5, 3))
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model[0]])
    backward_of_mean(reference[0])
    backward(model[0])
    forward = compile_if_asked(implementation, model)
    if implementation == "fsdp2":
        with pytest.raises(RuntimeError, match="root"):
            backward(forward)
        return
    backward_of_mean(reference)
    backward(forward)
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_inner_unit_before_the_root(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, run_inner_unit_first, implementation)


def call_part_of_a_unit(implementation: str) -> None:
    """A layer that is no unit, called outside of its unit's forward, holds shards."""
    model = build_mlp((6, 5), (5, 3))
    shard_units(implementation, model, [])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        compile_if_asked(implementation, model[0])(batch_of(0))


@pytest.mark.parametrize("implementation", EVERY)
def test_part_of_a_unit_called_alone(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, call_part_of_a_unit, implementation)


class Viewing(nn.Module):
    """Returns a view of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(-1)


class ChangesTheView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Viewing()
        self.outer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        hidden.mul_(2.0)
        return self.outer(hidden.view(-1, 6))


def train_changed_view(implementation: str) -> None:
    torch.manual_seed(42)
    reference = ChangesTheView()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.inner])
    forward = compile_if_asked(implementation, model)
    if implementation == "fsdp2":
        with pytest.warns(UserWarning, match="view tensor"):
            backward(forward)
        return
    backward_of_mean(reference)
    backward(forward)  # a warning would be an error
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_unit_that_returns_a_view(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_changed_view, implementation)


def feed_wrong_dtype(implementation: str) -> None:
    """The inner unit gives float32, the outer one has bfloat16 parameters and leaves inputs alone."""
    model = build_mlp((6, 5), (5, 3))
    fully_shard = pick_fully_shard(implementation)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model[0], mesh=world_mesh(), mp_policy=policy)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    fully_shard(model, mesh=world_mesh(), mp_policy=policy)
    with pytest.raises(RuntimeError, match="dtype"):
        compile_if_asked(implementation, model)(batch_of(0))


@pytest.mark.parametrize("implementation", EVERY)
def test_outputs_of_another_dtype_than_the_next_unit(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, feed_wrong_dtype, implementation)


def divide_by_factor(implementation: str) -> None:
    """The root's gradients are sums divided by 5; the other unit's stay means."""
    torch.manual_seed(42)
    reference = build_mlp((6, 5), (5, 3))
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model[0]])
    model.set_gradient_divide_factor(5.0)
    forward = compile_if_asked(implementation, model)
    if implementation == "fsdp2":
        with pytest.raises(RuntimeError, match=r"(?i)premul"):
            backward(forward)
        return
    backward_of_mean(reference)
    for parameter in reference[2].parameters():
        parameter.grad *= dist.get_world_size() / 5.0
    backward(forward)
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_divide_factor_on_gloo(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, divide_by_factor, implementation)


class NoInputs(nn.Module):
    """Its forward takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        return self.weight @ self.weight


def train_without_inputs(implementation: str) -> None:
    torch.manual_seed(42)
    reference = NoInputs()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    forward = compile_if_asked(implementation, model)
    for _ in range(2):
        reference().square().sum().backward()
        forward().square().sum().backward()
        check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_forward_without_inputs(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_without_inputs, implementation)


def use_group_mesh(implementation: str) -> None:
    """`DeviceMesh.from_group`, and a unit that has no parameters."""
    torch.manual_seed(42)
    reference = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    model = copy.deepcopy(reference)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for module in (model[0], model):
        pick_fully_shard(implementation)(module, mesh=mesh)
    assert not list(model.parameters(recurse=False))
    model.unshard()
    model.reshard()
    backward_of_mean(reference)
    backward(compile_if_asked(implementation, model))
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", EVERY)
def test_mesh_of_a_group_and_unit_without_parameters(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, use_group_mesh, implementation)


def shard_block_by_block(implementation: str) -> None:
    """Blocks built, sharded and dropped one after the other: an address used again is no second call."""
    fully_shard = pick_fully_shard(implementation)
    for _ in range(8):
        kept = nn.Sequential(*(fully_shard(nn.Linear(6, 6), mesh=world_mesh()) for _ in range(8)))
        fully_shard(kept, mesh=world_mesh())
        backward(kept)
        del kept


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_models_built_block_by_block(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, shard_block_by_block, implementation)


class Partly(nn.Module):
    """One layer for DDP, one for sharding, and inside the latter one for neither."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = nn.Linear(6, 5)
        self.sharded = build_mlp((5, 5), (5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.sharded(torch.tanh(self.copied(x)))


def train_inside_ddp(implementation: str) -> None:
    torch.manual_seed(42)
    reference = Partly()
    model = copy.deepcopy(reference)
    ignored = set(model.sharded[2].parameters())
    pick_fully_shard(implementation)(model.sharded, mesh=world_mesh(), ignored_params=ignored)
    names = [f"sharded.{name}" for name, _ in model.sharded.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    backward_of_mean(reference)
    backward(ddp)
    own = copy.deepcopy(reference)
    own.zero_grad()
    backward(own)
    for name, parameter in model.named_parameters():
        expected = (own if name.startswith("sharded.2.") else reference).get_parameter(name).grad
        assert isinstance(parameter, DTensor) == name.startswith("sharded.0."), name
        gradient = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
        assert_close(gradient, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_sharded_and_ignored_parts_of_a_ddp_model(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_inside_ddp, implementation)


def train_hybrid_uneven(implementation: str, dim: int) -> None:
    """2 x 2 ranks, one batch for each, widths that 2 does not divide."""
    torch.manual_seed(42)
    reference = nn.Sequential(nn.LayerNorm(dim), build_mlp((dim, 3 * dim), (3 * dim, dim)))
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (model[1], model):
        pick_fully_shard(implementation)(module, mesh=mesh)
    forward = compile_if_asked(implementation, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (reference, model)]
    for _ in range(2):
        backward_of_mean(reference, dim)
        backward(forward, dim)
        for (name, parameter), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert parameter.placements[1] == Shard(0)
            assert_close(parameter.grad.full_tensor(), expected.grad, msg=lambda text, name=name: name + text)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("implementation", "dim"),
    [
        *((each, dim) for each in EVERY for dim in (3, 17) if (each, dim) != ("compiled", 17)),
        pytest.param("compiled", 17, marks=pytest.mark.slow),
    ],
)
def test_hybrid_sharding_of_uneven_widths(run_on_gloo_ranks, implementation, dim):
    run_on_gloo_ranks(4, train_hybrid_uneven, implementation, dim)


def test_tensor_parallelism_on_another_device(fake_group):
    """A DTensor on a mesh of another device type cannot be cut over this one."""
    fake_group(2)
    mesh, other = (init_device_mesh(device, (1, 2), mesh_dim_names=("dp", "tp")) for device in ("cpu", "cuda"))
    weight = DTensor.from_local(torch.empty(2, 4, device="meta"), other["tp"], [Shard(0)])
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(weight)
    with expect_error("sharded", ValueError, graphshard_says=r"weight.*over a mesh of cpu devices"):
        pick_fully_shard("sharded")(model, mesh=mesh["dp"])


class Exchanging(nn.Module):
    """Half of the rows travel to the other rank and back: an exchange whose pieces grow with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        pieces = [hidden.shape[0] // 2] * 2
        there = all_to_all_single_autograd(hidden, pieces, pieces, dist.group.WORLD)
        back = all_to_all_single_autograd(torch.tanh(self.expert(there)), pieces, pieces, dist.group.WORLD)
        return self.last(hidden + back)


def train_exchanging(options: dict[str, object]) -> None:
    torch.manual_seed(42)
    reference = Exchanging()
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model.expert])
    forward = torch.compile(model, backend="graphshard", options=options)
    for num_rows in (8, 12, 20):  # symbolic from the second on
        batch = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(num_rows + dist.get_rank()))
        for each in (reference, forward):
            each(batch).square().sum().backward()
        for param in reference.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        check_sharded_parity(reference, model)
        reference.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("options", [{}, {"hardware": "cpu-loopback"}], ids=str)
def test_exchanges_of_pieces_that_grow_with_the_batch(run_on_gloo_ranks, options):
    run_on_gloo_ranks(2, train_exchanging, options)


class _GathersRows(nn.Module):
    """A gated MLP on the rows of all ranks; its collectives are ops with a derivative of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate, self.up, self.down = (nn.Linear(6, 6) for _ in range(4))
        self.group = dist.group.WORLD.group_name

    def forward(self, x: Tensor) -> Tensor:
        differentiable, size = torch.ops._c10d_functional_autograd, dist.get_world_size()
        rows = WAIT(differentiable.all_gather_into_tensor(self.inner(x), size, self.group))
        rows = self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))
        return WAIT(differentiable.reduce_scatter_tensor(rows, "sum", size, self.group))


class _GathersRowsTwice(_GathersRows):
    """The same rows are gathered for both layers that read them."""

    def forward(self, x: Tensor) -> Tensor:
        differentiable, size = torch.ops._c10d_functional_autograd, dist.get_world_size()
        x = self.inner(x)
        gate, up = (WAIT(differentiable.all_gather_into_tensor(x, size, self.group)) for _ in range(2))
        rows = self.down(nn.functional.silu(self.gate(gate)) * self.up(up))
        return WAIT(differentiable.reduce_scatter_tensor(rows, "sum", size, self.group))


def train_on_rows_of_all_ranks(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    reference = build()
    model = shard_units("compiled", copy.deepcopy(reference), [])
    forward = compile_if_asked("compiled", model, verify="full")
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        results = [forward(x), reference(x)]
        assert_close(*results)
        for result in results:
            result.square().sum().backward()
        for name, parameter in reference.named_parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
            parameter.grad = model.get_parameter(name).grad = None


@pytest.mark.parametrize("build", [_GathersRows, _GathersRowsTwice])
def test_collectives_called_with_a_derivative_of_their_own(run_on_gloo_ranks, build):
    """They are planned, and found in the order that Inductor emits."""
    run_on_gloo_ranks(2, train_on_rows_of_all_ranks, build)


class Routed(nn.Module):
    """Sends each row to one of two experts in a loop over them, as many mixtures of experts are written."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(1)
        weights, chosen = scores.max(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return out


def train_routed() -> None:
    """Ranks have other numbers of rows for an expert, which would compile again on one rank alone."""
    torch.manual_seed(42)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Routed())
    model = copy.deepcopy(reference)
    model[2].forward = torch.compiler.disable(model[2].forward)
    model = shard_units("compiled", model, [model[0], model[2]])
    forward = compile_if_asked("compiled", model, fullgraph=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(3):
        for rank in range(2):
            (reference(batch_of(2 * step + rank)).square().sum() / 2).backward()
        forward(batch_of(2 * step + dist.get_rank())).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
        assert_close(found.full_tensor(), expected)


def test_experts_with_other_numbers_of_rows_on_each_rank(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_routed)
