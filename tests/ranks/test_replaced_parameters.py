"""What was set on parameters and modules before sharding, or holds parameters that sharding has replaced."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.implementations import GRAPHSHARD, UNCOMPILED, compile_if_asked, shard_units
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from graphshard.errors import ParameterStateError, StaleOptimizerError, UnsupportedShardingError


def two_linears(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def batch_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def train_with_hooks_and_another_class(implementation: str) -> None:
    """Micro-batches of which the first one does not reduce."""
    reference, called = two_linears(), []
    model = copy.deepcopy(reference)
    for one in (reference, model):
        one[0].weight.register_hook(lambda grad: grad * 2)
        removed = one[0].bias.register_hook(lambda grad: grad * 3)
        one[1].weight.register_post_accumulate_grad_hook(lambda param: called.append(type(param)))
        one[1].bias.no_weight_decay = True
        if one is model:
            shard_units(implementation, one, [one[1]])
        removed.remove()
        one[0].__class__ = Doubled
        one[1].__class__ = Doubled
    assert model[1].bias.no_weight_decay and isinstance(model[1].bias, DTensor)
    assert isinstance(model[0], Doubled) and type(model[1]).__name__ == "FSDPDoubled"
    forward = compile_if_asked(implementation, model)
    for micro_batch in range(2):
        model.set_requires_gradient_sync(micro_batch == 1)
        forward(batch_of(micro_batch)).sum().backward()
        reference(batch_of(micro_batch)).sum().backward()
    check_sharded_parity(reference, model)
    # The gradient of the first micro-batch waits, so the shard's hook is called once, as by FSDP2.
    assert called.count(DTensor) == 1 and called.count(nn.Parameter) == 2


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_attributes_hooks_and_classes(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_hooks_and_another_class, implementation)


class HoldsList(nn.Module):
    """Reads a parameter from a list that was made before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.held = [self.last.weight]
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.tied(self.first(x)), self.held[0])


def read_old_parameters(implementation: str) -> None:
    model = HoldsList()
    params = list(model.parameters())
    shard_units(implementation, model, [])
    forward = compile_if_asked(implementation, model)
    with pytest.warns(UserWarning, match=r"graphshard: last\.weight from before sharding got a gradient") as told:
        forward(batch_of(0)).sum().backward()
        forward(batch_of(0)).sum().backward()
    assert len(told) == 1
    optimizer = torch.optim.SGD(params, lr=0.1)
    with pytest.raises(StaleOptimizerError, match=r"SGD holds first\.weight, .* from before sharding"):
        optimizer.step()


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_old_parameters_are_told(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, read_old_parameters, implementation)


def drop_gradients_and_hold_lists() -> None:
    model = two_linears()
    model(batch_of(0)).sum().backward()
    params = list(model.parameters())
    with pytest.warns(UserWarning, match=r"the gradients of 0\.weight, 0\.bias, .* before sharding are dropped"):
        shard_units("sharded", model, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A list that nothing computes with is no mistake: warnings are errors.
    model(batch_of(0)).sum().backward()
    optimizer.step()
    assert len(params) == 4


def test_gradients_from_before_sharding(run_on_gloo_ranks):
    run_on_gloo_ranks(2, drop_gradients_and_hold_lists)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table, sparse=True)


