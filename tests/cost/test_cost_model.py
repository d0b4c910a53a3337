"""The cost model: where a price comes from, and what has none."""

import itertools
from dataclasses import replace

import pytest
from support.cost_cards import ROUND_CARD, round_card, with_rows
from support.small_graphs import GROUP, LOWERING, GraphBuilder, one_axis, two_axes
from support.small_models import MODELS
from support.torch_versions import NEEDS_MESSAGES

from graphshard.cost import CostModel, GroupTopology, compute_seconds, load_card, warn_of
from graphshard.cost.cards import LinkClass, MeasuredCollective
from graphshard.cost.links import formula_seconds
from graphshard.cost.prices import behind_wait
from graphshard.cost.tables import parse_tables
from graphshard.errors import GraphShardError, OptionError, OptionTypeError, UnknownGroupError
from graphshard.ir.bucket_ops import PACK
from graphshard.ir.collectives import ALL_GATHER, c10d, is_collective
from graphshard.passes import BucketCollectives, ScheduleCollectives
from graphshard.pipeline.pipeline import Pipeline

GROUPS = {
    "shard": GroupTopology(num_ranks=8, ranks_per_node=8),
    "one": GroupTopology(num_ranks=1, ranks_per_node=1),
}
MODEL = CostModel(card=ROUND_CARD, groups=GROUPS)
TABLES = parse_tables("group,op,bytes,seconds\nshard,all_gather,8,5\nshard,all_gather,64,6\n", where="t.csv")


def test_without_tables_the_card_answers():
    expected = formula_seconds("all_gather", 2**20, GROUPS["shard"], ROUND_CARD)
    assert MODEL.collective_seconds("all_gather", 2**20, "shard") == expected


def test_tables_come_first():
    model = CostModel(card=ROUND_CARD, tables=TABLES, groups=GROUPS)
    assert model.collective_seconds("all_gather", 8, "shard") == 5


def test_what_the_tables_lack_is_said_and_the_card_answers():
    model = CostModel(card=ROUND_CARD, tables=TABLES, groups=GROUPS)
    with pytest.warns(UserWarning, match=r"t\.csv has no all_reduce over shard nor over 8 ranks; .*'round'"):
        seconds = model.collective_seconds("all_reduce", 2**20, "shard")
    assert seconds == MODEL.collective_seconds("all_reduce", 2**20, "shard")


def test_one_rank_costs_nothing_and_warns_of_nothing():
    model = CostModel(card=ROUND_CARD, tables=TABLES, groups=GROUPS)
    assert model.collective_seconds("all_reduce", 2**20, "one") == 0.0


def test_a_card_with_measured_collectives_uses_them_for_their_ranks():
    rows = tuple(
        MeasuredCollective(op="all_gather", num_ranks=8, num_bytes=size, seconds=size * 1e-3)
        for size in (100, 200)
    )
    near = LinkClass(latency_seconds=1e-6, bandwidth=1e10, efficiency=1.0, measured=rows)
    two = GroupTopology(num_ranks=2, ranks_per_node=2)
    spread = GroupTopology(num_ranks=8, ranks_per_node=1)
    model = CostModel(card=round_card(intra_node=near), groups=GROUPS | {"two": two, "spread": spread})
    assert model.collective_seconds("all_gather", 200, "shard") == pytest.approx(0.2)
    for group, topology in (("two", two), ("spread", spread)):
        expected = formula_seconds("all_gather", 200, topology, model.card)
        assert model.collective_seconds("all_gather", 200, group) == expected
    assert model.collective_seconds("all_reduce", 200, "shard") < 1e-3


def test_an_unknown_group_names_the_known_ones():
    with pytest.raises(
        UnknownGroupError, match=r"the group 'tp', but one, shard: pass its topology"
    ) as error:
        MODEL.collective_seconds("all_gather", 8, "tp")
    assert isinstance(error.value, GraphShardError)
    assert isinstance(error.value, KeyError)
    with pytest.raises(UnknownGroupError, match="'tp', but none"):
        CostModel(card=ROUND_CARD).collective_seconds("all_gather", 8, "tp")


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(OptionError, match="no collective 'gather': it is one of all_gather, "):
        MODEL.collective_seconds("gather", 8, "shard")


@pytest.mark.parametrize(
    "asked", ["collective_seconds", "collective_ways", "overlapped_seconds", "core_seconds", "spread_seconds"]
)
def test_every_price_is_of_a_known_kind_and_of_bytes(asked):
    model = CostModel(card=round_card(overlapped_latency_seconds=1.0), groups=GROUPS)
    with pytest.raises(OptionError, match="no collective 'gather': it is one of all_gather, "):
        getattr(model, asked)("gather", 8, "shard")
    with pytest.raises(OptionError, match="all_gather of -8 bytes: give the bytes of its larger tensor, 0 or more"):
        getattr(model, asked)("all_gather", -8, "shard")


