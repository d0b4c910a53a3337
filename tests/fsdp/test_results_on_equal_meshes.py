"""DTensor's cache of results while models are sharded: kept on equal meshes of the same groups, dropped on others."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import graphshard


def num_new_results(mesh: DeviceMesh) -> int:
    """How many results DTensor works out while a model is sharded and its weight is written to."""
    propagator = type(DTensor._op_dispatcher.sharding_propagator)
    work_out = propagator.propagate_op_sharding_non_cached
    with patch.object(propagator, work_out.__name__, autospec=True, side_effect=work_out) as called:
        model = graphshard.fully_shard(nn.Linear(3, 4, bias=False), mesh=mesh)
        model.weight.detach().add_(1)
    return called.call_count


def test_the_same_groups_keep_results(fake_group):
    fake_group(2)
    assert num_new_results(init_device_mesh("cpu", (2,))) > 0
    assert num_new_results(init_device_mesh("cpu", (2,))) == 0


def test_units_of_one_model_keep_results(fake_group):
    mesh = fake_group(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    with patch("graphshard._compat_dtensor._clear_sharding_prop_cache") as clear:
        for unit in (*model, model):
            graphshard.fully_shard(unit, mesh=mesh)
    assert clear.call_count == 1


@pytest.mark.parametrize("num_groups", [1, 2])
def test_other_groups_drop_results(fake_group, num_groups):
    """A mesh that goes back to earlier groups is another one, too."""
    fake_group(2)
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(num_groups)), dist.group.WORLD]
    assert all(num_new_results(DeviceMesh.from_group(group, "cpu")) > 0 for group in groups)


def test_groups_of_one_rank_do_not_count(fake_group):
    fake_group(2)
    ranks, names = [[0], [1]], ("replicate", "shard")
    found = [
        num_new_results(
            DeviceMesh.from_group([dist.group.WORLD, dist.new_group([0])], "cpu", mesh=ranks, mesh_dim_names=names)
        )
        for _ in range(2)
    ]
    assert found[0] > 0
    assert found[1] == 0