def give_sparse_gradients() -> None:
    with pytest.raises(UnsupportedShardingError, match=r"0\.weight belong to embeddings with sparse=True"):
        shard_units("sharded", nn.Sequential(nn.Embedding(6, 4, sparse=True)), [])
    frozen = nn.Sequential(nn.EmbeddingBag(6, 4, mode="sum", sparse=True)).requires_grad_(False)
    shard_units("sharded", frozen, [])
    for implementation in GRAPHSHARD:
        model = shard_units("sharded", Sparse(), [])
        error = BackendCompilerFailed if implementation == "compiled" else UnsupportedShardingError
        with pytest.raises(error, match="parameter table has a sparse gradient"):
            compile_if_asked(implementation, model)(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused(run_on_gloo_ranks):
    run_on_gloo_ranks(2, give_sparse_gradients)


def step_lbfgs() -> None:
    reference = two_linears()
    model = copy.deepcopy(reference)
    shard_units("sharded", model, [model[0]])
    for one in (reference, model):
        optimizer = torch.optim.LBFGS(one.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

        def closure(one=one, optimizer=optimizer):
            optimizer.zero_grad()
            loss = one(batch_of(0)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    check_sharded_parity(reference, model)
    vector = parameters_to_vector(model.parameters())
    assert_close(vector.full_tensor(), parameters_to_vector(reference.parameters()))
    uneven = shard_units("sharded", two_linears(5), [])
    optimizer = torch.optim.LBFGS(uneven.parameters())
    with pytest.raises(UnsupportedShardingError, match=r"share unevenly cannot become: \(5, 5\) over 2 ranks"):
        optimizer.step(lambda: 0.0)
    uneven.unshard()
    assert parameters_to_vector(uneven.parameters()).shape == (60,)


def test_lbfgs_and_vectors_of_parameters(run_on_gloo_ranks):
    run_on_gloo_ranks(2, step_lbfgs)


class TiedAcrossUnits(nn.Module):
    """The output layer comes before the embedding, a unit of its own, that it is tied to."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.tokens = nn.Linear(4, 6, bias=False), nn.Embedding(6, 4)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.tokens(tokens))


def save_and_load_a_gathered_tie() -> None:
    """A state dict holds shards under both names, also while the unit of one of them is gathered; loading frees it."""
    model = TiedAcrossUnits()
    shard_units("sharded", model, [model.tokens], reshard_after_forward=False)
    for gather in (model.tokens.unshard, lambda: model(torch.tensor([1, 2]))):
        gather()
        state = model.state_dict()
        assert [type(value) for value in state.values()] == [DTensor, DTensor]
        gather()
        ones = torch.ones_like(state["tokens.weight"])
        model.load_state_dict({name: ones for name in state})
        assert torch.equal(model.output.weight.full_tensor(), torch.ones(6, 4))
        gather()
        model.double()
        assert model.output.weight is model.tokens.weight and model.output.weight.dtype is torch.float64
        model.float()


def test_states_of_gathered_ties(run_on_gloo_ranks):
    run_on_gloo_ranks(2, save_and_load_a_gathered_tie)


def assign_other_placements(implementation: str) -> None:
    """A DTensor with other pieces in place of a shard: its rows would be taken for those of a shard."""
    model = shard_units(implementation, nn.Linear(4, 4, bias=False), [])
    mesh, values = model.weight.device_mesh, torch.arange(16.0).view(4, 4)
    for placement in (Shard(1), Replicate()):
        value = distribute_tensor(values, mesh, [placement])
        with pytest.raises(RuntimeError):
            model.load_state_dict({"weight": value}, assign=True)
            model(torch.ones(1, 4))
    if implementation == "sharded":
        with pytest.raises(ParameterStateError, match=r"weight cannot be replaced by a DTensor that is \(Replicate"):
            model.weight = nn.Parameter(distribute_tensor(values, mesh, [Replicate()]))
        unnamed = init_device_mesh("cpu", (2,))
        model.load_state_dict({"weight": distribute_tensor(values, unnamed, [Shard(0)])}, assign=True)
        assert torch.equal(model(torch.eye(4)), values.T)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_other_placements_are_refused(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, assign_other_placements, implementation)


def convert_with_attributes() -> None:
    """A conversion of the model keeps what was set on parameters, as for an unsharded one; FSDP2 drops it."""
    model = shard_units("sharded", two_linears(), [])
    param, calls = model[0].weight, []
    param.no_weight_decay, param.grad_dtype = True, None
    handle = param.register_post_accumulate_grad_hook(lambda param: calls.append("accumulated"))
    param.register_hook(lambda grad: calls.append("computed"))
    model.double()
    assert model[0].weight is param and param.no_weight_decay and param.grad_dtype is None
    model(batch_of(0).double()).sum().backward()
    handle.remove()
    model(batch_of(0).double()).sum().backward()
    assert calls == ["computed", "accumulated", "computed"]


def test_conversions_keep_attributes_and_hooks(run_on_gloo_ranks):
    run_on_gloo_ranks(2, convert_with_attributes)
