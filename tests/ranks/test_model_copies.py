"""Copies of a sharded model: copy.deepcopy, AveragedModel, and averages written by hand.

FSDP2 refuses copy.deepcopy; here the copy is a sharded model of its own.
"""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, compile_if_asked, shard_units
from support.parity import Lockstep, check_sharded_parity, make_adam, start_lockstep
from support.toy_models import WORKLOADS, build_mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

DECAY = 0.8


class Recurrent(nn.Module):
    """An LSTM, which keeps lists of its weights beside its attributes, owned by the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class CopiesItself(nn.Linear):
    """Has an idea of its own of what a copy is."""

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return CopiesItself(self.in_features, self.out_features)


def train_copy(implementation: str, workload_name: str) -> None:
    """After the copy, each of the two trains like an unsharded copy, on batches of its own."""
    workload = WORKLOADS[workload_name]
    original = start_lockstep(workload, implementation)
    original.train(2)
    original.backward(2)  # gradients are not copied, as from any module
    reference, model = copy.deepcopy(original.reference), copy.deepcopy(original.model)
    check_sharded_parity(reference, model)
    check_no_shared_storage(original.model, model)
    copied = Lockstep(
        workload=workload,
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[make_adam(reference.parameters()), make_adam(model.parameters())],
    )
    original.update(2)
    for step in range(3, 6):
        copied.backward(10 * step)
        original.backward(step)
        original.update(step)
        copied.update(step)
    for one, other in zip(original.model.parameters(), model.parameters(), strict=True):
        if one.to_local().numel():
            assert not torch.equal(one.to_local(), other.to_local()), "the two trained on other batches"


def check_no_shared_storage(one: nn.Module, other: nn.Module) -> None:
    storages = [
        {param.to_local().untyped_storage().data_ptr() for param in model.parameters()}
        for model in (one, other)
    ]
    assert not storages[0] & storages[1]
    for param, copied in zip(one.parameters(), other.parameters(), strict=True):
        assert isinstance(copied, nn.Parameter) and copied.is_leaf
        sizes = [value.to_local().untyped_storage().nbytes() for value in (param, copied)]
        assert sizes[0] == sizes[1], "the padding is copied too"


def copy_one_unit() -> None:
    """A unit copied without its model becomes a root: alone it computes what it computes inside."""
    model = WORKLOADS["transformer"].build()
    shard_units("sharded", model, list(model.layers))
    block = copy.deepcopy(model.layers[1])
    inputs = torch.randn(2, 3, 16)
    expected = model.layers[1](inputs).detach()
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None, "the copy keeps the model alive"
    found = block(inputs)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


def copy_inside_containers() -> None:
    """Two sharded models in one container, an LSTM, and a list unit: each copy works by itself."""
    from graphshard import fully_shard

    torch.manual_seed(0)
    recurrent, listed = Recurrent(), build_mlp((6, 7), (7, 5), (5, 3))
    references = copy.deepcopy([recurrent, listed])
    shard_units("sharded", recurrent, [])
    fully_shard([listed[0], listed[2]])
    fully_shard(listed)
    copies = copy.deepcopy(nn.ModuleList([recurrent, listed]))
    for original in (recurrent, listed):
        with torch.no_grad():
            for parameter in original.parameters():
                parameter.zero_()
    for copied, reference, shape in zip(copies, references, ((2, 3, 4), (2, 6)), strict=True):
        inputs = torch.randn(shape)
        assert_close(copied(inputs), reference(inputs))
        copied(inputs).sum().backward()
        reference(inputs).sum().backward()
        check_sharded_parity(reference, copied)


def copy_tied_unit() -> None:
    """A unit whose weight is tied to a unit outside of the copy still gathers it."""
    model = build_mlp((5, 5), (5, 5))
    model[2].weight = model[0].weight
    shard_units("sharded", model, [model[0], model[2]])
    inputs = torch.randn(2, 5)
    expected = functional.linear(inputs, model[2].weight.full_tensor(), model[2].bias.full_tensor())
    assert_close(copy.deepcopy(model[2])(inputs), expected)


def copy_with_own_deepcopy() -> None:
    from graphshard.errors import AlreadyShardedError

    model = shard_units("sharded", CopiesItself(4, 4), [])
    with pytest.raises(AlreadyShardedError, match=r"FSDPCopiesItself.*load_state_dict"):
        copy.deepcopy(model)


def average_by_torch(implementation: str, with_ema: bool) -> None:
    """AveragedModel over a sharded model holds the averages it holds over an unsharded one."""
    lockstep = start_lockstep(WORKLOADS["mlp_5_rows"], implementation)
    options = {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)} if with_ema else {}
    expected, found = (AveragedModel(model, **options) for model in (lockstep.reference, lockstep.model))
    forward = compile_if_asked(implementation, found)
    for step in range(4):
        lockstep.backward(step)
        lockstep.update(step)
        expected.update_parameters(lockstep.reference)
        found.update_parameters(lockstep.model)
        check_sharded_parity(expected.module, found.module)
        (inputs,) = lockstep.workload.batch_of(dist.get_rank(), 100 + step)
        with torch.no_grad():
            assert_close(forward(inputs), expected(inputs))
            is_average = not torch.equal(found.module(inputs), lockstep.model(inputs))
        assert is_average == (step > 0), "the first update copies, the later ones average"


def average_by_hand(implementation: str) -> None:
    """Shards averaged beside the model, then put into it for an evaluation and taken out again."""
    lockstep = start_lockstep(WORKLOADS["mlp_5_rows"], implementation)
    models = (lockstep.reference, lockstep.model)
    averages = [
        {name: value.detach().clone() for name, value in model.named_parameters()} for model in models
    ]
    for step in range(4):
        lockstep.backward(step)
        lockstep.update(step)
        for model, average in zip(models, averages, strict=True):
            with torch.no_grad():
                for name, value in model.named_parameters():
                    average[name].lerp_(value, 1 - DECAY)
    trained = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    for model, average in zip(models, averages, strict=True):
        model.load_state_dict(average)
    check_sharded_parity(*models)
    (inputs,) = lockstep.workload.batch_of(dist.get_rank(), 100)
    with torch.no_grad():
        assert_close(lockstep.forward(inputs), lockstep.reference(inputs))
    for model, state in zip(models, trained, strict=True):
        model.load_state_dict(state)
    lockstep.train(1)


def refuse_as_fsdp2_does() -> None:
    """So there is nothing of torch's to compare the copies here with."""
    with pytest.raises(AssertionError):
        copy.deepcopy(shard_units("fsdp2", build_mlp((4, 6), (6, 3)), []))


