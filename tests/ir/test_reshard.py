"""The op `reshard` without ranks: types, text, bytes, refusals. Its values are tested on real ranks."""

import pytest
import torch
import torch.distributed as dist
from support.small_graphs import GraphBuilder, reshard, tensor_axis
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from graphshard.errors import UnsupportedShardingError
from graphshard.ir import RESHARD, ReshardCall, bytes_sent, graph_text, local_shape, placement_text


def _call(src, dst, shape=(4, 6), num_ranks=2, rank=0):
    group = dist.group.WORLD.group_name if dist.is_initialized() else "tensor_group"
    return ReshardCall(None, src, dst, shape, "tp", num_ranks, group, rank)


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("Shard(0)", "Replicate", (4, 6)),
        ("Shard(1)", "Replicate", (4, 5)),
        ("Shard(0)", "Shard(1)", (5, 3)),
        ("Replicate", "Shard(1)", (5, 3)),
        ("Partial(sum)", "Shard(0)", (5, 3)),
        ("Partial(sum)", "Replicate", (5, 3)),
        ("Replicate", "Partial(sum)", (5, 3)),
        ("Shard(1)", "Partial(sum)", (5, 3)),
        ("Replicate", "Replicate", (5, 3)),
    ],
)
def test_opcheck(fake_group, src, dst, shape):
    fake_group(2)
    value = torch.randn(local_shape(shape, src, 2, 0), requires_grad=True)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(RESHARD, tuple(_call(src, dst, shape)._replace(value=value)), test_utils=checks)


def test_text_shows_placements_axis_and_bytes():
    build = GraphBuilder()
    gm = build.finish(reshard(build, build.input("primals_1", 2, 8), "Shard(0)", "Replicate", [4, 8]))
    line = graph_text(gm, mesh=tensor_axis(2)).splitlines()[1]
    assert line == (
        "%reshard_0: f64[4, 8] = reshard(%primals_1, Shard(0) -> Replicate, shape=[4, 8], axis=tp=2, sends=128 bytes)"
    )


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("Shard(0)", "Replicate", 3 * 2 * 6 * 4),  # a padded piece to three others
        ("Shard(0)", "Shard(1)", 3 * 2 * 2 * 4),
        ("Partial(sum)", "Shard(0)", 3 * 2 * 6 * 4),
        ("Partial(sum)", "Replicate", 2 * 3 * 33),
        ("Partial(max)", "Shard(0)", 2 * 3 * 33),  # an all-reduce and a slice
        ("Replicate", "Shard(0)", 0),
        ("Replicate", "Partial(sum)", 0),
        ("Shard(0)", "Partial(sum)", 0),
        ("Partial(sum)", "Partial(sum)", 0),
    ],
)
def test_bytes_that_a_rank_sends(src, dst, expected):
    shape = (5, 6)
    if expected == 2 * 3 * 33:
        shape = (11, 3)  # 132 bytes over four ranks
    assert bytes_sent(_call(src, dst, shape, num_ranks=4), torch.float32) == expected


def test_local_shape_is_that_of_chunk():
    shapes = [local_shape([5, 3], "Shard(0)", 4, rank) for rank in range(4)]
    assert shapes == [[2, 3], [2, 3], [1, 3], [0, 3]]
    assert local_shape([5, 3], "Partial(sum)", 4, 1) == [5, 3]


@pytest.mark.parametrize(
    ("src", "dst", "remedy"),
    [
        ("Partial(sum)", "Partial(avg)", "reduce to Replicate first"),
        ("Shard(0)", "Partial(max)", "gather to Replicate first"),
        ("Replicate", "Partial(product)", "no reshard from Replicate"),
    ],
)
def test_refuses_other_terms(src, dst, remedy):
    call = _call(src, dst)
    value = torch.ones(local_shape(call.shape, src, 2, 0))
    with pytest.raises(UnsupportedShardingError, match=remedy):
        RESHARD(*call._replace(value=value))


def test_placements_as_text():
    assert [placement_text(each) for each in (Replicate(), Shard(1), Partial(), Partial("max"))] == [
        "Replicate", "Shard(1)", "Partial(sum)", "Partial(max)",
    ]  # fmt: skip
    with pytest.raises(UnsupportedShardingError, match="no reshard knows the placement"):
        placement_text(_StridedShard(0, split_factor=2))