@pytest.mark.parametrize("value", [8, "8", None])
def test_groups_are_topologies(value):
    with pytest.raises(OptionTypeError, match=rf"groups\['g'\]={value!r}: give each a GroupTopology"):
        CostModel(card=ROUND_CARD, groups={"g": value} | GROUPS)


@NEEDS_MESSAGES
def test_a_message_between_two_ranks_has_no_price():
    build = GraphBuilder()
    node = build(c10d.isend.default, build.input("primals_1", 2), 1, 0, GROUP)
    with pytest.raises(OptionError, match=r"isend_default \(_c10d_functional.*\) starts no collective"):
        CostModel.of_mesh(ROUND_CARD, one_axis(8)).node_seconds(node)


def test_what_would_be_warned_of_can_be_collected_once_each():
    told = []
    model = CostModel(card=ROUND_CARD, tables=TABLES, groups=GROUPS, told=told)
    for _ in range(2):
        assert model.collective_seconds("all_gather", 128, "shard") > 6
        model.collective_seconds("all_reduce", 8, "shard")
    assert ["was measured from 8 B to 64 B; above it" in told[0], "has no all_reduce" in told[1]] == [True, True]
    assert len(told) == 2


def test_a_warning_names_three_cases_and_counts_the_others():
    warn_of([], stacklevel=1)
    with pytest.warns(UserWarning) as caught:
        warn_of(["a", "b", "a", "c", "d", "e"], stacklevel=1)
    assert [str(one.message) for one in caught] == ["a; b; c; and 2 more such cases"]
    assert caught[0].filename == __file__


def test_a_copy_reads_and_writes():
    assert MODEL.copy_seconds(10**6) == pytest.approx(2e6 / 1e11 + 1e-9)


def test_a_mesh_fills_the_nodes_of_the_card():
    model = CostModel.of_mesh(ROUND_CARD, two_axes(8, 8))
    assert model.topology("replicate") == GroupTopology(num_ranks=8, ranks_per_node=1)
    assert model.topology("shard") == model.topology(GROUP) == GroupTopology(num_ranks=8, ranks_per_node=8)


def test_a_node_is_priced_by_its_bytes_and_group():
    build = GraphBuilder()
    node = build(ALL_GATHER, build.input("primals_1", 2**20), 8, GROUP)
    model = CostModel.of_mesh(ROUND_CARD, one_axis(8))
    assert model.node_seconds(node) == model.collective_seconds("all_gather", 8 * 8 * 2**20, "shard")


def test_a_latency_passes_beside_the_collective_in_front_as_far_as_the_card_says():
    seconds = MODEL.collective_seconds("all_gather", 2**20, "shard")
    for latency, expected in ((0.0, 0.0), (seconds / 4, seconds / 4), (2 * seconds, seconds)):
        model = CostModel(card=round_card(overlapped_latency_seconds=latency), groups=GROUPS)
        assert model.overlapped_seconds("all_gather", 2**20, "shard") == expected
        assert model.overlapped_seconds("all_gather", 2**20, "one") == 0.0


def _measured_model(latency, *rows, tables=None):
    """A card with rows of gathers on two ranks: bytes, seconds, overlapped seconds."""
    link = with_rows(ROUND_CARD.intra_node, "all_gather", 2, *rows)
    card = round_card(intra_node=link, overlapped_latency_seconds=latency)
    groups = {"two": GroupTopology(num_ranks=2, ranks_per_node=2)}
    return CostModel(card=card, groups=groups, tables=tables)


def test_a_measured_collective_passes_beside_the_one_in_front_as_its_rows_say():
    model = _measured_model(0.5, (100, 1.0, 0.5), (200, 3.0, 1.0), (400, 6.0, None))
    assert model.overlapped_seconds("all_gather", 100, "two") == 0.5
    assert model.overlapped_seconds("all_gather", 200, "two") == 1.0
    # By its seconds: linear between rows, and in the last ratio behind them.
    between = model.collective_seconds("all_gather", 150, "two")
    assert model.overlapped_seconds("all_gather", 150, "two") == pytest.approx(0.5 + 0.25 * (between - 1.0))
    assert model.overlapped_seconds("all_gather", 400, "two") == pytest.approx(2.0)
    # Kinds without rows have the card's latency.
    assert model.overlapped_seconds("broadcast", 10**12, "two") == 0.5


