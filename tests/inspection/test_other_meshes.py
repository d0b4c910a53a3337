"""What a report holds for a page that rescales it: the order of starts and waits, and prices apart."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cost_cards import round_card
from support.inspected import inspect_linears, inspect_llama, measured_card
from support.replayed import at_mesh, neutral, replay, with_links

from graphshard.cost import CostModel, GroupTopology, known_cards, load_card
from graphshard.cost.links import formula_seconds, formula_ways
from graphshard.cost.tables import parse_tables
from graphshard.inspection.other_meshes import worlds_of
from graphshard.ir.mesh import MeshAxis, MeshLayout

pytestmark = pytest.mark.usefixtures("brief_plans")

CARDS = {name: load_card(name) for name in known_cards()} | {"round": round_card()}
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


@pytest.fixture(scope="module")
def llama():
    return inspect_llama(micro_batches=2)


@given(
    kind=st.sampled_from(KINDS),
    num_bytes=st.integers(0, 2**33),
    nodes=st.integers(1, 40),
    per_node=st.integers(1, 8),
    card=st.sampled_from(sorted(CARDS)),
    bandwidth=st.floats(0.01, 100),
    latency=st.floats(0.001, 100),
)
def test_ways_price_other_links_as_the_formulas_do(kind, num_bytes, nodes, per_node, card, bandwidth, latency):
    group = GroupTopology(num_ranks=nodes * per_node, ranks_per_node=per_node)
    ways = formula_ways(kind, num_bytes, group, CARDS[card])
    start = CARDS[card].collective_start_seconds if group.num_ranks > 1 else 0.0
    quickest = min(max(latency * a + b / bandwidth for a, b in way) for way in ways)
    expected = formula_seconds(kind, num_bytes, group, with_links(CARDS[card], bandwidth, latency))
    assert start + quickest == pytest.approx(expected, rel=1e-9)


def test_ways_of_measured_times():
    rows = "op,bytes,seconds,group\nall_gather,1000,0.5,shard\nall_gather,2000,0.75,shard\n"
    groups = {"shard": GroupTopology(num_ranks=4, ranks_per_node=4)}
    model = CostModel(card=round_card(), tables=parse_tables(rows, where="rows"), groups=groups)
    assert model.collective_ways("all_gather", 2000, "shard") == (0.0, (((0.5, 0.25),),))
    assert model.collective_ways("all_gather", 10, "shard") == (0.0, (((0.5, 0.0),),))


@pytest.mark.parametrize(
    ("plan", "overlapped", "spread"),
    [
        pytest.param("unit", 0.0, 0.0, marks=pytest.mark.slow),
        pytest.param("unit", 5e-6, 0.0, marks=pytest.mark.slow),
        ("unit", 5e-6, 4e-5),
        pytest.param("auto", 0.0, 0.0, marks=pytest.mark.slow),
        pytest.param("auto", 5e-6, 0.0, marks=pytest.mark.slow),
        ("auto", 5e-6, 4e-5),
    ],
)
def test_the_schedule_gives_the_step_again(plan, overlapped, spread):
    card = round_card(overlapped_latency_seconds=overlapped, collective_spread_seconds=spread)
    report = inspect_llama(plan=plan, micro_batches=2, hardware=card, config={"num_layers": 1})
    step, exposed = replay(report, neutral(report))
    assert step == pytest.approx(report.step_seconds, rel=1e-12)
    assert exposed == pytest.approx(report.exposed_seconds, rel=1e-12) and exposed > 0
    for half in report.halves:
        assert sorted(one.collective for one in half.schedule) == sorted(2 * [*range(len(half.collectives))])
        assert all(a.busy_seconds <= b.busy_seconds for a, b in itertools.pairwise(half.schedule))


def test_a_step_is_shorter_where_latencies_pass_side_by_side(llama):
    report = inspect_llama(micro_batches=2, hardware=round_card(overlapped_latency_seconds=5e-6))
    assert report.step_seconds < llama.step_seconds
    flights = [one for half in report.halves for one in half.collectives]
    assert any(after.began < before.finished for before, after in itertools.pairwise(flights))
    assert neutral(report).prices[0].overlapped_seconds == 5e-6


@pytest.mark.parametrize("plan", ["unit", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_schedule_gives_the_step_again_where_transfers_overlap(llama, plan):
    report = inspect_llama(plan=plan, micro_batches=2, hardware=measured_card())
    step, exposed = replay(report, neutral(report))
    assert step == pytest.approx(report.step_seconds, rel=1e-12)
    assert exposed == pytest.approx(report.exposed_seconds, rel=1e-12) and exposed > 0
    flights = [one for half in report.halves for one in half.collectives]
    assert any(after.began < before.finished - 1.5e-6 for before, after in itertools.pairwise(flights))
    prices = neutral(report).prices
    assert {price.overlapped_latency_seconds for price in prices} == {1e-6}
    assert all(1e-6 <= price.overlapped_seconds <= 60e-6 for price in prices)
    assert max(price.overlapped_seconds for price in prices) > 5e-6


def test_the_schedule_gives_the_step_again_where_collectives_take_of_the_core():
    card = round_card(device_type="cpu", comm_compute_seconds_per_byte=5e-11, collective_start_seconds=1e-6)
    report = inspect_llama(micro_batches=2, hardware=card)
    step, exposed = replay(report, neutral(report))
    assert step == pytest.approx(report.step_seconds, rel=1e-12)
    assert exposed == pytest.approx(report.exposed_seconds, rel=1e-12) and exposed > 0


def test_a_step_is_longer_where_ends_are_spread(llama):
    report = inspect_llama(micro_batches=2, hardware=round_card(collective_spread_seconds=4e-5))
    assert report.step_seconds > llama.step_seconds
    assert neutral(report).prices[0].spread_seconds == 4e-5
    late = [one.collective for one in report.exposures if one.collective.cause == "spread"]
    assert late
    for one in late:
        assert one.finished <= one.needed < one.finished + 4e-5 and 0 < one.exposed_seconds <= 1e-5
        assert one.reason.startswith("on average it ends ") and one.remedy.startswith('plan="auto"')


@pytest.mark.parametrize(
    ("bandwidth", "latency"),
    [(0.25, 1.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1.0, 8.0), (50.0, 0.1)))],
)
def test_other_links_give_what_inspecting_with_them_gives(llama, bandwidth, latency):
    """The schedule of the passes does not depend on prices, so rescaling is exact."""
    again = inspect_llama(micro_batches=2, hardware=with_links(round_card(), bandwidth, latency))
    step, exposed = replay(llama, neutral(llama), bandwidth=bandwidth, latency=latency)
    assert step == pytest.approx(again.step_seconds, rel=1e-9)
    assert exposed == pytest.approx(again.exposed_seconds, rel=1e-9)
    assert step != pytest.approx(llama.step_seconds, rel=1e-3)


def test_other_meshes_come_close_to_inspecting_on_them():
    sizes = {"width": 512, "hidden": 1024, "vocabulary": 1024, "num_kv_heads": 4}
    report, again = (inspect_llama(mesh={"shard": size}, config=sizes) for size in (8, 32))
    world = at_mesh(report, {"shard": 32})
    step, _ = replay(report, world, shard_factor=8 / 32)
    assert step == pytest.approx(again.step_seconds, rel=0.02)
    assert abs(step / report.step_seconds - 1) > 0.1
    for name in ("parameters", "optimizer"):
        assert report.memory.persistent[name] * 8 == again.memory.persistent[name] * 32


def test_worlds_fill_nodes_and_have_a_price_for_everything(llama):
    assert [world.num_ranks for world in llama.worlds] == [2, 4, 8, 16, 32, 64, 128, 256]
    keys = {(one.kind, one.group, one.num_bytes) for half in llama.halves for one in half.collectives}
    for world in llama.worlds:
        assert {(one.kind, one.group, one.num_bytes) for one in world.prices} == keys
        assert math.prod(world.mesh.values()) == world.num_ranks
    hybrid = inspect_linears(mesh={"replicate": 3, "shard": 8})
    assert [world.mesh["replicate"] for world in hybrid.worlds] == [3, 6, 12, 24, 48, 96]
    assert {world.mesh["shard"] for world in hybrid.worlds} == {8}


@pytest.mark.parametrize("mesh", [{"shard": 1}, {"replicate": 1, "shard": 4}])
def test_one_rank_says_nothing_of_more(mesh):
    """Its graphs lack the collectives that more ranks of the outermost axis would need."""
    (world,) = inspect_linears(mesh=mesh).worlds
    assert world.mesh == mesh


def test_parts_of_an_axis_divide_it(llama):
    """Groups of 4 of the 16 ranks stay as they are; a second group over all 16 grows with them."""
    parts = [("shard", 16, ""), ("shard/4", 4, "shard"), ("shard/reduce", 16, "shard")]
    axes = tuple(MeshAxis(label=name, size=size, group_name=name, part_of=part) for name, size, part in parts)
    layout = MeshLayout(axes=axes)
    (half, *_) = llama.halves
    on = [replace(one, group=name) for one, (name, _, _) in zip(half.collectives, parts, strict=True)]
    prices = CostModel.of_mesh(round_card(), layout)
    worlds = worlds_of([replace(half, collectives=tuple(on))], prices, {"shard": 16}, layout)
    assert [world.num_ranks for world in worlds] == [8, 16, 32, 64, 128, 256, 512]
    seconds = [[min(map(sum, itertools.chain(*one.ways))) for one in world.prices] for world in worlds]
    whole, quarter, other = zip(*seconds, strict=True)
    assert len(set(whole)) == len(set(other)) == len(worlds) and len(set(quarter)) == 1


def test_a_graph_of_ones_own_has_one_world(llama):
    prices = CostModel(card=round_card(), groups={"shard": GroupTopology(num_ranks=4, ranks_per_node=4)})
    (world,) = worlds_of([llama.halves[0]], prices, {}, MeshLayout())
    assert world.mesh == {} and world.num_ranks == 4 and len(world.prices) == 2