@pytest.mark.parametrize("workload", ["mlp_5_rows", "transformer"])
def test_copy_trains_apart_from_its_original(run_on_gloo_ranks, workload):
    run_on_gloo_ranks(4 if workload == "mlp_5_rows" else 2, train_copy, "sharded", workload)


def test_compiled_copy_trains_apart_from_its_original(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_copy, "compiled", "mlp_5_rows")


@pytest.mark.parametrize("case", [copy_one_unit, copy_inside_containers, copy_tied_unit])
def test_copies_of_parts_and_containers(run_on_gloo_ranks, case):
    run_on_gloo_ranks(2, case)


def test_class_with_its_own_deepcopy_is_refused(run_on_gloo_ranks):
    run_on_gloo_ranks(2, copy_with_own_deepcopy)


def test_fsdp2_refuses_copies(run_on_gloo_ranks):
    run_on_gloo_ranks(2, refuse_as_fsdp2_does)


@pytest.mark.parametrize(
    ("implementation", "with_ema"), [("sharded", False), ("sharded", True), ("compiled", True)]
)
def test_averaged_model(run_on_gloo_ranks, implementation, with_ema):
    run_on_gloo_ranks(2, average_by_torch, implementation, with_ema)


@pytest.mark.parametrize("implementation", EVERY)
def test_average_written_by_hand(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, average_by_hand, implementation)