def test_a_size_that_overlaps_by_nothing_counts():
    """Without its row, half of what twice the size overlaps."""
    model = _measured_model(0.5, (100, 1.0, 0.0), (200, 2.0, 1.0))
    assert model.overlapped_seconds("all_gather", 100, "two") == 0.0


def test_a_table_replaces_what_the_rows_of_a_card_overlap():
    tables = parse_tables("group,op,bytes,seconds\n2,all_gather,200,4.0\n", where="mine.csv")
    model = _measured_model(0.5, (200, 3.0, 1.0), tables=tables)
    assert model.overlapped_seconds("all_gather", 200, "two") == 0.5


def test_rows_without_overlaps_have_the_latency_of_the_card():
    model = _measured_model(0.5, (200, 3.0, None))
    assert model.overlapped_seconds("all_gather", 200, "two") == 0.5


def test_ends_are_spread_as_far_as_the_card_says():
    model = CostModel(card=round_card(collective_spread_seconds=0.5), groups=GROUPS)
    assert model.spread_seconds("all_gather", 2**20, "shard") == 0.5
    assert model.spread_seconds("all_gather", 2**20, "one") == 0.0
    assert MODEL.spread_seconds("all_gather", 2**20, "shard") == 0.0


@pytest.mark.parametrize("spread", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("ahead", [-3.0, -2.0, -0.25, -0.1, 0.0, 0.1, 0.25, 1.5, 2.0, 3.0])
def test_a_wait_is_as_long_as_it_is_on_average(ahead, spread):
    """Compute arrives at 7, the collective ends within ``spread`` of ``ahead`` later."""
    ends = [7.0 + ahead + spread * (2 * step + 1 - 10_000) / 10_000 for step in range(10_000)]
    expected = sum(max(7.0, end) for end in ends) / len(ends)
    assert behind_wait(7.0, 7.0 + ahead, spread) == pytest.approx(expected, abs=1e-7)


def test_a_wait_behind_later_clocks_is_never_over_sooner():
    clocks = [step / 8 for step in range(33)]
    rows = [[behind_wait(clock, finish, 1.5) for finish in clocks] for clock in clocks]
    for row in (*rows, *zip(*rows, strict=True)):
        assert all(before <= after for before, after in itertools.pairwise(row))
    for clock, row in zip(clocks, rows, strict=True):
        assert all(over >= max(clock, finish) for finish, over in zip(clocks, row, strict=True))


def test_a_core_that_computes_also_starts_and_moves():
    on_cpu = CostModel(
        card=round_card(device_type="cpu", comm_compute_seconds_per_byte=1e-12), groups=GROUPS
    )
    expected = on_cpu.card.collective_start_seconds + 2**20 * 1e-12
    assert on_cpu.core_seconds("all_gather", 2**20, "shard") == pytest.approx(expected)
    assert on_cpu.core_seconds("all_gather", 2**20, "one") == 0.0
    on_gpu = CostModel(card=replace(on_cpu.card, device_type="cuda"), groups=GROUPS)
    assert on_gpu.core_seconds("all_gather", 2**20, "shard") == 0.0


def test_compute_is_that_of_the_card():
    build = GraphBuilder()
    x = build.input("primals_1", 8, 8)
    gm = build.finish(build.gather(x, 8))
    assert MODEL.compute_seconds(gm) == compute_seconds(gm, ROUND_CARD)
    assert set(MODEL.compute_seconds(gm).values()) == {0.0}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_graphs_of_sharded_models_have_a_price_at_every_level(name, captured):
    """Collectives cost nothing as compute and something as communication; everything else the reverse."""
    graphs = captured(name, 4)
    model = CostModel.of_mesh(load_card("cpu-ethernet-1g"), graphs.context.mesh)
    for gm in (graphs.joint, graphs.forward, graphs.backward):
        seconds = model.compute_seconds(gm)
        assert sum(seconds.values()) > 0
        for node in filter(is_collective, gm.graph.nodes):
            assert seconds[node] == 0.0
            assert model.node_seconds(node) > model.card.collective_start_seconds
    context = graphs.context.for_forward()
    Pipeline(BucketCollectives(), ScheduleCollectives(), given=LOWERING.facts_at_end).run(
        graphs.forward, context
    )
    bucketed = model.compute_seconds(graphs.forward)
    packs = graphs.forward.graph.find_nodes(op="call_function", target=PACK)
    assert packs or name == "tied_embedding"  # which has one parameter to gather
    assert all(bucketed[node] > model.card.kernel_overhead_seconds for node in packs)
