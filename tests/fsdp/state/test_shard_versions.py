"""What counts as a change of a shard, and that looking for it disturbs nobody."""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, zeros

from graphshard import fully_shard
from graphshard.errors import ParameterStateError
from graphshard.fsdp.regroup import tell_added
from graphshard.fsdp.state.parameter_slot import slot_of_shard
from graphshard.fsdp.state.shard_versions import version_of
from graphshard.fsdp.state.watched_optimizers import optimizers_of, watch_optimizers

OPTIMIZERS = {
    "loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
}


@pytest.fixture(params=range(4))
def param(request, fake_group) -> nn.Parameter:
    """5 rows over 4 ranks: the last has none."""
    return nn.Parameter(zeros(5, 3, device_mesh=fake_group(4, request.param), placements=[Shard(0)]))


def _with_gradient(param: nn.Parameter) -> nn.Parameter:
    param.grad = DTensor(torch.ones_like(param.to_local()), param._spec, requires_grad=False)
    return param


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_step_is_a_change(param, kind):
    watch_optimizers(tell_added)
    watch_optimizers(tell_added)
    optimizer = OPTIMIZERS[kind]([_with_gradient(param), nn.Parameter(torch.ones(2))])
    before = version_of(param)
    optimizer.step()
    assert version_of(param) != before


def test_in_place_ops_are_changes(param):
    versions = [version_of(param)]
    with torch.no_grad():
        param.mul_(2)
        versions.append(version_of(param))
        param.copy_(param * 2)
        versions.append(version_of(param))
        param.to_local().zero_()
        versions.append(version_of(param))
    assert len(set(versions)) == 4


def test_reading_is_no_change(param):
    before = version_of(param)
    (param.to_local() * 2).sum()
    torch.optim.AdamW([_with_gradient(param)]).zero_grad()
    assert version_of(param) == before


def test_an_edit_through_data_is_not_seen(param):
    """`.data` has a version counter of its own, and says so to nobody."""
    before = version_of(param)
    param.data.add_(1)
    param.to_local().data.add_(1)
    assert version_of(param) == before


@pytest.mark.parametrize("foreach", [False, True])
def test_a_compiled_step_of_sgd_is_a_change(fake_group, foreach):
    watch_optimizers(tell_added)
    param = _with_gradient(nn.Parameter(zeros(5, 3, device_mesh=fake_group(2), placements=[Shard(0)])))
    optimizer = torch.optim.SGD([param], lr=0.1, foreach=foreach)
    before = version_of(param)
    torch.compile(optimizer.step, backend="eager")()
    assert version_of(param) != before


def test_a_compiled_optimizer_still_compiles():
    watch_optimizers(tell_added)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    torch.compile(optimizer.step, backend="eager")()
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))


def test_optimizers_are_found_while_other_threads_build_tuples():
    """A list of all objects would make such a thread fail: its tuple would have another owner."""
    layer, has_ended, errors = nn.Linear(2, 2), threading.Event(), []

    def build_tuples() -> None:
        while not has_ended.is_set():
            try:
                tuple(number for number in range(500))
            except SystemError as error:
                errors.append(error)

    of_all, of_one = (
        torch.optim.Adam(layer.parameters()),
        torch.optim.SGD([{"params": [layer.bias]}], lr=0.1),
    )
    thread = threading.Thread(target=build_tuples)
    thread.start()
    try:
        found = list(optimizers_of([layer.weight, layer.bias]))
        alone = list(optimizers_of([layer.weight]))
        others = list(optimizers_of([torch.ones(2)]))
    finally:
        has_ended.set()
        thread.join()
    assert {id(each) for each in found} == {id(of_all), id(of_one)} and alone == [of_all]
    assert not others and not errors


def test_each_assignment_to_data_is_seen(fake_group):
    """Also the second, whose storage may lie where the first one did, which nothing holds by then."""
    model = fully_shard(nn.Linear(4, 4), mesh=fake_group(2))
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(4):
        model.weight.grad.data = model.weight.grad * 0.5
        with pytest.raises(
            ParameterStateError, match=r"the \.data of the gradient of weight was assigned to"
        ):
            optimizer.step()
    for _ in range(4):
        model.weight.data = model.weight.detach() * 0.5
        with pytest.raises(ParameterStateError, match=r"parameter weight: its \.data was assigned to"):
            model(torch.ones(2, 4))


def test_shards_and_gradients_are_saved_and_copied(fake_group):
    """torch.load takes them with its defaults, as those of FSDP2; what is loaded belongs to no model."""
    model = fully_shard(nn.Linear(4, 4), mesh=fake_group(2))
    model(torch.ones(2, 4)).sum().backward()
    for value in (model.weight, model.weight.grad):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        for other in (torch.load(file), copy.deepcopy(value)):
            assert torch.equal(other.to_local(), value.to_local())
            assert slot_of_shard(other) is None
    assert slot_of_shard(model.weight) is not None
