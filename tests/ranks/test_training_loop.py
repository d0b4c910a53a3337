"""Ways to write a training loop: several forwards, evaluation in between, uneven batches, graph breaks."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, UNCOMPILED, compile_if_asked, shard_units
from support.parity import Lockstep, backward_on_all_batches, check_sharded_parity, make_adam, start_lockstep
from support.toy_models import WORKLOADS, Workload, build_mlp, mlp_workload
from torch import Tensor, nn
from torch.testing import assert_close


class CalledTwice(nn.Module):
    """The same layer, a unit of its own, twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.outer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(torch.relu(self.inner(x))))


class BrokenBlock(nn.Module):
    """Dynamo splits the graph in the middle of the unit, between two uses of its parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden) + hidden.mean()


def build_broken() -> nn.Module:
    return nn.Sequential(BrokenBlock(5), BrokenBlock(5), nn.Linear(5, 3))


def build_normalised() -> nn.Module:
    """Batch normalisation: evaluation differs from training."""
    return nn.Sequential(nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7), nn.Linear(7, 3))


def vector_workload(build: Callable[[], nn.Module], dim: int, units: list[str]) -> Workload:
    """Squared error of a model of vectors; `units` are names of modules."""
    return Workload(
        build=build,
        list_units=lambda model: [model.get_submodule(name) for name in units],
        draw_batch=lambda generator, size: (torch.randn(size, dim, generator=generator),),
        loss=lambda forward, batch: (forward(*batch) - 1.0).square().mean(),
    )


CALLED_TWICE = vector_workload(CalledTwice, 5, ["inner"])
WITH_BREAKS = vector_workload(build_broken, 5, ["0", "1"])
NORMALISED = vector_workload(build_normalised, 6, ["0"])
SMALL_MLP = mlp_workload((6, 7), (7, 3))


def train_called_twice(implementation: str, reshard_after_forward: bool) -> None:
    start_lockstep(CALLED_TWICE, implementation, reshard_after_forward=reshard_after_forward).train(3)


def train_on_two_forwards(implementation: str, reshard_after_forward: bool | None, joined: bool) -> None:
    """Two forwards, then one backward of the sum or one backward of each, newest first."""
    lockstep = start_lockstep(SMALL_MLP, implementation, reshard_after_forward=reshard_after_forward)
    rank = dist.get_rank()
    for step in range(3):
        for half in (0, 1):
            backward_on_all_batches(SMALL_MLP, lockstep.reference, 2 * step + half)
        losses = [
            SMALL_MLP.loss(lockstep.forward, SMALL_MLP.batch_of(rank, 2 * step + half)) for half in (0, 1)
        ]
        if joined:
            (losses[0] + losses[1]).backward()
        else:
            losses[1].backward()
            losses[0].backward()
        check_sharded_parity(lockstep.reference, lockstep.model)
        lockstep.update(step)


def accumulate_with_reduction_each_time(implementation: str) -> None:
    """Three backwards before one optimizer step: sharded gradients add up."""
    lockstep = start_lockstep(SMALL_MLP, implementation)
    for update in range(2):
        for step in range(3):
            lockstep.backward(3 * update + step)
        lockstep.update(update)


def evaluate_between_steps(implementation: str) -> None:
    """no_grad and eval forwards give the unsharded model's outputs and do not disturb training."""
    torch.manual_seed(42)
    reference = NORMALISED.build()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, NORMALISED.list_units(model))
    forward = compile_if_asked(implementation, model)
    optimizers = [make_adam(reference.parameters()), make_adam(model.parameters())]
    rank = dist.get_rank()
    for step in range(3):
        (inputs,) = NORMALISED.batch_of(rank, step)
        reference(inputs)  # moves the running statistics by this rank's batch only
        statistics = {name: buffer.clone() for name, buffer in reference.named_buffers()}
        backward_on_all_batches(NORMALISED, reference, step)
        for name, buffer in reference.named_buffers():
            buffer.copy_(statistics[name])
        NORMALISED.loss(forward, (inputs,)).backward()
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reference.eval()
        model.eval()
        with torch.no_grad():
            found = forward(inputs)
            assert not found.requires_grad
            assert_close(found, reference(inputs))
        reference.train()
        model.train()
        assert not torch.equal(found, reference(inputs)), "evaluation should differ from training"
        for name, buffer in reference.named_buffers():
            buffer.copy_(statistics[name])


def forward_without_gradient_first(implementation: str) -> None:
    """The first forward of all is an evaluation."""
    lockstep = start_lockstep(SMALL_MLP, implementation)
    (inputs,) = SMALL_MLP.batch_of(0, 0)
    with torch.no_grad():
        assert_close(lockstep.forward(inputs), lockstep.reference(inputs))
    lockstep.train(2)


