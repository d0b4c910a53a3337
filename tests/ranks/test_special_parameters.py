"""Parameters that are frozen, ignored, tied or unused, and buffers."""

import dataclasses
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, GRAPHSHARD, UNCOMPILED, compile_if_asked, shard_units
from support.parity import backward_on_all_batches, check_shard, start_lockstep
from support.toy_models import WORKLOADS, Workload, mlp_workload
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close


class NormalisedMlp(nn.Module):
    """Has float and integer buffers that a training forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 5)
        self.register_buffer("offset", torch.full((5,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + self.offset


class PartlyUsed(nn.Module):
    """One layer is never used, and one only makes an output that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.unseen = nn.Linear(6, 4)
        self.never = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.used(x)
        return hidden, self.unseen(hidden)


class Recurrent(nn.Module):
    """Keeps a list of its weights beside the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class TiedTwice(nn.Module):
    """One uneven weight under three names, used twice in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.alias = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


RECURRENT = Workload(
    build=Recurrent,
    list_units=lambda model: [],
    draw_batch=lambda generator, size: (torch.randn(size, 3, 4, generator=generator),),
    loss=lambda forward, batch: (forward(*batch) - 1.0).square().mean(),
)
PARTLY_USED = Workload(
    build=PartlyUsed,
    list_units=lambda model: [model.unseen],
    draw_batch=lambda generator, size: (torch.randn(size, 6, generator=generator),),
    loss=lambda forward, batch: (forward(*batch)[0] - 1.0).square().mean(),
)
TIED_TWICE = Workload(
    build=TiedTwice,
    list_units=lambda model: [],
    draw_batch=lambda generator, size: (torch.randn(size, 5, generator=generator),),
    loss=lambda forward, batch: (forward(*batch) - 1.0).square().mean(),
)
TIED_ACROSS_UNITS = dataclasses.replace(TIED_TWICE, list_units=lambda model: [model.first, model.second])
FOUR_LAYERS = mlp_workload((6, 7), (7, 6), (6, 5), (5, 4))


def freeze_first_and_third_layer(model: nn.Module) -> None:
    for index in (0, 4):
        model[index].requires_grad_(False)


def train_frozen(implementation: str) -> None:
    """Frozen weights stay as they are and get no gradient; then they thaw."""
    lockstep = start_lockstep(FOUR_LAYERS, implementation, prepare=freeze_first_and_third_layer)
    lockstep.train(2)
    assert lockstep.model[0].weight.grad is None
    lockstep.reference.requires_grad_(True)
    lockstep.model.requires_grad_(True)
    for step in (2, 3):
        lockstep.backward(step)
        lockstep.update(step)
    lockstep.backward(4)
    assert lockstep.model[0].weight.grad is not None


