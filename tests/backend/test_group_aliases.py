"""Names of process groups in what Inductor gets: equal on all ranks, and resolved to the groups of this rank."""

import pytest
import torch
import torch.distributed as dist
from support.small_models import MODELS, example_batch, shard_units
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from graphshard._compat import group_by_name
from graphshard._compat_groups import register_group_name
from graphshard.backend.inductor.group_aliases import name_groups_by_axis, named
from graphshard.errors import AgreementError
from graphshard.ir import MeshLayout, axis_of, group_name, is_collective


def sums_over(*names: str, is_by_name: bool = False) -> fx.GraphModule:
    """A graph with an all-reduce over each of some groups."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in names:
        all_reduce = torch.ops._c10d_functional.all_reduce.default
        if is_by_name:
            value = graph.call_function(all_reduce, (value, "sum"), {"group_name": name})
        else:
            value = graph.call_function(all_reduce, (value, "sum", name))
        value = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (value,))
    graph.output(value)
    return fx.GraphModule({}, graph)


def names_in(gm: fx.GraphModule) -> list[str]:
    return [group_name(node) for node in gm.graph.nodes if is_collective(node)]


def test_ranks_of_two_axes_get_equal_names(fake_group):
    found = []
    for rank in (0, 3):
        fake_group(4, rank)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        layout = MeshLayout(axes=(axis_of(mesh, 0), axis_of(mesh, 1)))
        own = [axis.group_name for axis in layout.axes]
        gm = sums_over(*own, own[0])
        name_groups_by_axis(gm, layout)
        names = names_in(gm)
        assert [group_by_name(name) for name in names] == [group_by_name(name) for name in (*own, own[0])]
        found.append((own, names))
    (first_own, first), (last_own, last) = found
    assert first == last == ["graphshard.replicate.0", "graphshard.shard.0", "graphshard.replicate.0"]
    assert first_own != last_own


def test_two_groups_of_one_label_have_two_names_that_stay(fake_group):
    fake_group(4)
    one, other = (dist.new_group().group_name for _ in range(2))
    for names in ([one, other], [other, one]):
        gm = sums_over(*names, is_by_name=True)
        name_groups_by_axis(gm, MeshLayout())
        assert [group_by_name(name) for name in names_in(gm)] == [group_by_name(name) for name in names]
    later = sums_over(one)
    name_groups_by_axis(later, MeshLayout())
    name_groups_by_axis(later, MeshLayout())  # what has a second name keeps it
    assert names_in(later) == ["graphshard.group0.0"]


def test_a_group_that_is_gone_leaves_its_name_to_no_other(fake_group):
    fake_group(4)
    first = sums_over(dist.new_group().group_name)
    name_groups_by_axis(first, MeshLayout())
    dist.destroy_process_group(group_by_name(names_in(first)[0]))
    second = sums_over(dist.new_group().group_name)
    name_groups_by_axis(second, MeshLayout())
    assert names_in(first) != names_in(second)


def test_code_runs_on_groups_that_were_made_anew(fake_group, interpreted):
    """Dynamo compiles nothing for a model like one before, on a group of the same name."""
    torch.compiler.reset()
    for _ in range(2):
        model = shard_units(MODELS["two_linears"](), fake_group(2))
        compiled = torch.compile(model, backend="graphshard", options={"hardware": None})
        compiled(example_batch("two_linears")).sum().backward()
    assert model.first.weight.grad is not None
    torch.compiler.reset()


def test_code_does_not_run_on_another_group_that_has_the_name(fake_group):
    """Its collectives would be those of other ranks."""
    fake_group(4)
    name = dist.new_group().group_name
    gm = sums_over(name)
    ran = []
    run = named(ran.append, name_groups_by_axis(gm, MeshLayout()))
    run([])
    fake_group(4)
    assert dist.new_group().group_name == name
    run([])
    fake_group(4)
    other = dist.new_group()
    register_group_name("graphshard.group0.0", dist.group.WORLD)
    with pytest.raises(AgreementError, match=r"groups that are gone, .*torch\.compiler\.reset"):
        run([])
    assert len(ran) == 2 and other.group_name == name
