"""A unit's settings are what its graphs are traced with; its switches and its state are not."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard import FSDPModule, fully_shard
from graphshard.fsdp.state import Tree, Unit, UnitSettings, stored_parameters
from graphshard.ir import UNIT

#: Graphs run as they were captured here, which a real model is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:graphshard. this model was compiled by a backend:UserWarning")

#: What changes an inner unit, and whether its forward is traced again then.
CHANGES: dict[str, tuple[Callable[[FSDPModule, FSDPModule], None], bool]] = {
    "reshard_after_forward": (lambda unit, _: unit.set_reshard_after_forward(False), True),
    "divide_factor": (lambda unit, _: unit.set_gradient_divide_factor(3.0), True),
    "force_sum": (lambda unit, _: unit.set_force_sum_reduction_for_comms(True), True),
    "forward_prefetch": (lambda unit, root: unit.set_modules_to_forward_prefetch([root]), True),
    "backward_prefetch": (lambda unit, root: unit.set_modules_to_backward_prefetch([root]), True),
    "all_reduce_hook": (lambda unit, _: unit.set_all_reduce_hook(lambda flat: None), True),
    "max_reductions": (lambda unit, _: unit.set_reduce_scatter_max_input_buffers(2), True),
    "reduce_grads": (lambda unit, _: unit.set_requires_gradient_sync(False), False),
    "all_reduce_grads": (lambda unit, _: unit.set_requires_all_reduce(False), False),
    "reshard_after_backward": (lambda unit, _: unit.set_reshard_after_backward(False), False),
    "reduces_unused": (lambda unit, _: unit.set_reduce_scatter_unused_params(True), False),
    "kept": (lambda unit, _: _keep_gathered(unit), False),
    "waiting": (lambda unit, _: _leave_waiting(unit), False),
}


def _keep_gathered(module):
    unit = module.__dict__[UNIT]
    for slot in unit.slots:
        unit.keep(slot.name, torch.ones(slot.shape))
    assert unit.is_gathered


def _leave_waiting(module):
    unit = module.__dict__[UNIT]
    for slot in unit.slots:
        unit.add_unreduced(slot.name, torch.ones(slot.shape))
    assert unit.is_waiting


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CHANGES)
def test_settings_are_traced_and_switches_are_not(fake_group, name):
    mesh = fake_group(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    graphs = []

    def count(gm, _):
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=count)
    compiled(torch.ones(2, 4))
    change, is_traced = CHANGES[name]
    change(model[0], model)
    compiled(torch.ones(2, 4))
    compiled(torch.ones(2, 4))
    assert len(graphs) == 1 + is_traced


def test_a_copied_unit_has_settings_of_its_own():
    unit = Unit(tree=Tree(), modules=[], settings=UnitSettings(divide_factor=2.0), reduces_unused=True)
    unit.settings.comms.all_gather = print
    copied = copy.deepcopy(unit)
    assert copied.settings.divide_factor == 2.0 and copied.settings.comms.all_gather is print
    assert copied.reduces_unused and copied.is_root
    copied.settings.divide_factor = 3.0
    copied.settings.comms.all_gather = None
    assert unit.settings.divide_factor == 2.0 and unit.settings.comms.all_gather is print


def test_a_copied_unit_leaves_state_behind():
    unit = Unit(tree=Tree(), modules=[])
    unit.add_unreduced("a", torch.ones(2))
    unit.add_partial("a", torch.ones(1))
    assert unit.is_waiting and unit.tree.waiting and len(list(unit.held())) == 2
    copied = copy.deepcopy(unit)
    assert not copied.is_waiting and not copied.tree.waiting and not list(copied.held())
    unit.drop_iteration()
    assert not unit.is_waiting


def test_a_replaced_shard_is_gathered_anew(fake_group):
    """Its versions may be those of the one before it, which the unit has gathered and keeps."""
    model = fully_shard(
        nn.Linear(6, 4, bias=False),
        mesh=fake_group(1),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    model.set_reshard_after_backward(False)
    x = torch.ones(2, 6)
    first = model(x)
    first.sum().backward()
    assert model.__dict__[UNIT].is_gathered
    stored_parameters(model)["weight"] = nn.Parameter(model.weight.detach() * 2)
    torch.testing.assert_close(model(x), 2 * first)


def test_unshard_in_inference_mode_shows_full_parameters(fake_group):
    model = fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
    with torch.inference_mode():
        model.unshard()
        assert type(model.weight) is nn.Parameter and model.weight.shape == (4, 6)
        model(torch.ones(2, 6))
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