def freeze_all_but_biases(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


def train_biases(implementation: str) -> None:
    start_lockstep(FOUR_LAYERS, implementation, prepare=freeze_all_but_biases).train(3)


def train_with_ignored_parameter(implementation: str) -> None:
    """An ignored parameter stays whole and its gradient is of this rank's batch alone."""
    torch.manual_seed(42)
    reference, model = FOUR_LAYERS.build(), FOUR_LAYERS.build()
    model.load_state_dict(reference.state_dict())
    ignored = model[4].weight
    shard_units(implementation, model, [model[0], model[4]], ignored_params={ignored})
    assert model[4].weight is ignored and not isinstance(ignored, DTensor)
    assert isinstance(model[4].bias, DTensor) and isinstance(model[2].weight, DTensor)
    batch = FOUR_LAYERS.batch_of(dist.get_rank(), step=0)
    loss = FOUR_LAYERS.loss(compile_if_asked(implementation, model), batch)
    expected = FOUR_LAYERS.loss(reference, batch)
    loss.backward()
    expected.backward()
    assert_close(loss, expected)
    assert not isinstance(ignored.grad, DTensor)
    assert_close(ignored.grad, reference[4].weight.grad)
    summed = [torch.empty_like(ignored) for _ in range(dist.get_world_size())]
    dist.all_gather(summed, ignored.grad)
    assert not torch.equal(summed[0], summed[1]), "the ranks' batches differ, so their own gradients must"


def train_tied(implementation: str) -> None:
    lockstep = start_lockstep(TIED_TWICE, implementation)
    model = lockstep.model
    assert model.second.weight is model.first.weight and model.alias is model.first
    lockstep.train(3)
    assert model.second.weight is model.first.weight


def train_every_row_of_a_tied_embedding(implementation: str) -> None:
    """Vocabulary 11 on this many ranks: the rows of the last, shorter shard are trained too."""
    lockstep = start_lockstep(WORKLOADS["transformer"], implementation)
    before = lockstep.model.tokens.weight.full_tensor().clone()
    lockstep.train(3)
    after = lockstep.model.tokens.weight.full_tensor()
    assert (after != before).any(dim=1).all()


def train_tied_across_units(implementation: str) -> None:
    """One uneven weight in two units."""
    lockstep = start_lockstep(TIED_ACROSS_UNITS, implementation)
    assert lockstep.model.second.weight is lockstep.model.first.weight
    lockstep.train(3)
    assert lockstep.model.second.weight is lockstep.model.first.weight


def train_partly_used(implementation: str) -> None:
    lockstep = start_lockstep(PARTLY_USED, implementation)
    lockstep.train(3)
    lockstep.backward(3)
    grads = {name: parameter.grad is not None for name, parameter in lockstep.model.named_parameters()}
    assert grads == {name: name.startswith("used") for name in grads}


def backward_through_compiled_partly_used() -> None:
    """A compiled graph gives zeros for what only an unseen output uses, as `torch.compile` does unsharded."""
    lockstep = start_lockstep(PARTLY_USED, "compiled")
    backward_on_all_batches(PARTLY_USED, lockstep.reference, step=0)
    PARTLY_USED.loss(lockstep.forward, PARTLY_USED.batch_of(dist.get_rank(), 0)).backward()
    model, expected = lockstep.model, lockstep.reference.used
    check_shard("gradient of used.weight", expected.weight.grad, model.used.weight.grad)
    check_shard("gradient of used.bias", expected.bias.grad, model.used.bias.grad)
    for parameter in model.unseen.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert not parameter.grad.to_local().any()
    assert all(parameter.grad is None for parameter in model.never.parameters())


def update_buffers(implementation: str) -> None:
    """Buffers stay whole and plain, and follow this rank's own batches."""
    reference, model = NormalisedMlp(), NormalisedMlp()
    model.load_state_dict(reference.state_dict())
    shard_units(implementation, model, [model.norm])
    forward = compile_if_asked(implementation, model)
    for step in range(3):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        forward(inputs).square().mean().backward()
        reference(inputs)
    buffers = dict(model.named_buffers())
    assert list(buffers) == list(dict(reference.named_buffers()))
    for name, expected in reference.named_buffers():
        assert not isinstance(buffers[name], DTensor), name
        assert_close(buffers[name], expected, msg=lambda text, name=name: f"{name}: {text}")
    assert buffers["norm.num_batches_tracked"] == 3


def keep_meta_buffers(implementation: str) -> None:
    with torch.device("meta"):
        model = NormalisedMlp()
    shard_units(implementation, model, [])
    assert all(buffer.is_meta for buffer in model.buffers())
    model.to_empty(device="cpu")
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())


def train_recurrent(as_unit: bool) -> None:
    """An LSTM trains, and its list of weights does not keep the unsharded ones alive."""
    model = Recurrent()
    unsharded = weakref.ref(model.lstm.weight_ih_l0)
    shard_units("sharded", model, [model.lstm] if as_unit else [])
    gc.collect()
    assert unsharded() is None
    workload = dataclasses.replace(RECURRENT, list_units=lambda model: [model.lstm] if as_unit else [])
    start_lockstep(workload, "sharded").train(3)


@pytest.mark.parametrize("implementation", EVERY)
def test_frozen_layers_that_thaw(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_frozen, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_training_of_biases_alone(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_biases, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_ignored_parameter_is_neither_sharded_nor_reduced(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_ignored_parameter, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_parameter_tied_within_a_unit(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_tied, implementation)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_every_row_of_a_tied_embedding_is_trained(run_on_gloo_ranks, implementation, world_size):
    run_on_gloo_ranks(world_size, train_every_row_of_a_tied_embedding, implementation)


@pytest.mark.inductor
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_parameter_tied_across_units(run_on_gloo_ranks, implementation):
    """FSDP2 refuses this model at its first forward."""
    run_on_gloo_ranks(2, train_tied_across_units, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_unused_parameters_get_no_gradient(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_partly_used, implementation)


def test_unused_parameters_of_compiled_model(run_on_gloo_ranks):
    run_on_gloo_ranks(2, backward_through_compiled_partly_used)


@pytest.mark.parametrize("implementation", EVERY)
def test_buffers_follow_the_local_batches(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, update_buffers, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_meta_buffers_wait_for_to_empty(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, keep_meta_buffers, implementation)


@pytest.mark.parametrize("as_unit", [False, True], ids=["in_root", "as_unit"])
def test_recurrent_layer(run_on_gloo_ranks, as_unit):
    run_on_gloo_ranks(2, train_recurrent, as_unit)
