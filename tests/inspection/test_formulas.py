"""Expressions of bytes agree with captures to the byte; what is solved is right at its boundary."""

import json
import sys
from fractions import Fraction

import pytest
import sympy
import torch
from support.cost_cards import round_card
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.capture import StepNumbers
from graphshard.cli.main import main
from graphshard.cost.links import GroupTopology, formula_seconds
from graphshard.errors import FormulaError, OptionError, UnsupportedShardingError
from graphshard.inspection.formulas.interpolation import GraphNumbers
from graphshard.inspection.formulas.links import Traffic, communication_lines, traffic_seconds
from graphshard.inspection.formulas.polynomials import Basis, expression, fit, undominated, value_at
from graphshard.inspection.formulas.sampling import Sampler
from graphshard.inspection.settings import read_settings
from graphshard.ir import graph_text
from graphshard.report import CATEGORIES
from graphshard.report.formulas import formulas_text, moments_of

pytestmark = pytest.mark.usefixtures("brief_plans")

CARD = round_card(memory_bytes=6 * 2**15)
OPTIONS = {
    "hardware": CARD,
    "units": ["first", "second"],
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Scores(nn.Module):
    """Quadratic in the sequence; numbers of rows that divide nothing."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 10)
        self.first, self.second = nn.Linear(10, 7), nn.Linear(7, 11)

    def forward(self, tokens):
        x = self.first(self.table(tokens))
        weights = torch.softmax(x @ x.transpose(1, 2), dim=-1)
        return self.second(torch.relu(weights @ x)).float().square().mean()


def inputs(batch, sequence):
    with torch.device("meta"):
        return Scores(), (torch.zeros(batch, sequence, dtype=torch.long),)


MESH = {"replicate": 2, "shard": 4}


@pytest.fixture(scope="module")
def found():
    return graphshard.formulas(*inputs(3, 12), dynamic={"batch": 0, "sequence": 1}, mesh=MESH, **OPTIONS)


@pytest.fixture(scope="module")
def captures():
    """Reports of captures at points that the expressions were not made from."""
    return {
        point: graphshard.inspect(*inputs(*point), mesh=mesh, **OPTIONS)
        for point, mesh in (((5, 17), {"replicate": 4, "shard": 6}), ((11, 9), {"replicate": 2, "shard": 32}))
    }


def test_bytes_agree_with_captures_at_other_points(found, captures):
    for (batch, sequence), report in captures.items():
        at = {"batch": batch, "sequence": sequence, **report.mesh}
        persistent = report.memory.persistent
        assert found.value(found.memory["parameters"], **at) == persistent["parameters"]
        assert found.value(found.memory["optimizer"], **at) == persistent["optimizer"]
        assert found.value(found.memory["inputs"], **at) == persistent["inputs"]
        in_optimizer = dict(zip(CATEGORIES, report.half("optimizer").peak.num_bytes, strict=True))
        assert found.value(found.memory["gradients"], **at) == in_optimizer["gradients"]
        end = dict(zip(CATEGORIES, report.half("forward").memory[-1].num_bytes, strict=True))
        assert found.value(found.memory["activations"], **at) == end["activations"]
        assert found.value(found.memory["gathered"], **at) == end["gathered"]
        for kind, one in found.traffic.items():
            sent = sum(each.num_bytes * each.count for each in report.collectives if each.kind == kind)
            assert found.value(one, **at) == sent > 0
    assert sympy.degree(found.memory["activations"], found.symbols["sequence"]) == 2


def test_the_reference_is_the_simulated_one(found):
    report = graphshard.inspect(*inputs(3, 12), mesh=MESH, **OPTIONS)
    assert found.value(found.peak) == report.memory.peak_bytes
    for half in report.halves:
        name = "optimizer" if half.name == "optimizer" else f"{half.name} compute"
        assert found.value(found.seconds[name]) == pytest.approx(half.compute_seconds, rel=1e-6)
        if half.collectives:
            queues = {}
            for one in half.collectives:
                queues[one.group] = queues.get(one.group, 0.0) + one.seconds
            talk = found.value(found.seconds[f"{half.name} communication"])
            assert talk == pytest.approx(max(queues.values()), rel=1e-6)
    assert found.value(found.seconds["step"]) <= report.step_seconds
    assert found.value(found.memory["largest unit"]) == 2 * max(10 * 7 + 7, 7 * 11 + 11, 13 * 10)


@pytest.mark.parametrize("mesh", [{"replicate": 3, "shard": 1}, {"replicate": 1, "shard": 3}], ids=str)
def test_nothing_is_sent_on_an_axis_of_one_rank(found, mesh):
    report = graphshard.inspect(*inputs(3, 12), mesh=mesh, **OPTIONS)
    for kind, one in found.traffic.items():
        sent = sum(each.num_bytes * each.count for each in report.collectives if each.kind == kind)
        assert found.value(one, **mesh) == sent


@pytest.mark.parametrize("mesh", [{"shard": 1}, {"replicate": 2, "shard": 1}], ids=str)
def test_a_reference_that_gathers_nothing_is_refused(mesh):
    with pytest.raises(OptionError, match=r"gather nothing.*; give a mesh with two shards at least"):
        graphshard.formulas(*inputs(3, 12), dynamic={"batch": 0}, mesh=mesh, **OPTIONS)


def test_gradients_of_micro_batches_are_added():
    options = OPTIONS | {"micro_batches": 3}
    several = graphshard.formulas(*inputs(3, 12), dynamic={"batch": 0}, mesh={"shard": 4}, **options)
    for shard in (4, 16):
        report = graphshard.inspect(*inputs(3, 12), mesh={"shard": shard}, **options)
        seconds = {name: several.value(one, shard=shard) for name, one in several.seconds.items()}
        added = report.half("backward").compute[-1]
        assert added.label == "accumulate gradients"
        assert seconds["accumulation"] == pytest.approx(added.seconds, rel=1e-6)
        halves = (max(seconds[f"{half} compute"], seconds[f"{half} communication"]) for half in ("forward", "backward"))
        expected = 3 * (sum(halves) + seconds["accumulation"]) + seconds["optimizer"]
        assert seconds["step"] == pytest.approx(expected)
    assert "Max(backward compute, backward communication) + accumulation)" in formulas_text(several)


class _OfBatch(nn.Module):
    """Takes its inputs in one dict."""

    def __init__(self):
        super().__init__()
        self.scores = Scores()

    def forward(self, batch):
        return self.scores(batch["tokens"])


def test_inputs_inside_of_containers(found):
    with torch.device("meta"):
        model, batch = _OfBatch(), {"tokens": torch.zeros(3, 12, dtype=torch.long)}
    units = {"units": ["scores.first", "scores.second"]}
    inside = graphshard.formulas(model, (batch,), dynamic={"batch": 0}, mesh=MESH, **(OPTIONS | units))
    for name, one in inside.memory.items():
        assert inside.value(one, batch=7) == found.value(found.memory[name], batch=7)
    report = graphshard.inspect(model, (batch,), mesh=MESH, **(OPTIONS | units))
    assert report.throughput.tokens == 3 * 12


def _fits(batch=3, sequence=12, mesh=MESH):
    return graphshard.inspect(*inputs(batch, sequence), mesh=mesh, **OPTIONS).memory.fits


def test_solutions_hold_at_their_boundary(found):
    batch, sequence = (found.solutions[f"largest {name} that fits"] for name in ("batch", "sequence"))
    assert _fits(batch=batch) and not _fits(batch=batch + 1)
    assert _fits(sequence=sequence) and not _fits(sequence=sequence + 1)


def test_the_smallest_mesh_that_fits():
    """More ranks can need more memory: 7 rows are 2 a rank on 4 ranks and on 5."""
    options = {"hardware": CARD, "units": ["first", "second"]}
    meshes = [{"shard": size} for size in range(2, 6)]
    swept = graphshard.sweep(lambda batch: (*inputs(batch, 12), {}), meshes=meshes, batches=[3], **options)
    peaks = {point.num_ranks: point.peak_bytes for point in swept.points}
    assert peaks[4] < peaks[5]
    for budget in (peaks[4], peaks[3]):
        solved = graphshard.formulas(
            *inputs(3, 12), dynamic={"batch": 0}, mesh={"shard": 4}, memory_budget=budget, **options
        )
        expected = next(size for size, peak in peaks.items() if peak <= budget)
        assert solved.solutions["smallest shard that fits"] == expected
        assert "replicate" not in solved.symbols and "all_reduce" not in solved.traffic


def test_where_communication_stops_hiding(found):
    """The first axis size at which a half talks longer than it computes, counted over all sizes."""
    answer = found.solutions["shard at which communication stops hiding"]
    for size in range(2, answer + 1):
        if size > 8 and size % 8:
            continue
        late = any(
            found.value(found.seconds[f"{half} communication"], shard=size)
            > found.value(found.seconds[f"{half} compute"])
            for half in ("forward", "backward")
        )
        assert late == (size == answer)


def test_text_and_data(found):
    text = formulas_text(found)
    assert text.startswith("reference: batch=3, sequence=12, replicate=2, shard=4\n")
    # Shards of 7, 11 and 13 rows, float32: weights and biases.
    assert "parameters = 44*ceiling(7/shard) + 32*ceiling(11/shard) + 40*ceiling(13/shard)" in text
    assert "inputs = 8*batch*sequence" in text
    assert text.count("checked to the byte against a capture") == len(found.checked) == 2
    assert found.checked[0] != found.checked[1]
    data = json.loads(json.dumps(found.to_dict()))
    again = sympy.sympify(data["memory"]["activations"], locals=found.symbols)
    assert again == found.memory["activations"]
    assert data["solutions"] == found.solutions


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_the_lines_of_communication_are_what_is_computed(kind):
    shard = sympy.Symbol("shard", integer=True, positive=True)
    one = Traffic(kind=kind, num_bytes=3 * 2**20 * shard, count=3, ranks=shard)
    near = {shard: sympy.Min(shard, 8)}
    _, formula, *ways, total = communication_lines({("forward", kind): one}, near, CARD)
    assert formula.startswith(f"{kind}(b, n, m) = ") and formula.endswith(" in one node, else the least of")
    assert total == f"forward communication = 3 * {kind}(3145728*shard/3, shard, Min(8, shard))"
    in_one = formula.removeprefix(f"{kind}(b, n, m) = ").removesuffix(" in one node, else the least of")
    for ranks in (4, 64):
        sizes = {"b": 2**20 * ranks, "n": ranks, "m": min(ranks, 8), "k": -(-ranks // 8)}
        texts = [in_one] if ranks <= 8 else [way[: way.rindex(" (")] for way in ways]
        shown = min(float(sympy.sympify(text).subs(sizes)) for text in texts)
        assert 3 * shown == pytest.approx(float(traffic_seconds(one, near[shard], CARD).subs(shard, ranks)), rel=2e-3)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 64, 1024])
@pytest.mark.parametrize("num_bytes", [10**3, 10**9])
@pytest.mark.parametrize("per_node", [1, 8])
def test_links_are_those_of_the_cost_model(kind, ranks, num_bytes, per_node):
    symbol = sympy.Symbol("shard", integer=True, positive=True)
    one = Traffic(kind=kind, num_bytes=sympy.Integer(3 * num_bytes), count=3, ranks=symbol)
    seconds = traffic_seconds(one, sympy.Min(symbol, per_node), CARD).subs(symbol, ranks)
    group = GroupTopology(num_ranks=ranks, ranks_per_node=min(ranks, per_node))
    assert float(seconds) == pytest.approx(3 * formula_seconds(kind, num_bytes, group, CARD), rel=1e-9)


class Longer(Scores):
    """Another graph for long sequences."""

    def forward(self, tokens):
        return super().forward(tokens) + (1.0 if tokens.shape[1] < 20 else self.table(tokens).float().sum())


class Cubic(Scores):
    def forward(self, tokens):
        n = tokens.shape[0]
        x = self.table(tokens)[:, 0].float()
        return super().forward(tokens) + (x.sum() * torch.ones(n, n, n)).exp().sum()


def test_a_graph_that_changes_is_refused():
    with torch.device("meta"):
        model = Longer()
    message = "the graph at sequence=36 is not the one at sequence=12: there are no expressions for both"
    with pytest.raises(FormulaError, match=message):
        graphshard.formulas(
            model, inputs(3, 12)[1], dynamic={"sequence": 1}, mesh={"shard": 2}, hardware=CARD
        )


class Coincides(nn.Module):
    """At 12 tokens the loop over their values is as long as that over `scale`, and both are one kernel."""

    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Embedding(16, 10), nn.Parameter(torch.ones(3 * 12 * 10))

    def forward(self, tokens):
        return self.table(tokens).exp().sum() + self.scale.exp().sum()


def test_kernels_that_a_size_merges_by_chance_are_taken_apart():
    """At 12 tokens two loops are one kernel; expressions take them as at other sizes."""
    with torch.device("meta"):
        model = Coincides()
    options = {"mesh": {"shard": 2}, "hardware": CARD}
    found = graphshard.formulas(model, inputs(3, 12)[1], dynamic={"sequence": 1}, **options)
    for tokens in (12, 17):
        report = graphshard.inspect(model, *inputs(3, tokens)[1:], **options)
        seconds = found.value(found.seconds["forward compute"], sequence=tokens)
        assert (seconds == pytest.approx(report.half("forward").compute_seconds, rel=1e-9)) == (tokens != 12)


def test_kernels_that_change_are_refused(monkeypatch):
    with torch.device("meta"):
        model = Coincides()
    monkeypatch.setattr("graphshard.inspection.formulas.fitting._CHECKS", (1, 1, 1))  # at 12 tokens itself
    message = "the merging of kernels at sequence=12 is not the one at sequence=36.*start from other sizes"
    with pytest.raises(FormulaError, match=message):
        graphshard.formulas(model, inputs(3, 12)[1], dynamic={"sequence": 1}, mesh={"shard": 2}, hardware=CARD)


def test_more_tokens_than_words():
    with torch.device("meta"):
        model = Scores()
        model.table = nn.Embedding(100, 10)
    found = graphshard.formulas(model, inputs(3, 16)[1], dynamic={"batch": 0}, mesh={"shard": 2}, hardware=CARD)
    assert 3 * 16 < 100 < min(point["batch"] * 16 for point in found.checked)


def test_what_is_no_polynomial_is_refused():
    with torch.device("meta"):
        model = Cubic()
    with pytest.raises(
        FormulaError, match=r"no polynomial of degree 2 in batch gives what captures need: \d+ of \d+"
    ):
        graphshard.formulas(model, inputs(3, 12)[1], dynamic={"batch": 0}, mesh={"shard": 2}, hardware=CARD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic": {}}, "dynamic: name dims of the inputs"),
        ({"dynamic": {"shard": 0}}, 'not "shard" or "replicate", which are mesh axes'),
        ({"dynamic": {"batch": 2}}, r"batch=2 is no dim of the inputs \(\[3, 12\]\)"),
        ({"dynamic": {"batch": -1}}, "batch=-1 is no dim of the inputs"),
        ({"plan": "auto"}, "formulas has no option plan; known: tables, mp_policy"),
    ],
    ids=str,
)
def test_options_that_cannot_be(changes, message):
    with pytest.raises(OptionError, match=message):
        graphshard.formulas(*inputs(3, 12), **({"dynamic": {"batch": 0}, "hardware": CARD} | changes))


def test_a_sharded_model_is_refused(fake_group):
    from support.small_models import MODELS, shard_units

    model = shard_units(MODELS["two_linears"](), fake_group(2))
    message = "has been through fully_shard, which fixed its mesh"
    with pytest.raises(UnsupportedShardingError, match=message):
        graphshard.formulas(model, [torch.ones(3, 4)], dynamic={"batch": 0}, hardware=CARD)
    with pytest.raises(UnsupportedShardingError, match=message):
        graphshard.sweep(
            lambda batch: (model, [torch.ones(batch, 4)], {}), meshes=[{"shard": 2}], batches=[3]
        )


def test_polynomials_are_exact():
    basis = Basis.of_degrees([1, 2], [[2, 4], [3, 6, 9]])
    truth = [Fraction(7), Fraction(0), Fraction(5, 2), Fraction(1), Fraction(-3), Fraction(10**15)]
    values = {point: [int(4 * value_at(basis, truth, point))] for point in basis.points}
    (coefficients,) = fit(basis, values)
    assert list(coefficients) == [4 * value for value in truth]
    x, y = sympy.symbols("x y")
    assert expression(basis, coefficients, (x, y)).subs({x: 3, y: 5}) == 4 * value_at(basis, truth, (3, 5))


def test_only_what_can_be_the_largest_is_kept():
    rows = [(Fraction(a), Fraction(b)) for a, b in ((1, 5), (2, 4), (1, 4), (2, 4), (0, 5))]
    assert undominated(rows) == [(2, 4), (1, 5)]
    x = sympy.Symbol("x", positive=True)
    assert moments_of(x + 1) == (x + 1,)


MODULE = """
import torch
from test_formulas import Scores

def make():
    with torch.device("meta"):
        return Scores(), (torch.zeros(3, 12, dtype=torch.long),)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "formula_factories.py").write_text(MODULE)
    CARD.save(tmp_path / "round.json")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("formula_factories", None)


