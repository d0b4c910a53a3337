"""Mesh words agree with torch's meshes: row-major ranks, labels for groups."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from graphshard.ir.mesh import MeshAxis, MeshLayout, axis_of

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def _layout(sizes):
    axes = (MeshAxis(label=f"axis{i}", size=size, group_name=f"g{i}") for i, size in enumerate(sizes))
    return MeshLayout(axes=tuple(axes))


@given(sizes=SIZES)
def test_peers_are_the_lines_of_a_row_major_grid(sizes):
    layout = _layout(sizes)
    ranks = torch.arange(layout.num_ranks).view(sizes)
    for dim, axis in enumerate(layout.axes):
        for line in ranks.movedim(dim, -1).reshape(-1, sizes[dim]).tolist():
            assert all(layout.peers(rank, axis) == line for rank in line)


@pytest.mark.parametrize("rank", range(6))
def test_peers_are_the_ranks_of_the_torch_group(fake_group, rank):
    fake_group(6, rank)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    axes = [axis_of(mesh, dim) for dim in range(2)]
    layout = MeshLayout(axes=tuple(axes))
    assert [axis.label for axis in axes] == ["replicate", "shard"]
    assert [axis.size for axis in axes] == [2, 3]
    for dim, axis in enumerate(axes):
        assert axis.group_name == mesh.get_group(dim).group_name
        assert layout.peers(rank, axis) == dist.get_process_group_ranks(mesh.get_group(dim))


@pytest.mark.parametrize("sizes", [(2, 4), (1, 4), (3, 2)])
@pytest.mark.parametrize("is_hybrid", [True, False])
def test_a_part_groups_neighbours_and_adds_no_ranks(sizes, is_hybrid):
    """Two at a time, as the rows of the ranks of the shard axis."""
    num_replicas, num_shards = sizes if is_hybrid else (1, sizes[1])
    num_ranks = num_replicas * num_shards
    shard = MeshAxis(label="shard", size=num_shards, group_name="g1")
    replicate = MeshAxis(label="replicate", size=num_replicas, group_name="g0")
    pairs = MeshAxis(label="shard/2", size=2, group_name="g2", part_of="shard")
    layout = MeshLayout(axes=(replicate, shard, pairs) if is_hybrid else (shard, pairs))
    assert layout.num_ranks == num_ranks and layout.find("g2") is pairs
    rows = torch.arange(num_ranks).view(-1, 2).tolist()
    for rank in range(num_ranks):
        assert layout.peers(rank, pairs) == next(row for row in rows if rank in row)
        assert layout.peers(rank, shard) == list(range(rank - rank % num_shards, num_ranks))[:num_shards]


def test_a_mesh_without_names_gets_the_default_label(fake_group):
    assert axis_of(fake_group(4)).label == "shard"
    assert axis_of(fake_group(4), default_label="data").label == "data"


@given(sizes=SIZES)
def test_num_ranks_is_the_product(sizes):
    assert _layout(sizes).num_ranks == torch.Size(sizes).numel()


def test_an_empty_mesh_has_one_rank():
    assert MeshLayout().num_ranks == 1


def test_axes_are_found_by_group():
    layout = _layout([2, 3])
    assert layout.find("g1") is layout.axes[1]
    assert layout.find("g2") is None


def test_repeated_axes_count_once_in_order_of_appearance():
    first, second = _layout([2, 3]).axes
    assert MeshLayout.of_axes([second, first, second]).axes == (second, first)
