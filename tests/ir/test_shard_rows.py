"""Rows: where shards lie, which of them are neighbours, and sending them as they lie."""

import copy
import io
import weakref

import pytest
import torch
from support.torch_versions import NEEDS_MESH_PER_PARAMETER, ShardPlacementResult
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from graphshard import fully_shard
from graphshard.capture.capture_step import capture_step
from graphshard.capture.rules import ShardingRules
from graphshard.fsdp.shard_parameter import give_places, lay_out
from graphshard.fsdp.state import slots_of
from graphshard.ir import UNIT
from graphshard.ir.bucket_ops import JOIN, PACK
from graphshard.ir.shard_rows import (
    RowPlace,
    ShardedShape,
    are_neighbours,
    lie_in_a_row,
    moved_to_row,
    row_offsets,
)
from graphshard.passes import BucketCollectives
from graphshard.pipeline.provenance import row_places
from graphshard.testing import capture_graphs


def _shape(*shape, dim=0, num_ranks=2, dtype=torch.float32, row="a"):
    return ShardedShape(row, shape, dim, num_ranks, dtype)


def test_only_even_cuts_along_the_first_dim_have_a_place():
    assert _shape(6, 4).has_place and _shape(16, num_ranks=4).has_place
    assert not _shape(5, 6).has_place, "the last rank has fewer rows"
    assert not _shape(6, 6, dim=1).has_place, "a gather of another dim copies anyway"
    assert not _shape(6, 6, num_ranks=1).has_place, "nothing is gathered"
    assert not _shape(6, 0).has_place, "there is nothing to lie anywhere"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_the_next_shard_begins_where_vectors_may_be_read(dtype):
    places = {numel: _shape(2 * numel, dtype=dtype).has_place for numel in range(1, 65)}
    step = 16 // dtype.itemsize
    assert [numel for numel, has_place in places.items() if has_place] == list(range(step, 65, step))


def _offsets(*shapes):
    return list(row_offsets({f"{index}.weight": shape for index, shape in enumerate(shapes)}).values())


def test_shards_follow_each_other():
    assert _offsets(_shape(40), _shape(24), _shape(10), _shape(64)) == [0, 20, -1, 32]
    assert row_offsets({}) == {}


def test_in_a_row_dtypes_follow_each_other():
    first, second = _shape(16), _shape(16, dtype=torch.bfloat16)
    assert _offsets(first, second, first, second) == [16, 0, 24, 8]
    assert _offsets(first, _shape(16, row="b"), _shape(5), first) == [0, 0, -1, 8]


def test_biases_come_last():
    """Backwards need the other parameters only."""
    names = ("norm.weight", "norm.bias", "in_proj_weight", "in_proj_bias", "biased.weight")
    offsets = row_offsets(dict.fromkeys(names, _shape(16)))
    assert list(offsets) == list(names) and list(offsets.values()) == [0, 24, 8, 32, 16]
    low = dict.fromkeys(("low.weight", "low.bias"), _shape(16, dtype=torch.bfloat16))
    assert row_offsets({"a.weight": _shape(16), "a.bias": _shape(16), **low}) == {
        "a.weight": 16, "a.bias": 24, "low.weight": 0, "low.bias": 8,
    }  # fmt: skip


def test_neighbours_in_any_order():
    places = [RowPlace("a", 1000, 50), RowPlace("a", 0, 500), RowPlace("a", 500, 500)]
    assert are_neighbours(places) and are_neighbours(places[:1])


def test_what_are_no_neighbours():
    one = RowPlace("a", 0, 8)
    assert not are_neighbours([one, RowPlace("a", 9, 8)]), "something lies in between"
    assert not are_neighbours([one, RowPlace("b", 8, 8)]), "another row"
    assert not are_neighbours([one, None]), "no place"
    assert not are_neighbours([])
    assert not are_neighbours([one, one]), "two at one place"
    assert not are_neighbours([RowPlace("a", 4, 8), one, RowPlace("a", 12, 8)]), "one in another"