def apply_dropout(implementation: str) -> None:
    """At one seed, a sharded model draws the masks the unsharded one draws."""
    torch.manual_seed(42)
    reference = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5))
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [])
    inputs = torch.ones(4, 6)
    torch.manual_seed(7)
    expected = reference(inputs)
    torch.manual_seed(7)
    found = model(inputs)
    assert_close(found, expected)
    assert (found == 0).any() and (found != 0).any()


def train_with_batch_sizes(implementation: str, sizes_by_rank: list[list[int]]) -> int:
    """Train on batches of the given sizes; returns how many graphs were compiled in all."""
    lockstep = start_lockstep(SMALL_MLP, implementation)
    rank = dist.get_rank()
    for step in range(len(sizes_by_rank[0])):
        losses = [
            SMALL_MLP.loss(lockstep.reference, SMALL_MLP.batch_of(other, step, sizes[step]))
            for other, sizes in enumerate(sizes_by_rank)
        ]
        torch.stack(losses).mean().backward()
        batch = SMALL_MLP.batch_of(rank, step, sizes_by_rank[rank][step])
        loss = SMALL_MLP.loss(lockstep.forward, batch)
        loss.backward()
        assert_close(loss.detach(), losses[rank].detach())
        check_sharded_parity(lockstep.reference, lockstep.model)
        lockstep.update(step)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_with_graph_breaks(implementation: str, reshard_after_forward: bool) -> int:
    lockstep = start_lockstep(
        WITH_BREAKS, implementation, fullgraph=False, reshard_after_forward=reshard_after_forward
    )
    lockstep.train(3)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def call_submodule_alone(implementation: str) -> None:
    """After a training step of the whole, a unit is trained by itself."""
    torch.manual_seed(42)
    reference = build_mlp((6, 7), (7, 3))
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model[0]])
    lockstep = Lockstep(
        workload=SMALL_MLP,
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[make_adam(reference.parameters()), make_adam(model.parameters())],
    )
    lockstep.train(1)
    losses = backward_on_all_batches(SMALL_MLP, reference[0], step=5)
    loss = SMALL_MLP.loss(model[0], SMALL_MLP.batch_of(dist.get_rank(), 5))
    loss.backward()
    assert_close(loss.detach(), losses[dist.get_rank()])
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("implementation", EVERY)
def test_module_called_twice_in_a_forward(run_on_gloo_ranks, implementation, reshard_after_forward):
    run_on_gloo_ranks(2, train_called_twice, implementation, reshard_after_forward)


@pytest.mark.parametrize("joined", [True, False], ids=["one_backward", "two_backwards"])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_two_forwards_before_a_backward(run_on_gloo_ranks, implementation, reshard_after_forward, joined):
    run_on_gloo_ranks(2, train_on_two_forwards, implementation, reshard_after_forward, joined)


def test_two_compiled_forwards_before_a_backward(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_on_two_forwards, "compiled", None, True)


@pytest.mark.parametrize("implementation", EVERY)
def test_gradients_add_up_over_backwards(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, accumulate_with_reduction_each_time, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_evaluation_between_steps(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, evaluate_between_steps, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_first_forward_without_gradient(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, forward_without_gradient_first, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_dropout_draws_the_unsharded_mask(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, apply_dropout, implementation)


@pytest.mark.inductor
@pytest.mark.parametrize("implementation", EVERY)
def test_smaller_last_batch_compiles_once_more_at_most(run_on_gloo_ranks, implementation):
    num_graphs = run_on_gloo_ranks(2, train_with_batch_sizes, implementation, [[8, 8, 8, 5, 3]] * 2)
    allowed = (1, 2) if implementation == "compiled" else (0,)
    assert all(number in allowed for number in num_graphs), num_graphs


@pytest.mark.parametrize("implementation", EVERY)
def test_smaller_batch_on_one_rank_only(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_batch_sizes, implementation, [[8, 8, 8, 8], [8, 8, 5, 8]])


@pytest.mark.parametrize(
    ("implementation", "reshard_after_forward"),
    [
        *((each, kept) for each in EVERY for kept in (True, False) if (each, kept) != ("compiled", True)),
        pytest.param("compiled", True, marks=pytest.mark.slow),
    ],
)
def test_graph_break_inside_a_unit(run_on_gloo_ranks, implementation, reshard_after_forward):
    num_graphs = run_on_gloo_ranks(2, train_with_graph_breaks, implementation, reshard_after_forward)
    if implementation == "compiled":
        assert min(num_graphs) >= 3, "the graph breaks did not break"


@pytest.mark.parametrize("implementation", EVERY)
def test_unit_called_alone(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, call_submodule_alone, implementation)


def test_workloads_differ_between_ranks_and_steps():
    """The parity tests mean nothing if every rank and step has the same batch."""
    for name, workload in WORKLOADS.items():
        batches = [workload.batch_of(rank, step)[0] for rank in (0, 1) for step in (0, 1)]
        pairs = [(one, other) for index, one in enumerate(batches) for other in batches[:index]]
        assert not any(torch.equal(one, other) for one, other in pairs), name
