"""inspect and sweep with placements on a further axis of the mesh: what a rank holds and sends, and what is refused."""

import io
import json
from collections import Counter
from dataclasses import replace

import jsonschema
import pytest
from rich.console import Console
from support.inspected import CARD, TINY, inspect_linears
from support.llama_example import llama_model
from support.small_models import MODELS, example_batch
from torch.distributed.tensor import Replicate, Shard

import graphshard
from graphshard.errors import OptionTypeError, ShardingError
from graphshard.report import Report, print_summary, report_schema
from graphshard.report.html import html_page
from graphshard.report.text import report_text

pytestmark = pytest.mark.usefixtures("brief_plans")

MESH = {"shard": 2, "tp": 2}


def inspect_llama(placements, mesh=MESH, **options) -> Report:
    config = replace(TINY, **options.pop("config", {}))
    model, args, kwargs = llama_model.on_meta(config, 2, 16)
    given = {"mesh": mesh, "hardware": CARD, "units": ["layers.*"], "placements": placements}
    return graphshard.inspect(model, args, kwargs, **(given | options))


@pytest.fixture(scope="module")
def llama() -> Report:
    return inspect_llama("llama")


def test_a_rank_holds_pieces(llama):
    without = inspect_llama(None, {"shard": 2})
    plain = without.memory.persistent
    config, norms = TINY, 5 * 64 * 4 // 2  # bytes of the shards of the five norms, which are whole on the axis
    assert llama.memory.persistent["parameters"] - norms == (plain["parameters"] - norms) // 2
    assert llama.num_ranks == 4 and llama.num_batches == 2
    rows = {one.name: (one.count, one.placement, one.shape, one.piece) for one in llama.placements}
    width, hidden = config.width, config.hidden
    assert rows["layers.*.feed_forward.down.weight"] == (2, "Shard(1)", (width, hidden), (width, hidden // 2))
    assert rows["layers.*.attention_norm.weight"] == (2, "Replicate", (width,), (width,))
    whole = {unit.name: unit.full_bytes for unit in without.model.units}
    unit = next(unit for unit in llama.model.units if unit.name == "layers.0")
    assert unit.full_bytes - 2 * 64 * 4 == (whole["layers.0"] - 2 * 64 * 4) // 2


def test_ranks_of_the_axis_share_their_tokens(llama):
    through = llama.throughput
    assert through.tokens == 2 * 16 and llama.num_batches == 2
    assert through.tokens_per_second == pytest.approx(2 * 2 * 16 / llama.step_seconds)
    assert through.tokens_per_second_per_rank == pytest.approx(through.tokens_per_second / llama.num_ranks)


def test_reshards_are_counted_with_their_cost(llama):
    value = 2 * 16 * TINY.width * 4
    sums = Counter()
    for one in llama.reshards:
        if one.num_bytes == value:
            assert one.reshard == "Partial(sum) -> Replicate" and one.kind == "all_reduce" and one.group == "tp"
            sums[one.half] += one.count
            assert one.seconds > 0
    assert sums == {"forward": 1 + 2 * TINY.num_layers, "backward": 1 + 2 * TINY.num_layers}
    assert any(one.module == "layers.*.feed_forward" for one in llama.reshards)
    exposed = sum(
        one.exposed_seconds for half in llama.halves for one in half.collectives if one.group == "tp"
    )
    assert sum(one.exposed_seconds for one in llama.reshards) == pytest.approx(exposed)
    assert all(one.reshard == "" for half in llama.halves for one in half.collectives if one.group == "shard")


def test_every_rendering_has_them(llama):
    jsonschema.validate(json.loads(json.dumps(llama.to_dict())), report_schema())
    text = report_text(llama)
    assert "# placed: 2 layers.*.attention.output.weight [64x64] Shard(1), a rank has [64x32]" in text
    assert "# reshard: forward Partial(sum) -> Replicate in layers.* over tp as all_reduce, 8192 bytes: 4 of" in text
    assert "Partial(sum) -> Replicate, shape=[2, 16, 64], axis=tp=2, sends=8192 bytes, placed)" in text
    page = html_page(llama)
    assert "Placements on tp=2" in page and "<code>layers.*.attention.output.weight</code>" in page
    assert "Partial(sum) -&gt; Replicate" in page
    console = Console(width=200, file=io.StringIO())
    print_summary(llama, console)
    assert "Reshards over tp of a step: " in console.file.getvalue()


@pytest.mark.parametrize("plan", [pytest.param("unit", marks=pytest.mark.slow), "auto"])
def test_along_the_sequence(plan):
    """The same bytes of the axis in smaller steps, and smaller activations; planned by cost or not."""
    report = inspect_llama("llama-sequence", plan=plan, config={"num_layers": 1})
    moves = {(one.half, one.reshard) for one in report.reshards if one.num_bytes == 2 * 16 * 64 * 4}
    both = ("Partial(sum) -> Shard(1)", "Shard(1) -> Replicate")
    assert moves == {(half, move) for half in ("forward", "backward") for move in both}


def test_one_sequence_sends_no_more_than_two_halves():
    """A product of one sequence could read it cut along its tokens, and would give terms that cost more to sum."""
    sent = []
    for batch, length in ((1, 512), (2, 256)):
        config = replace(TINY, num_layers=1, width=512, hidden=1536, num_heads=8, num_kv_heads=8)
        model, args, kwargs = llama_model.on_meta(config, batch, length)
        options = {"mesh": {"shard": 2, "tp": 8}, "hardware": CARD, "units": ["layers.*"]}
        report = graphshard.inspect(model, args, kwargs, placements="llama-sequence", **options)
        moved = Counter()
        for one in report.reshards:
            moved[one.half] += one.count * one.num_bytes * (2 if one.kind == "all_reduce" else 1)
        sent.append(moved)
    assert sent[0] == sent[1]


def test_placements_by_name_copies_and_an_axis_of_one_rank():
    by_name = {"first.weight": Shard(0), "first.bias": Shard(0), "second.weight": Shard(1)}
    report = inspect_linears(mesh={"replicate": 2, "shard": 2, "tp": 2}, placements=by_name)
    rows = {one.name: (one.placement, one.piece) for one in report.placements}
    assert rows["first.weight"] == ("Shard(0)", (3, 4)) and rows["second.weight"] == ("Shard(1)", (3, 3))  # of 5
    assert rows["second.bias"] == ("Replicate", (3,)) and report.num_batches == 4 and report.num_ranks == 8
    assert report.settings["placements"][0] == "first.weight: Shard(dim=0)"
    one_rank = inspect_linears(mesh={"shard": 2, "tp": 1}, placements=by_name)
    alone = inspect_linears(mesh={"shard": 2})
    assert one_rank.step_seconds == alone.step_seconds and one_rank.memory == alone.memory
    assert not one_rank.placements and not one_rank.reshards and one_rank.num_ranks == 2


def test_a_sweep_over_sizes_of_the_axis():
    """Meshes of one size of the axis share a capture; points are those of inspections."""
    def make(batch):
        return MODELS["two_linears"](), [example_batch("two_linears")[:1].expand(batch, -1).contiguous()], {}

    def loss(output):
        return output.square().mean()

    by_name = {"first.*": Shard(0), "second.weight": Shard(1)}
    options = {"hardware": CARD, "units": ["first", "second"], "placements": by_name}
    meshes = [{"shard": 2, "tp": 2}, {"shard": 4, "tp": 2}, {"shard": 2, "tp": 4}]
    found = graphshard.sweep(make, meshes=meshes, batches=[2], loss=loss, **options)
    assert found.num_captures == 2
    for mesh, point in zip(meshes, found.points, strict=True):
        model, args, kwargs = make(2)
        report = graphshard.inspect(model, args, kwargs, mesh=mesh, loss=loss, **options)
        assert point.step_seconds == pytest.approx(report.step_seconds) and point.num_ranks == report.num_ranks
        assert point.peak_bytes == report.memory.peak_bytes


def test_mistakes_are_refused():
    with pytest.raises(ShardingError, match="placements: the mesh shard=8 has no axis for them; add one behind shard"):
        inspect_linears(mesh={"shard": 8}, placements="llama")
    with pytest.raises(ShardingError, match=r"mesh axis tp has no placements: say how.*plans are llama, gpt"):
        inspect_linears(mesh={"shard": 2, "tp": 2})
    with pytest.raises(ShardingError, match=r"mesh axes tp, shard: write shard=N.*one further axis behind them"):
        inspect_linears(mesh={"tp": 2, "shard": 2}, placements="llama")
    with pytest.raises(ShardingError, match=r"mesh axes shard, tp, ep: .*one axis of all ranks that share"):
        inspect_linears(mesh={"shard": 2, "tp": 2, "ep": 2}, placements="llama")
    with pytest.raises(ShardingError, match="no ready plan 'lama'; there are llama"):
        inspect_linears(mesh=MESH, placements="lama")
    with pytest.raises(ShardingError, match="'llama' does not fit"):
        inspect_linears(mesh=MESH, placements="llama")
    with pytest.raises(ShardingError, match=r"'third.weight' matches no parameter"):
        inspect_linears(mesh=MESH, placements={"third.weight": Shard(0), "first.weight": Replicate()})
    with pytest.raises(OptionTypeError, match="placements=3 must be the name of a ready plan"):
        inspect_linears(mesh=MESH, placements=3)
    with pytest.raises(ShardingError, match="placements: the mesh shard=64 has no axis for them"):
        graphshard.formulas(MODELS["two_linears"](), [], dynamic={"batch": 0}, placements="llama")