def _row():
    """Three tensors, one after the other."""
    return moved_to_row([torch.arange(6.0).view(2, 3), -torch.ones(4), torch.full((2, 2), 7.0)])


def test_tensors_are_copied_into_one_storage():
    row = _row()
    assert lie_in_a_row(row)
    assert torch.equal(row[0], torch.arange(6.0).view(2, 3)) and torch.equal(row[1], -torch.ones(4))
    assert torch.equal(row[2], torch.full((2, 2), 7.0))
    assert [piece.storage_offset() for piece in row] == [0, 0, 0]
    assert [piece.untyped_storage().nbytes() for piece in row] == [6 * 4, 4 * 4, 4 * 4], "no neighbour's bytes"


def test_tensors_of_a_row_have_versions_of_their_own():
    row = _row()
    before = row[1]._version
    row[0].add_(1.0)
    assert row[1]._version == before


def test_what_is_no_row():
    row = _row()
    assert not lie_in_a_row([row[0], row[1].clone(), row[2]])
    assert not lie_in_a_row([row[0], row[2]])
    assert not lie_in_a_row([row[1], row[0]])
    assert not lie_in_a_row([row[0], row[1], row[2].t()]), "elements in another order"


def test_neighbours_are_joined_without_a_copy():
    row = _row()
    joined = JOIN(row)
    assert joined.data_ptr() == row[0].data_ptr() and joined.shape == (14,)
    assert torch.equal(joined[:6], torch.arange(6.0)) and torch.equal(joined[6:10], -torch.ones(4))
    part = JOIN(row[1:])
    assert part.data_ptr() == row[1].data_ptr() and torch.equal(part[4:], torch.full((4,), 7.0))


def test_joined_tensors_stay_in_memory():
    """As long as what joins them: a collective may still read it."""
    row = _row()
    held = [weakref.ref(piece) for piece in row]
    joined = JOIN(row)
    del row
    assert all(piece() is not None for piece in held)
    assert torch.equal(joined[6:10], -torch.ones(4))
    del joined
    assert not any(piece() is not None for piece in held)


def test_others_are_joined_by_copies():
    row = _row()
    joined = JOIN([row[0], torch.full((4,), 3.0), row[2]])
    assert joined.data_ptr() != row[0].data_ptr()
    assert torch.equal(joined[:6], torch.arange(6.0)) and torch.equal(joined[6:10], torch.full((4,), 3.0))
    assert torch.equal(joined[10:], torch.full((4,), 7.0))


def test_join_is_a_view_to_torch():
    """So that the inner compiler reuses the memory for nothing else, and the memory model counts none."""
    assert JOIN.is_view


# the shards of a model ---------------------------------------------------------------------------