def test_command(here, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    arguments = ["inspect", "formula_factories:make", "--hardware", "round.json", "--mesh", "shard=4"]
    assert main([*arguments, "--formulas", "batch=0", "--json", "out.json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("reference: batch=3, shard=4\n") and printed.out.endswith(
        "wrote out.json\n"
    )
    assert "largest batch that fits: " in printed.out
    assert "capture batch=9 (2 of 4, then the fit)\n" in printed.err and "find the smallest mesh\n" in printed.err
    assert "Piecewise" not in printed.out and "\n  all_gather(b, n, m) = " in printed.out
    assert json.loads((here / "out.json").read_text())["symbols"] == ["batch", "shard"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--formulas", "batch"], "--formulas batch: write NAME=DIM, as in --formulas batch=0,sequence=1"),
        (["--formulas", "batch=0", "--text", "x"], "--text: --formulas writes none; leave it out"),
        (["--formulas", "batch=0", "--plan", "auto"], "--plan auto: --formulas are those of --plan unit"),
        (["--formulas", "batch=4"], "dynamic: batch=4 is no dim of the inputs"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_status_2(here, capsys, arguments, complaint):
    assert (
        main(
            ["inspect", "formula_factories:make", "--hardware", "round.json", "--mesh", "shard=4", *arguments]
        )
        == 2
    )
    printed = capsys.readouterr()
    assert printed.out == "" and complaint in printed.err.splitlines()[-1]


class Residual(nn.Module):
    """Sums behind products, which are merged with them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return (x + self.second(torch.relu(x + self.first(x)))).square().mean()


def test_merged_sums_are_no_copies_around_collectives():
    """What is copied depends on the parameters alone; a sum would grow with the batch."""
    with torch.device("meta"):
        model, x = Residual(), torch.empty(64, 32)
    left_open = dict.fromkeys(("rules", "tables", "mp_policy", "reshard_after_forward", "memory_budget"))
    settings = read_settings(
        hardware="cpu-loopback", mesh={"shard": 4}, units=["first", "second"], optimizer="adamw", micro_batches=1,
        plan="unit", checkpoint=(), **left_open,
    )  # fmt: skip
    sampler = Sampler(
        module=model, args=(x,), kwargs={}, dynamic={"batch": 0}, sizes={"batch": 64}, loss=None, settings=settings,
        progress=lambda stage: None, known={},
    )  # fmt: skip
    small, large = (sampler.sample((batch,)) for batch in (64, 1024))
    assert small.copy_seconds == pytest.approx(large.copy_seconds, rel=1e-6)
    assert len(large.kernels[0]) > 0 and all(seconds >= 0 for seconds in small.copy_seconds)


class Masked(nn.Module):
    """A table of pairs of positions, and results of every position but the last."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 10), nn.Linear(10, 4)

    def forward(self, tokens):
        x = self.table(tokens)
        weights = torch.softmax(x @ x.transpose(1, 2), dim=-1)
        return self.head(weights @ x)[:, :-1].square().mean()


class Padded(Masked):
    """A size that is no product of functions of the dims."""

    def forward(self, tokens):
        more = -(-tokens.shape[1] // 7) * 7
        return super().forward(tokens) + self.table.weight.sum() * torch.ones(more).sum()


def _sampler(model, batch=3, sequence=12):
    left_open = dict.fromkeys(("rules", "tables", "mp_policy", "reshard_after_forward", "memory_budget"))
    settings = read_settings(
        hardware=CARD, mesh={"shard": 4}, units=["head"], optimizer="adamw", micro_batches=1, plan="unit",
        checkpoint=(), **left_open,
    )  # fmt: skip
    return Sampler(
        module=model, args=(torch.empty(batch, sequence, dtype=torch.long, device="meta"),), kwargs={},
        dynamic={"batch": 0, "sequence": 1}, sizes={"batch": batch, "sequence": sequence}, loss=None,
        settings=settings, progress=lambda stage: None, known={},
    )  # fmt: skip


def test_an_interpolated_step_is_the_captured_one():
    with torch.device("meta"):
        model = Masked()
    sampler, point = _sampler(model), (5, 21)
    sampler.interpolate([(3, 12), (9, 12), (3, 36)], [(18, 72)])
    assert sampler.graphs is not None
    made = sampler.step(point)
    assert point not in sampler.known and sampler.confirms(point)
    captured = sampler.captured(point)
    for half in ("forward", "backward"):
        assert graph_text(getattr(made, half)) == graph_text(getattr(captured, half))


def test_what_cannot_be_interpolated_is_captured():
    with torch.device("meta"):
        model = Padded()
    sampler = _sampler(model)
    sampler.interpolate([(3, 12), (9, 12), (3, 36)], [(18, 72)])
    assert sampler.graphs is None
    sampler.step((5, 21))
    assert (5, 21) in sampler.known


def test_a_prediction_that_a_capture_denies_ends_interpolation():
    with torch.device("meta"):
        model = Padded()
    sampler = _sampler(model)
    sampler.interpolate([(3, 12), (9, 12), (3, 36)], [])  # nothing checked
    assert sampler.graphs is not None and not sampler.confirms((3, 40))
    assert sampler.graphs is None and sampler.confirms((3, 41))


def test_numbers_that_begin_at_nothing_have_no_factor():
    found = {point: StepNumbers(structure="s", numbers=numbers, inputs=(), given="")
             for point, numbers in (((2,), (0, 4)), ((6,), (1, 12)))}  # fmt: skip
    assert GraphNumbers.through((2,), found) is None
    found[6,] = StepNumbers(structure="s", numbers=(0, 12), inputs=(), given="")
    assert GraphNumbers.through((2,), found).at((5,)) == [0, 10]
    assert GraphNumbers.through((2,), found | {(6,): None}) is None
