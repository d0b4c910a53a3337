"""The usual gather of an uncompiled unit keeps what it knows for the next one; all others take the general way."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import graphshard
from graphshard.fsdp.state.eager_collectives import PendingGather
from graphshard.fsdp.state.parameter_slot import shard_data
from graphshard.fsdp.state.plain_gathers import PlainGather, start_gather
from graphshard.ir import UNIT

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def started(model):
    """The gather of all parameters of a model of one unit, and its unit."""
    unit = model.__dict__[UNIT]
    return start_gather(unit, [(slot, slot.as_sent(shard_data(slot))) for slot in unit.slots]), unit


@pytest.mark.parametrize("options", [{}, {"mp_policy": HALF}])
def test_even_rows_are_the_usual_case(fake_group, options):
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2), **options)
    gather, unit = started(model)
    assert type(gather) is PlainGather
    fulls, dtype = gather.take(), torch.bfloat16 if options else torch.float32
    assert {name: (full.shape, full.dtype) for name, full in fulls.items()} == {
        "weight": ((4, 6), dtype),
        "bias": ((4,), dtype),
    }
    assert all(full.is_contiguous() for full in fulls.values()) and gather.take() == {}
    bucket = unit.slots[0].bucket
    assert type(started(model)[0]) is PlainGather and unit.slots[0].bucket is bucket


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (nn.Linear(6, 5), {}),
        (nn.Linear(6, 4, dtype=torch.complex64), {}),
        (nn.Linear(6, 4, bias=False), {"shard_placement_fn": lambda _: Shard(1)}),
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(6, 4, dtype=torch.bfloat16)), {}),
    ],
    ids=["uneven", "complex", "columns", "two dtypes"],
)
def test_all_else_takes_the_general_way(fake_group, module, options):
    gather, unit = started(graphshard.fully_shard(copy.deepcopy(module), mesh=fake_group(2), **options))
    assert type(gather) is PendingGather
    assert {name: full.shape for name, full in gather.take().items()} == {
        slot.name: torch.Size([*slot.shape, 2]) if slot.is_complex else slot.shape for slot in unit.slots
    }


def test_a_custom_gather_takes_the_general_way(fake_group):
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
    before = started(model)[0]
    model.set_custom_all_gather(_Gather())
    assert type(before) is PlainGather and type(started(model)[0]) is PendingGather


class _Gather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        output_tensor.copy_(input_tensor.repeat(2))


@pytest.mark.parametrize("change", ["dtype", "layout", "class", "setting"])
def test_what_is_kept_serves_no_other_shards(fake_group, change):
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
    _, unit = started(model)
    bucket = unit.slots[0].bucket
    if change == "setting":
        model.set_gradient_divide_factor(3.0)
    elif change == "dtype":
        model.double()
    members = [[slot, shard_data(slot)] for slot in unit.slots]
    if change == "layout":
        members[0][1] = torch.zeros(6, 2).t()
    elif change == "class":
        members[0][1] = nn.Parameter(members[0][1])
    assert not bucket.is_of(members)
    gather = start_gather(unit, members)
    assert type(gather) is (PendingGather if change in ("layout", "class") else PlainGather)
    assert {full.dtype for full in gather.take().values()} == {members[0][1].dtype}


def test_a_copied_model_has_its_own(fake_group):
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
    _, unit = started(model)
    copied = copy.deepcopy(model)
    gather, own = started(copied)
    assert type(gather) is PlainGather
    assert own.slots[0].bucket is not unit.slots[0].bucket and own.slots[0].bucket.slots[0] is own.slots[0]
