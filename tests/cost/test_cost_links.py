"""Times of collectives: formulas counted by hand, topologies of meshes, what must hold for every card."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cost_cards import ROUND_CARD, round_card
from support.small_graphs import GROUP, GraphBuilder

from graphshard.cost import GroupTopology, known_cards, layout_topologies, load_card, mesh_topologies
from graphshard.cost.cards import COLLECTIVE_KINDS, LinkClass, Protocol
from graphshard.cost.links import KIND_OF, collective_bytes, collective_kind, formula_seconds, formula_ways
from graphshard.errors import ShardingError
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, REDUCE_SCATTER, c10d
from graphshard.ir.mesh import MeshAxis, MeshLayout

ONE_NODE = GroupTopology(num_ranks=8, ranks_per_node=8)
FOUR_NODES = GroupTopology(num_ranks=4, ranks_per_node=1)
BOTH = GroupTopology(num_ranks=64, ranks_per_node=8)
MIB = 2**20
START = ROUND_CARD.collective_start_seconds


def _seconds(kind, num_bytes, group, card=ROUND_CARD):
    return formula_seconds(kind, num_bytes, group, card) - START


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_ring_inside_a_node(kind):
    num_bytes = 8 * MIB
    assert _seconds(kind, num_bytes, ONE_NODE) == pytest.approx(7e-6 + num_bytes * 7 / 8 / 1e10)


def test_an_all_reduce_is_two_halves_and_counts_its_bytes_once():
    """256 MiB over 8 ranks at 10 GB/s: 2 * 7/8 * 256 MiB moved, not twice that."""
    num_bytes = 256 * MIB
    seconds = _seconds("all_reduce", num_bytes, ONE_NODE)
    assert seconds == pytest.approx(14e-6 + 2 * 7 / 8 * num_bytes / 1e10)
    assert seconds == pytest.approx(2 * _seconds("all_gather", num_bytes, ONE_NODE))


def test_halving_across_nodes_needs_few_hops():
    assert _seconds("all_gather", 4096, FOUR_NODES) == pytest.approx(2e-5 + 4096 * 3 / 4 / 1e9)


def test_a_small_all_reduce_takes_the_tree_and_a_large_one_the_ring():
    group = GroupTopology(num_ranks=64, ranks_per_node=8)
    tree = 2 * (7e-6 + 3e-5)
    assert _seconds("all_reduce", 8, group) == pytest.approx(tree, rel=1e-3)
    large = 2**30
    assert _seconds("all_reduce", large, group) < tree + 2 * large / 8e9


def test_a_ring_over_nodes_uses_all_their_network_cards():
    """8 cards of 1 GB/s each: 8 GB/s, less than the 10 inside."""
    num_bytes = 2**33
    seconds = _seconds("all_gather", num_bytes, BOTH)
    assert seconds == pytest.approx(num_bytes * 63 / 64 / 8e9, rel=1e-3)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_two_stages_over_nodes_of_several_ranks(kind):
    """Across 8 nodes on an eighth of the bytes in 3 hops, then inside a node in 7."""
    num_bytes = 10**5
    across = 3e-5 + num_bytes / 8 * 7 / 8 / 1e9
    assert _seconds(kind, num_bytes, BOTH) == pytest.approx(across + 7e-6 + num_bytes * 7 / 8 / 1e10)


def test_stages_beat_the_ring_where_hops_cost_more_than_bytes():
    card = round_card(intra_node=LinkClass(latency_seconds=1e-5, bandwidth=1e10, efficiency=1.0))
    ring = 7 * 1e-5 + 56 * 1e-5
    assert _seconds("all_gather", 64, BOTH, card) == pytest.approx(3e-5 + 7e-5, rel=1e-3)
    assert _seconds("all_gather", 64, BOTH, card) < ring / 5


def test_all_to_all_is_bound_by_what_leaves_the_node():
    num_bytes = 64 * MIB
    assert _seconds("all_to_all", num_bytes, BOTH) == pytest.approx(56e-5 + num_bytes * 56 / 64 / 1e9)
    assert _seconds("all_to_all", num_bytes, ONE_NODE) == pytest.approx(7e-6 + num_bytes * 7 / 8 / 1e10)


def test_a_broadcast_is_a_chain_or_a_tree():
    assert _seconds("broadcast", 2**30, ONE_NODE) == pytest.approx(7e-6 + 2**30 / 1e10)
    assert _seconds("broadcast", 8, ONE_NODE) == pytest.approx(3e-6, rel=1e-2)


def test_a_low_latency_protocol_serves_small_messages_only():
    fast = Protocol(name="ll", latency_seconds=1e-7, bandwidth_fraction=0.5)
    near = LinkClass(latency_seconds=1e-6, bandwidth=1e10, efficiency=1.0, protocols=(fast,))
    far = LinkClass(latency_seconds=1e-5, bandwidth=1e9, efficiency=1.0, protocols=(fast,))
    card = round_card(intra_node=near, inter_node=far)
    assert _seconds("all_gather", 8, ONE_NODE, card) == pytest.approx(7e-7, rel=1e-2)
    large = 2**30
    assert _seconds("all_gather", large, ONE_NODE, card) == _seconds("all_gather", large, ONE_NODE)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_one_rank_communicates_nothing(kind):
    assert formula_seconds(kind, MIB, GroupTopology(num_ranks=1, ranks_per_node=1), ROUND_CARD) == 0.0


GROUPS = st.builds(
    lambda near, nodes: GroupTopology(num_ranks=near * nodes, ranks_per_node=near),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 32),
).filter(lambda group: group.num_ranks > 1)


@given(
    kind=st.sampled_from(COLLECTIVE_KINDS),
    name=st.sampled_from(known_cards()),
    group=GROUPS,
    sizes=st.tuples(st.integers(1, 2**34), st.integers(1, 2**34)),
)
def test_more_bytes_never_take_less_time(kind, name, group, sizes):
    card = load_card(name)
    less, more = (formula_seconds(kind, size, group, card) for size in sorted(sizes))
    assert 0 < less <= more


@given(
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "broadcast"]),
    name=st.sampled_from(known_cards()),
    group=GROUPS,
    num_bytes=st.integers(1, 2**34),
)
def test_no_link_is_faster_than_its_peak(kind, name, group, num_bytes):
    """Each rank receives at least (n - 1) / n of the bytes: over its own link, or those of its node."""
    card = load_card(name)
    times = 2 if kind == "all_reduce" else 1
    inside, between = card.intra_node.bandwidth, card.inter_node.bandwidth * group.ranks_per_node
    fastest = (
        inside if group.num_nodes == 1 else between if group.ranks_per_node == 1 else min(inside, between)
    )
    floor = times * num_bytes * (group.num_ranks - 1) / group.num_ranks / fastest
    hierarchical_floor = times * num_bytes * (group.num_nodes - 1) / group.num_nodes / between
    seconds = formula_seconds(kind, num_bytes, group, card)
    assert seconds >= max(hierarchical_floor, floor if group.num_nodes == 1 else 0.0)


def test_256_mib_over_a_node_of_h100():
    """nccl-tests shows a bus bandwidth of about 360 GB/s for gathers: 0.65 ms; twice that to all-reduce."""
    card = load_card("h100-sxm")
    gather, reduce = (
        formula_seconds(kind, 256 * MIB, ONE_NODE, card) for kind in ("all_gather", "all_reduce")
    )
    assert 256 * MIB * 7 / 8 / gather == pytest.approx(340e9, rel=0.1)
    assert 1.8 < reduce / gather < 2.1


# topologies ------------------------------------------------------------------------------------


def _shape(group):
    return group.num_ranks, group.ranks_per_node, group.num_nodes


def _lies(num_ranks, most, num_nodes, fewest):
    return GroupTopology(num_ranks=num_ranks, ranks_per_node=most, num_nodes=num_nodes, fewest_per_node=fewest)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"shard": 9}, {"shard": _lies(9, 8, 2, 1)}),
        ({"shard": 12}, {"shard": _lies(12, 8, 2, 4)}),
        ({"shard": 17}, {"shard": _lies(17, 8, 3, 1)}),
        ({"a": 6, "b": 6}, {"a": _lies(6, 2, 5, 1), "b": _lies(6, 4, 2, 2)}),
        ({"a": 4, "b": 3}, {"a": _lies(4, 3, 2, 1), "b": _lies(3, 2, 2, 1)}),
        ({"a": 5, "b": 3}, {"a": _lies(5, 3, 2, 2), "b": _lies(3, 2, 2, 1)}),
    ],
    ids=str,
)
def test_sizes_that_do_not_fill_nodes(mesh, expected):
    assert mesh_topologies(mesh, 8) == expected


@pytest.mark.parametrize("num_ranks", [1, 7, 8, 9, 12, 16, 17, 20])
def test_ranks_side_by_side_lie_as_those_of_a_mesh_of_one_axis(num_ranks):
    alone = GroupTopology(num_ranks=num_ranks, ranks_per_node=min(num_ranks, 8))
    assert alone == mesh_topologies({"shard": num_ranks}, 8)["shard"]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "broadcast"])
def test_the_node_with_the_fewest_ranks_limits_what_goes_around(kind):
    """8 ranks on one node and 1 on the other, which has one card of 1 GB/s."""
    num_bytes = 2**33
    moved = num_bytes if kind == "broadcast" else num_bytes * 8 / 9
    assert _seconds(kind, num_bytes, _lies(9, 8, 2, 1)) == pytest.approx(moved / 1e9, rel=1e-3)


def test_the_rank_that_is_alone_sends_to_all_others_through_its_card():
    num_bytes = 2**33
    expected = 8e-5 + num_bytes * 8 / 9 / 1e9
    assert _seconds("all_to_all", num_bytes, _lies(9, 8, 2, 1)) == pytest.approx(expected)


@given(
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    num_ranks=st.integers(9, 64),
    num_bytes=st.integers(2**24, 2**32),
)
def test_a_node_that_is_not_full_makes_nothing_faster(kind, num_ranks, num_bytes):
    """Than full nodes, whose groups move as many bytes a rank."""
    part = mesh_topologies({"shard": num_ranks}, 8)["shard"]
    full = GroupTopology(num_ranks=8 * part.num_nodes, ranks_per_node=8)
    share = (num_ranks - 1) / num_ranks * full.num_ranks / (full.num_ranks - 1)
    floor = 2**24 / 1e10  # latencies of more hops
    assert _seconds(kind, num_bytes, part) >= 0.99 * _seconds(kind, int(num_bytes * share), full) - floor


@pytest.mark.parametrize(("near", "nodes", "fewest"), [(8, 3, 4), (8, 2, 5), (4, 2, 4), (6, 2, 7)])
def test_nodes_that_cannot_hold_a_group(near, nodes, fewest):
    message = f"a group of 12 ranks cannot lie on {nodes} nodes with {fewest} to {near} of them on each"
    with pytest.raises(ShardingError, match=message):
        _lies(12, near, nodes, fewest)


@pytest.mark.parametrize(
    ("mesh", "per_node", "complaint"),
    [
        ({"a": 4, "shard": 0}, 8, "axis 'shard' is 0"),
        ({"a": -4, "shard": 2.5}, 8, "axis 'a' is -4, axis 'shard' is 2.5"),
        ({"a": 4}, 0, "ranks_per_node is 0"),
        ({"a": True}, 8, "axis 'a' is True"),
    ],
)
def test_a_mesh_that_cannot_be(mesh, per_node, complaint):
    with pytest.raises(ShardingError, match=f"at least one rank on each axis and in each node, but {complaint}$"):
        mesh_topologies(mesh, per_node)


@pytest.mark.parametrize(("protocol_of", "group"), [("intra_node", ONE_NODE), ("inter_node", FOUR_NODES)])
def test_a_protocol_of_the_only_link_a_group_uses_counts(protocol_of, group):
    """Also where the other link has none of that name; over both links both must have it."""
    fast = Protocol(name="ll", latency_seconds=1e-8, bandwidth_fraction=0.5)
    card = round_card(**{protocol_of: replace(getattr(ROUND_CARD, protocol_of), protocols=(fast,))})
    num_hops = 7 if group is ONE_NODE else 2
    assert _seconds("all_gather", 1, group, card) == pytest.approx(num_hops * 1e-8, rel=0.1)
    assert formula_ways("all_gather", 1, group, card) != formula_ways("all_gather", 1, group, ROUND_CARD)
    assert _seconds("all_gather", 1, BOTH, card) == _seconds("all_gather", 1, BOTH)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"shard": 64}, {"shard": (64, 8, 8)}),
        ({"shard": 8}, {"shard": (8, 8, 1)}),
        ({"replicate": 8, "shard": 8}, {"replicate": (8, 1, 8), "shard": (8, 8, 1)}),
        ({"replicate": 2, "shard": 4}, {"replicate": (2, 2, 1), "shard": (4, 4, 1)}),
        ({"replicate": 2, "shard": 32}, {"replicate": (2, 1, 2), "shard": (32, 8, 4)}),
        ({"shard": 16, "tp": 4}, {"shard": (16, 2, 8), "tp": (4, 4, 1)}),
        (
            {"replicate": 2, "shard": 8, "tp": 4},
            {"replicate": (2, 1, 2), "shard": (8, 2, 4), "tp": (4, 4, 1)},
        ),
        ({"shard": 12}, {"shard": (12, 8, 2)}),
        ({"replicate": 4, "shard": 3}, {"replicate": (4, 3, 2), "shard": (3, 2, 2)}),
    ],
    ids=str,
)
def test_topology_of_a_mesh(mesh, expected):
    assert {name: _shape(group) for name, group in mesh_topologies(mesh, 8).items()} == expected


def test_one_rank_a_node_is_all_network():
    assert _shape(mesh_topologies({"shard": 4}, 1)["shard"]) == (4, 1, 4)


def test_a_layout_is_known_by_labels_and_group_names_and_parts_are_neighbours():
    shard = MeshAxis(label="shard", size=16, group_name="g0")
    half = MeshAxis(label="shard/8", size=8, group_name="g1", part_of="shard")
    found = layout_topologies(MeshLayout(axes=(shard, half)), 8)
    assert found["shard"] == found["g0"] == GroupTopology(num_ranks=16, ranks_per_node=8)
    assert found["shard/8"] == found["g1"] == GroupTopology(num_ranks=8, ranks_per_node=8)


@pytest.mark.parametrize(("ranks", "near"), [(0, 0), (4, 0), (4, 5)])
def test_a_topology_that_cannot_be(ranks, near):
    with pytest.raises(ShardingError, match=rf"a group of {ranks} ranks cannot have {near} of them"):
        GroupTopology(num_ranks=ranks, ranks_per_node=near)


# nodes -------------------------------------------------------------------------------------------


def test_bytes_of_a_collective_are_those_of_its_larger_side():
    build = GraphBuilder()
    part, whole = build.input("primals_1", 4), build.input("primals_2", 8)
    nodes = {
        "all_gather": build(ALL_GATHER, part, 2, GROUP),
        "reduce_scatter": build(REDUCE_SCATTER, whole, "sum", 2, GROUP),
        "all_reduce": build(ALL_REDUCE, whole, "sum", GROUP),
        "all_to_all": build(ALL_TO_ALL, whole, [4, 4], [4, 4], GROUP),
        "broadcast": build(c10d.broadcast.default, whole, 0, GROUP),
    }
    assert {kind: collective_kind(node) for kind, node in nodes.items()} == {kind: kind for kind in nodes}
    assert {collective_bytes(node) for node in nodes.values()} == {8 * 8}
    several = build(c10d.all_gather_into_tensor_coalesced.default, [part, part], 2, GROUP)
    assert (collective_kind(several), collective_bytes(several)) == ("all_gather", 2 * 8 * 8)


def test_every_collective_has_a_kind():
    assert set(KIND_OF) == COLLECTIVES
    assert set(KIND_OF.values()) == set(COLLECTIVE_KINDS)