class Block(nn.Module):
    """Two parameters that have places, in two dtypes, and one that has none."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.low = nn.Parameter(torch.randn(16, dtype=torch.bfloat16))
        self.uneven = nn.Parameter(torch.randn(5, 2))

    def forward(self, x):
        return self.inner(x) + self.low.sum() + self.uneven.sum()


def _locals(model):
    return {name: param.to_local() for name, param in model.named_parameters()}


def _lies_in_a_row(model):
    """Whether the shards of the blocks that have places are neighbours."""
    found = []
    for index in range(len(model)):
        shards = [model[index].inner.weight.to_local(), model[index].inner.bias.to_local()]
        found.append(lie_in_a_row(shards))
    return all(found)


class SaysHow(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return outputs[0], outputs


def _sharded(mesh, **options):
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def test_shards_of_a_unit_lie_in_a_row(fake_group):
    model = _sharded(fake_group(2))
    assert _lies_in_a_row(model)
    offsets = {name: slot.row_offset for name, slot in slots_of(model[0])}
    offsets |= {name: slot.row_offset for name, slot in slots_of(model[0].inner)}
    assert offsets == {"low": 0, "weight": 8, "bias": 40, "uneven": -1}
    ends = {name: value.data_ptr() + value.nbytes for name, value in _locals(model[0]).items()}
    assert ends["inner.weight"] == model[0].inner.bias.to_local().data_ptr()
    other = model[1].inner.weight.to_local()
    assert other.data_ptr() not in ends.values() or not lie_in_a_row([model[0].inner.bias.to_local(), other])


def test_shards_have_the_values_of_the_parameters(fake_group):
    mesh = fake_group(2, rank=1)
    torch.manual_seed(0)
    model = _sharded(mesh)
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    for name, param in plain.named_parameters():
        assert torch.equal(_locals(model)[name], param.detach().chunk(2)[1]), name


def test_parameters_stay_themselves_when_they_are_moved(fake_group):
    model = _sharded(fake_group(2))
    before = dict(model.named_parameters())
    values = {name: value.double() for name, value in _locals(model).items()}
    for param in before.values():
        param.grad = torch.ones_like(param)
    model.double()
    assert _lies_in_a_row(model)
    for name, param in model.named_parameters():
        assert param is before[name]
        assert param.dtype == param.grad.dtype == torch.float64
        assert torch.equal(param.to_local(), values[name])


def test_a_model_that_was_sharded_on_the_meta_device_is_laid_out(fake_group):
    mesh = fake_group(2)
    with torch.device("meta"):
        model = _sharded(mesh)
    assert {slot.row_offset for _, slot in slots_of(model[0].inner)} == {8, 40}
    model.to_empty(device="cpu")
    assert _lies_in_a_row(model)


def test_a_copied_model_has_rows_of_its_own(fake_group):
    model = _sharded(fake_group(2))
    copied = copy.deepcopy(model)
    assert _lies_in_a_row(copied)
    ours, theirs = model[0].inner.weight.to_local(), copied[0].inner.weight.to_local()
    assert torch.equal(ours, theirs)
    assert ours.data_ptr() != theirs.data_ptr()


def test_what_lies_in_a_row_is_not_moved(fake_group):
    model = _sharded(fake_group(2))
    before = {name: value.data_ptr() for name, value in _locals(model).items()}
    model.to("cpu")
    assert {name: value.data_ptr() for name, value in _locals(model).items()} == before


def _move_away(param):
    """As a user does who assigns a state dict."""
    local = param.to_local().detach().clone()
    torch.utils.swap_tensors(param, nn.Parameter(DTensor(local, param._spec, requires_grad=False)))


def test_a_parameter_that_is_laid_out_again_keeps_what_belongs_to_it(fake_group):
    model = _sharded(fake_group(2))
    weight = model[0].inner.weight
    _move_away(weight)
    weight.requires_grad_(False)
    weight.grad, weight.note, value = torch.ones_like(weight), "a user's", weight.to_local().clone()
    assert not _lies_in_a_row(model)
    lay_out(model[0].__dict__[UNIT])
    assert _lies_in_a_row(model) and model[0].inner.weight is weight
    assert weight.note == "a user's" and not weight.requires_grad
    assert torch.equal(weight.grad.to_local(), torch.ones(4, 8)) and torch.equal(weight.to_local(), value)


def test_a_parameter_in_use_elsewhere_stays_where_it_is(fake_group):
    """Something holds a weak reference to it, as a compiled graph does: torch cannot exchange its memory."""
    model = _sharded(fake_group(2))
    weight = model[0].inner.weight
    _move_away(weight)
    value, held = weight.to_local().clone(), weakref.ref(weight)
    lay_out(model[0].__dict__[UNIT])
    assert not _lies_in_a_row(model) and torch.equal(held().to_local(), value)


def test_what_one_rank_holds_whole_has_no_place(fake_group):
    model = _sharded(fake_group(1))
    assert {slot.row_offset for _, slot in slots_of(model[0].inner)} == {-1}


def test_shards_that_are_kept_on_the_cpu_have_no_place(fake_group):
    """With CPUOffloadPolicy on a GPU; what is gathered is a copy of them."""
    model = fully_shard(nn.Linear(8, 8), mesh=fake_group(2))
    unit, slots = model.__dict__[UNIT], dict(slots_of(model)).values()
    assert [slot.row_offset for slot in slots] == [0, 32]
    for slot in slots:
        slot.row_offset = -1
    unit.settings.compute_device = torch.device("cuda")
    give_places(unit)
    assert [slot.row_offset for slot in slots] == [-1, -1]


def test_what_says_itself_how_it_is_gathered_takes_no_place(fake_group):
    """The others lie one after the other all the same."""
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(SaysHow(torch.ones(8, 8)))
    model.scale = nn.Parameter(torch.ones(8))
    fully_shard(model, mesh=fake_group(2))
    assert {name: slot.row_offset for name, slot in slots_of(model)} == {"weight": -1, "scale": 0, "bias": 4}


@NEEDS_MESH_PER_PARAMETER
def test_parameters_of_another_process_group_lie_in_a_row_of_their_own(fake_group):
    """Its ranks may hold shards of other sizes, such as fewer experts."""
    mesh = fake_group(4)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    model = nn.Linear(8, 16)
    own = ShardPlacementResult(Shard(0), FSDPMeshInfo(both["shard"], shard_mesh_dim=0))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: own if param.ndim == 2 else None)
    slots = dict(slots_of(model))
    assert {name: slot.row_offset for name, slot in slots.items()} == {"weight": 0, "bias": 0}
    weight, bias = _locals(model).values()
    assert not lie_in_a_row([weight, bias])


def test_units_of_two_models_lie_in_two_rows(fake_group):
    """The outermost unit of each is called root."""
    mesh = fake_group(2)
    student, teacher = (fully_shard(nn.Linear(8, 8), mesh=mesh) for _ in range(2))
    graphs = capture_graphs(lambda x: (student(x) - teacher(x)).square().sum(), torch.randn(2, 8))
    ctx = graphs.context.for_forward()
    places = row_places(graphs.forward, ctx)
    assert len(places) == 4 and len({place.row for place in places.values()}) == 2
    BucketCollectives().run(graphs.forward, ctx)
    assert not graphs.forward.graph.find_nodes(op="call_function", target=JOIN)
    assert len(graphs.forward.graph.find_nodes(op="call_function", target=PACK)) == 1


def test_what_is_saved_of_a_shard_is_the_shard_alone(fake_group):
    layers = [nn.Linear(64, 64) for _ in range(8)]
    model = fully_shard(nn.Sequential(*layers), mesh=fake_group(2))
    shards = {name: value.to_local() for name, value in model.state_dict().items()}
    num_bytes = sum(value.nbytes for value in shards.values())
    assert sum(value.untyped_storage().nbytes() for value in shards.values()) == num_bytes
    file = io.BytesIO()
    torch.save(shards, file)
    assert len(file.getvalue()) < 1.1 * num_bytes
    file.seek(0)
    for name, value in torch.load(file).items():
        assert torch.equal(value, shards[name])


def test_state_dicts_can_be_copied(fake_group):
    model = _sharded(fake_group(2))
    copied = copy.deepcopy(model.state_dict())
    for name, value in _locals(model).items():
        assert torch.equal(copied[name].to_local(), value)
        assert copied[name].to_local().data_ptr() != value.data_ptr()


def test_a_deleted_parameter_is_not_looked_for(fake_group):
    model = _sharded(fake_group(2))
    del model[0].inner.bias
    model.double()
    assert model[0].inner.weight.dtype == torch.float64


def test_fake_parameters_lie_nowhere(fake_group):
    mesh = fake_group(2)
    with FakeTensorMode():
        model = _sharded(mesh)
    assert {slot.row_offset for _, slot in slots_of(model[0].inner)} == {8, 40}


@pytest.mark.parametrize("mesh", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_an_inspected_model_has_the_places_of_a_sharded_one(fake_group, mesh):
    sharded = _sharded(fake_group(2))
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
        x = torch.zeros(3, 8)
    step = capture_step(
        model, (x,), rules=ShardingRules(mesh=mesh, units=["0", "1"]), loss=lambda output: output.sum()
    )
    offsets = {
        slot.name: slot.row_offset
        for owner in sharded.modules()
        for _, slot in slots_of(owner)
    }  # fmt: skip
    assert {binding.name: binding.row_offset for binding in step.context.parameters} == offsets
