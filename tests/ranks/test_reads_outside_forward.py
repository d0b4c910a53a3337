"""Parameters that `unshard()` shows are read outside of a forward, and their gradients join those of the shards."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import EVERY, GRAPHSHARD, compile_if_asked, pick_fully_shard, shard_units
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.testing import assert_close


class Headed(nn.Module):
    """A forward that ends below the head, or with it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh())
        self.head = nn.Linear(7, 5, bias=False)

    def forward(self, x: Tensor, with_head: bool = False) -> Tensor:
        h = self.body(x)
        return self.head(h) if with_head else h


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randint(5, (4,), generator=generator)


def build(implementation: str) -> tuple[Headed, Headed]:
    torch.manual_seed(42)
    reference = Headed()
    model = copy.deepcopy(reference)
    return reference, shard_units(implementation, model, [model.body, model.head])


def loss_on_head(model: Headed, forward: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The forward ends below the head; the loss reads its weight, as fused losses do."""
    h = forward(x)
    if hasattr(model.head, "unshard"):
        model.head.unshard()
    return F.cross_entropy(h @ model.head.weight.t(), y)


def train_with_head_outside(implementation: str) -> None:
    reference, model = build(implementation)
    forward = compile_if_asked(implementation, model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
    for step in range(2):
        for rank in range(2):
            (loss_on_head(reference, reference, *batch_of(rank, step)) / 2).backward()
        loss_on_head(model, forward, *batch_of(dist.get_rank(), step)).backward()
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("implementation", EVERY)
def test_a_loss_that_reads_the_weight(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_head_outside, implementation)


def accumulate(implementation: str, mesh_shape: tuple[int, ...], defer: str) -> None:
    """Micro-batches, the head read both ways in some of them; only the last one communicates all."""
    torch.manual_seed(42)
    reference = Headed()
    model = copy.deepcopy(reference)
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for unit in (model.body, model.head, model):
        pick_fully_shard(implementation)(unit, mesh=mesh)
    forward = compile_if_asked(implementation, model)
    world_size = dist.get_world_size()
    for step in range(2):
        for micro in range(3):
            getattr(model, defer)(micro == 2)
            number = 3 * step + micro
            for rank in range(world_size):
                (both_ways(reference, reference, *batch_of(rank, number), micro) / world_size).backward()
            both_ways(model, forward, *batch_of(dist.get_rank(), number), micro).backward()
            if micro < 2:
                assert all(parameter.grad is None for parameter in model.parameters())
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(
                parameter.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
            )
        model.zero_grad()
        reference.zero_grad()


def both_ways(model: Headed, forward: Callable[..., Tensor], x: Tensor, y: Tensor, micro: int = 0) -> Tensor:
    """The head is read before its forward, by it, and after it, where the unit has freed its parameters."""
    is_sharded = hasattr(model.head, "unshard")
    if is_sharded:
        model.head.unshard()
    before = model.head.weight.square().sum()
    loss = F.cross_entropy(forward(x, True), y)
    if micro == 1:
        return loss + before
    if is_sharded:
        model.head.unshard()
    return loss + before + (model.head.weight * 0.5).abs().sum()


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_accumulation(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, accumulate, implementation, (2,), "set_requires_gradient_sync")


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_deferred_all_reduce(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, accumulate, implementation, (2, 2), "set_requires_all_reduce")


def count_hooks(implementation: str) -> int:
    """Reductions of a step whose loss reads the head in three ways; hooks of parameters run once a step."""
    reference, model = build(implementation)
    forward = compile_if_asked(implementation, model)
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: calls.__setitem__(name, calls.get(name, 0) + 1)
        )
    for step in range(3):
        for rank in range(2):
            (both_ways(reference, reference, *batch_of(rank, step)) / 2).backward()
        loss = both_ways(model, forward, *batch_of(dist.get_rank(), step))
        with count_collectives() as counts:
            loss.backward()
        check_sharded_parity(reference, model)
        reference.zero_grad()
        model.zero_grad()
    assert calls == dict.fromkeys(calls, 3) and len(calls) == 3
    return counts["reductions"]


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_hooks_run_once(run_on_gloo_ranks, implementation):
    """Uncompiled, what is shown before a forward is what the forward reads, so one reduction serves both."""
    assert run_on_gloo_ranks(2, count_hooks, implementation) == [3 if implementation == "sharded" else 4] * 2


def train_in_chunks(implementation: str) -> None:
    """A loss in chunks, each with a backward of its own, while the head stays gathered."""
    reference, model = build(implementation)
    forward = compile_if_asked(implementation, model)
    model.head.set_reshard_after_backward(False)

    def run(each: Headed, call: Callable[..., Tensor], rank: int, step: int) -> None:
        x, y = batch_of(rank, step)
        h = call(x)
        cut = h.detach().requires_grad_()
        if each is model:
            each.head.unshard()
        for i in range(4):
            if each is model:
                assert not isinstance(each.head.weight, DTensor)
                each.head.set_requires_gradient_sync(i == 3)
            F.cross_entropy(cut[i : i + 1] @ each.head.weight.t(), y[i : i + 1]).backward()
        h.backward(cut.grad)
        if each is model:
            each.head.reshard()

    for step in range(2):
        for rank in range(2):
            run(reference, reference, rank, step)
        for parameter in reference.parameters():
            parameter.grad /= 2
        run(model, forward, dist.get_rank(), step)
        check_sharded_parity(reference, model)
        reference.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("implementation", EVERY)
def test_chunks_of_a_loss(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_in_chunks, implementation)


def compile_whole_loss(unshard_inside: bool) -> None:
    """The forward and the read outside of it in one compiled function; `unshard()` inside breaks the graph."""
    reference, model = build("compiled")

    def loss_of(each: Headed, x: Tensor, y: Tensor) -> Tensor:
        h = each(x)
        if unshard_inside and each is model:
            each.head.unshard()
        return F.cross_entropy(h @ each.head.weight.t(), y)

    compiled = torch.compile(loss_of, backend="graphshard", fullgraph=not unshard_inside)
    for step in range(3):
        for rank in range(2):
            (loss_of(reference, *batch_of(rank, step)) / 2).backward()
        if not unshard_inside:
            model.head.unshard()
        compiled(model, *batch_of(dist.get_rank(), step)).backward()
        check_sharded_parity(reference, model)
        reference.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("unshard_inside", [False, True])
def test_compiled_with_the_loss(run_on_gloo_ranks, unshard_inside):
    run_on_gloo_ranks(2, compile_whole_loss, unshard_inside)


def use_as_parameters() -> None:
    reference, model = build("sharded")
    model.head.unshard()
    shown = model.head.weight
    assert isinstance(shown, nn.Parameter)
    model.head.unshard()
    assert model.head.weight is shown
    assert_close(copy.deepcopy(shown), reference.head.weight)
    x, y = batch_of(dist.get_rank(), 0)
    (found,) = torch.autograd.grad(F.cross_entropy(model(x, True), y), shown)
    (expected,) = torch.autograd.grad(F.cross_entropy(reference(x, True), y), reference.head.weight)
    assert_close(found, expected)
    F.cross_entropy(model(x, True), y).backward()
    model.head.unshard()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad(set_to_none=False)
        assert not model.head.weight.isnan().any()
        model.head.reshard()
        assert_close(model.head.weight.grad.full_tensor(), torch.zeros(5, 7))
        model.head.unshard()
        model.zero_grad()
    with pytest.raises(ValueError, match="non-leaf"):  # it would train nothing
        torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.reshard()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_shown_is_a_parameter(run_on_gloo_ranks):
    run_on_gloo_ranks(2, use_as_parameters)


def _penalise(model: Headed) -> Tensor:
    """A term of the loss that reads every parameter outside of a forward."""
    for unit in (model.body, model.head):
        if hasattr(unit, "unshard"):
            unit.unshard()
    return sum(parameter.float().square().sum() for parameter in model.parameters())


def penalise_in_low_precision(implementation: str) -> None:
    """Gathered in bfloat16: the gradient of the penalty is rounded like every gradient of the unit."""
    torch.manual_seed(42)
    reference = Headed()
    model = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_units(implementation, model, [model.body, model.head], mp_policy=policy)
    forward = compile_if_asked(implementation, model)
    low = copy.deepcopy(reference).bfloat16()
    expected: dict[str, Tensor] = {}
    for rank in range(2):
        x, y = batch_of(rank, 0)
        (F.cross_entropy(low(x.bfloat16(), True), y) + _penalise(low)).backward()
        for name, parameter in low.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float() / 2
            parameter.grad = None
    x, y = batch_of(dist.get_rank(), 0)
    loss = F.cross_entropy(forward(x, True), y)
    (loss + _penalise(model)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert_close(
            parameter.grad.full_tensor(),
            expected[name],
            rtol=2e-2,
            atol=1e-3,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_low_precision(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, penalise_in_low_precision, implementation)


def penalise_with_tensor_parallelism(implementation: str) -> None:
    """What is shown is a DTensor on the axis of tensor parallelism."""
    torch.manual_seed(42)
    reference = Headed()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(
        model,
        mesh["tp"],
        {
            "body.0": ColwiseParallel(output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for unit in (model.body, model.head, model):
        pick_fully_shard(implementation)(unit, mesh=mesh["dp"])
    forward = compile_if_asked(implementation, model)
    x, y = batch_of(0, 0)
    (F.cross_entropy(reference(x, True), y) + _penalise(reference)).backward()
    (F.cross_entropy(forward(x, True), y)).backward()
    penalty = _penalise(model)
    (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(parameter.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("implementation", GRAPHSHARD)  # torch's FSDP2 warns here, and its gradients are wrong
def test_tensor_parallelism(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, penalise_with_tensor_parallelism, implementation)


def drop_while_shown() -> None:
    """A model that is dropped while it shows full parameters is freed."""
    model = build("sharded")[1]
    model.head.unshard()
    model(batch_of(0, 0)[0]).sum().backward()
    model.head.unshard()
    loss = model.head.weight.sum()
    shard = next(iter(model.head.__dict__["_graphshard_slots"].values())).param
    is_alive = weakref.ref(model)
    del model
    gc.collect()
    assert is_alive() is None
    loss.backward()
    assert_close(shard.grad.full_tensor(), torch.ones(5, 7))


def test_a_dropped_model_is_freed(run_on_gloo_ranks):
    run_on_gloo_ranks(2, drop_while_shown)
