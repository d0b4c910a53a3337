"""Formulas of models with placements on a further axis of the mesh: what they give is what inspect counts elsewhere."""

import pytest
import sympy
import torch
from support.cost_cards import round_card
from torch import nn
from torch.distributed.tensor import Shard

import graphshard
from graphshard.cost.links import GroupTopology, formula_seconds
from graphshard.errors import OptionError
from graphshard.inspection.formulas.links import (
    Traffic,
    ranks_in_node,
    sizes_that_fill_nodes,
    traffic_seconds,
)
from graphshard.report import CATEGORIES
from graphshard.report.formulas import formulas_text

CARD = round_card(memory_bytes=2**20)
MESH = {"replicate": 2, "shard": 2, "tp": 2}
PLACEMENTS = {"table.weight": Shard(0), "up.*": Shard(0), "down.weight": Shard(1)}
OPTIONS = {"hardware": CARD, "units": ["up", "down"], "placements": PLACEMENTS}


class Mlp(nn.Module):
    """An embedding of an odd number of rows, and two layers, the first of which expands."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 10)
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, tokens):
        x = self.table(tokens)
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def inputs(batch, sequence):
    with torch.device("meta"):
        return Mlp(), (torch.zeros(batch, sequence, dtype=torch.long),)


@pytest.fixture(scope="module")
def found():
    return graphshard.formulas(*inputs(3, 12), dynamic={"batch": 0, "sequence": 1}, mesh=MESH, **OPTIONS)


@pytest.mark.parametrize(
    ("batch", "sequence", "mesh"),
    [
        (3, 12, MESH),
        (5, 17, {"replicate": 4, "shard": 6, "tp": 2}),
        (11, 9, {"replicate": 2, "shard": 16, "tp": 2}),
    ],
    ids=str,
)
def test_bytes_agree_with_captures_at_other_points(found, batch, sequence, mesh):
    report = graphshard.inspect(*inputs(batch, sequence), mesh=mesh, **OPTIONS)
    at = {"batch": batch, "sequence": sequence, "replicate": mesh["replicate"], "shard": mesh["shard"]}
    for name in ("parameters", "optimizer", "inputs"):
        assert found.value(found.memory[name], **at) == report.memory.persistent[name] > 0
    in_optimizer = dict(zip(CATEGORIES, report.half("optimizer").peak.num_bytes, strict=True))
    assert found.value(found.memory["gradients"], **at) == in_optimizer["gradients"]
    end = dict(zip(CATEGORIES, report.half("forward").memory[-1].num_bytes, strict=True))
    assert found.value(found.memory["activations"], **at) == end["activations"] > 0
    sent = {}
    for one in (one for half in report.halves for one in half.collectives):
        name = f"{one.kind} of reshards" if one.group == "tp" else one.kind
        sent[name] = sent.get(name, 0) + one.num_bytes
    assert {name: found.value(each, **at) for name, each in found.traffic.items()} == sent
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_reduce of reshards"} <= set(sent)


def test_the_reference_is_the_simulated_one(found):
    report = graphshard.inspect(*inputs(3, 12), mesh=MESH, **OPTIONS)
    assert found.value(found.peak) == report.memory.peak_bytes
    step = found.value(found.seconds["optimizer"])
    for half in report.halves[:2]:
        queues = {"tp": 0.0, "shard": 0.0, "replicate": 0.0}
        for one in half.collectives:
            queues[one.group] += one.seconds
        seconds = {
            name: found.value(found.seconds[f"{half.name} {name}"]) for name in ("compute", "communication", "reshards")
        }
        assert seconds["compute"] == pytest.approx(half.compute_seconds, rel=1e-6)
        assert seconds["reshards"] == pytest.approx(queues.pop("tp"), rel=1e-6) and seconds["reshards"] > 0
        assert seconds["communication"] == pytest.approx(max(queues.values()), rel=1e-6)
        step += max(seconds["compute"] + seconds["reshards"], seconds["communication"])
    assert found.value(found.seconds["step"]) == pytest.approx(step)


def test_the_axis_stays_as_it_is(found):
    text = formulas_text(found)
    assert text.startswith("reference: batch=3, sequence=12, replicate=2, shard=2, tp=2\n")
    assert "Max(forward compute + forward reshards, forward communication)" in text and "forward reshards = " in text
    assert "tp=2 stays as it is" in text and set(found.symbols) == {"batch", "sequence", "replicate", "shard"}
    assert found.memory["parameters"].free_symbols == {found.symbols["shard"]}
    with pytest.raises(OptionError, match="tp: the expressions have no such symbol, but batch, sequence"):
        found.value(found.peak, tp=4)
    with pytest.raises(OptionError, match=r'dynamic: name dims .* and not "shard" or "replicate" or "tp"'):
        graphshard.formulas(*inputs(3, 12), dynamic={"tp": 0}, mesh=MESH, **OPTIONS)


def test_solutions_hold_at_their_boundary(found):
    batch = found.solutions["largest batch that fits"]
    fits = [
        graphshard.inspect(*inputs(each, 12), mesh=MESH, **OPTIONS).memory.fits for each in (batch, batch + 1)
    ]
    assert fits == [True, False]


def test_placements_chosen_at_the_reference():
    options = {**OPTIONS, "placements": "auto"}
    chosen = graphshard.formulas(*inputs(3, 12), dynamic={"batch": 0}, mesh={"shard": 2, "tp": 2}, **options)
    assert "Placements chosen at the reference: " in chosen.notes[-1]


def test_groups_around_a_further_axis():
    """Neighbours along shard are as many ranks apart as the further axis has; meshes fill nodes."""
    shard, copies = sympy.Symbol("shard", positive=True), sympy.Symbol("replicate", positive=True)
    near = ranks_in_node({"shard": shard, "replicate": copies}, CARD, 4)
    assert near[shard].subs({shard: 16}) == 2 and near[copies].subs({shard: 2, copies: 4}) == 1
    assert near[sympy.Integer(4)] == 4
    assert sizes_that_fill_nodes(8, 9, 4) == [2, 4, 6, 8] and sizes_that_fill_nodes(8, 17) == [*range(2, 9), 16]
    for ranks, in_node in ((4, 4), (16, 8)):
        traffic = Traffic(kind="all_to_all", num_bytes=sympy.Integer(3 * 2**20), count=3, ranks=sympy.Integer(ranks))
        group = GroupTopology(num_ranks=ranks, ranks_per_node=in_node)
        expected = 3 * formula_seconds("all_to_all", 2**20, group, CARD)
        assert float(traffic_seconds(traffic, sympy.Integer(in_node), CARD)) == pytest.approx(expected)
