"""Which units keep their parameters between micro-batches."""

import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch
from support.small_models import WithHead
from support.trials import CARD, in_capture

import graphshard
import graphshard.backend.step_planner as planning
from graphshard.backend.accumulation import _Accumulation, accumulation_cost, choose_kept_between
from graphshard.backend.step_choice import StepChoice
from graphshard.backend.step_trials import JointTrials
from graphshard.errors import InfeasibleBudgetError
from graphshard.ir import UNIT
from graphshard.ir.rewrite import copy_graph
from graphshard.memory import ScratchTable
from graphshard.passes import LowerShards, PlanCollectives
from graphshard.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("brief_plans", "interpreted")

UNITS = ("blocks.0", "blocks.1", "blocks.2", "root")
FEW_UNITS = ("blocks.0", "root")
NONE_KEPT = StepChoice(kept=())


def _chosen(budget, waiting=UNITS, **options):
    return in_capture(lambda trials: choose_kept_between(trials, NONE_KEPT, waiting, budget), **options)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (200_000, 0),
        pytest.param(220_000, 1, marks=pytest.mark.slow),
        (230_000, 2),
        pytest.param(252_000, 3, marks=pytest.mark.slow),
        (2**30, 4),
    ],
)
def test_as_many_are_kept_as_fit(budget, kept):
    assert _chosen(budget) == UNITS[len(UNITS) - kept :]


def test_only_units_whose_gradients_wait_are_kept():
    assert _chosen(2**30, ["blocks.1", "no unit"]) == ("blocks.1",)


def test_what_the_user_decided_stays():
    assert _chosen(2**30, reshard=True) == ()


def _costs(trials, budget):
    forward, backward = trials.cut(NONE_KEPT)
    accumulation = _Accumulation(
        trials=trials, forward=forward, backward=backward, waiting=frozenset(UNITS), budget_bytes=budget
    )
    return [accumulation.cost(UNITS[:count]) for count in (0, 2, 4)]


def test_a_unit_that_keeps_its_parameters_gathers_no_more():
    none, some, every = in_capture(lambda trials: _costs(trials, 2**30))
    assert every.seconds < some.seconds < none.seconds


def test_gradients_that_wait_count():
    """Those of all parameters, in full; that they are not reduced saves a little."""
    params = sum(param.numel() for param in WithHead().parameters())

    def ask(trials):
        forward, backward = trials.cut(NONE_KEPT)
        peaks = []
        for waiting in (frozenset(), frozenset(UNITS)):
            accumulation = _Accumulation(
                trials=trials, forward=forward, backward=backward, waiting=waiting, budget_bytes=2**30
            )
            peaks.append(accumulation.cost(()).peak_bytes)
        return peaks

    without, peak = in_capture(ask)
    assert peak - without >= 0.9 * 4 * params


def test_a_half_gets_what_is_not_held_beside_it(monkeypatch):
    held, real = [], JointTrials.plan

    def plan(self, half, ctx, memory_budget):
        assert memory_budget == 2**30
        held.append(ctx.held_bytes)
        planned = real(self, half, ctx, memory_budget)
        return replace(planned, plan=replace(planned.plan, peak_bytes=1000))

    monkeypatch.setattr(JointTrials, "plan", plan)
    costs = in_capture(lambda trials: _costs(trials, 2**30))
    last, first, forward, backward = (held[index::4] for index in range(4))
    waiting = 4 * sum(param.numel() for param in WithHead().parameters())
    assert [cost.peak_bytes - 1000 for cost in costs] == [
        max(each) for each in zip(forward, backward, strict=True)
    ]
    assert last == first == [0] * 3 and forward == [waiting] * 3
    biases = 4 * 64  # of a block; the backward reads its weight alone
    assert [each - waiting for each in backward] == [0, 2 * biases, 3 * biases + 4 * (8 * 64 + 64 + 8)]


def test_the_choice_says_so():
    choice = StepChoice(kept=("root",), kept_between=("blocks.2", "root"))
    assert "units that keep their parameters between micro-batches: blocks.2, root" in str(choice)
    assert "between" not in str(NONE_KEPT)
    assert StepChoice.from_dict(choice.to_dict()) == choice


@pytest.mark.parametrize(("budget", "kept"), [("1GB", FEW_UNITS), (None, ())])
def test_it_takes_a_budget(budget, kept):
    """Without one no unit beside the default ones is kept for the backward, either."""

    def ask(trials):
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")
        return [
            planner.choose(copy_graph(trials.gm), trials.context, trials.tag, budget, waiting).choice
            for waiting in ((), FEW_UNITS)
        ]

    without, waiting = in_capture(ask, num_blocks=1)
    assert (without.kept_between, waiting.kept_between) == ((), kept)
    assert len(without.kept) > 1
    assert (waiting.kept == ("root",)) == (budget is None)
    assert (waiting.peak_bytes or 0) == (without.peak_bytes or 0)


@pytest.mark.slow
def test_with_gradients_that_wait_the_budget_is_one_of_all_micro_batches():
    """What a step of one micro-batch fits in is refused at once, and the error names what all fit in."""

    def ask(trials):
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")

        def choose(budget, waiting):
            return planner.choose(copy_graph(trials.gm), trials.context, trials.tag, budget, waiting).choice

        with pytest.raises(InfeasibleBudgetError) as alone:
            choose(1000, ())
        smallest = alone.value.smallest_bytes
        choose(smallest, ())
        with pytest.raises(InfeasibleBudgetError) as refused:
            choose(smallest, UNITS)
        enough = refused.value.smallest_bytes
        choice = choose(enough, UNITS)
        assert accumulation_cost(trials, choice, UNITS, enough).peak_bytes <= enough
        return enough - smallest

    waiting = 4 * sum(param.numel() for param in WithHead().parameters())
    assert in_capture(ask) > waiting / 2


def test_a_stored_choice_holds_whether_gradients_wait_or_not(monkeypatch):
    """A rank may compile alone later, in the other state."""
    keys, kept = [], []

    def ask(trials):
        decided = StepChoice(
            kept=("root",), kept_between=("root",), input_bytes=trials.input_bytes()
        ).to_dict()
        stored = {"decided": decided, "scratch": ScratchTable().as_data()}
        follow = lambda _, key, run, **named: keys.append(key) or run(stored).result  # noqa: E731
        monkeypatch.setattr(planning, "decide_together", follow)
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")
        for waiting in ((), ("root",)):
            kept_units = planner.choose(copy_graph(trials.gm), trials.context, trials.tag, "1GB", waiting)
            kept.append(kept_units.choice.kept_between)

    in_capture(ask)
    assert keys[0] == keys[1] and kept == [("root",), ("root",)]


def test_where_nothing_fits_nothing_is_kept():
    def ask(trials):
        with pytest.raises(InfeasibleBudgetError):
            _costs(trials, 1000)
        return choose_kept_between(trials, NONE_KEPT, FEW_UNITS, 1000)

    assert in_capture(ask, num_blocks=1) == ()


@pytest.mark.parametrize(
    ("syncs", "breaks", "verify", "is_chosen"),
    [
        (False, False, "cheap", True),
        (True, False, "cheap", False),
        (False, True, "cheap", False),
        (False, False, "off", False),
    ],
    ids=["accumulates", "reduces at once", "a part of the step", "ranks that do not meet"],
)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's, at the break
def test_units_know_what_was_chosen_for_them(fake_group, syncs, breaks, verify, is_chosen):
    torch.compiler.reset()
    model, mesh = WithHead(num_blocks=1, breaks=breaks), fake_group(2)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)
    units = [module.__dict__[UNIT] for module in (*model.blocks, model)]
    units[0].keeps_between = True  # of another graph
    options = {"hardware": CARD, "bucket": "auto", "memory_budget": "1GB", "verify": verify}
    compiled = torch.compile(model, backend="graphshard", options=options)
    model.set_requires_gradient_sync(syncs)
    compiled(torch.zeros(64, 8)).backward()
    assert [unit.keeps_between for unit in units] == [is_chosen] * 2
    assert [unit.is_gathered for unit in units] == [is_chosen] * 2
    model.set_requires_gradient_sync(True)
    compiled(torch.zeros(64, 8)).backward()
    assert not any(unit.is_gathered for unit in units)


class _Unused(WithHead):
    """A block, or a parameter of the root or of a block, that no forward reads."""

    def __init__(self, owner, num_read=2):
        super().__init__(num_blocks=num_read + (owner == "unit"))
        self.num_read = num_read
        self.skips = owner == "unit"
        if owner != "unit":
            module = self if owner == "root" else self.blocks[1]
            module.unused = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks[: self.num_read]:
            x = torch.relu(block(x))
        return self.head(x).square().mean()


@pytest.mark.parametrize(
    ("owner", "is_whole"),
    [("root", True), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("block", True), ("unit", False)))],
)
def test_a_parameter_that_nothing_reads_is_no_other_graph(fake_group, tmp_path, owner, is_whole):
    """A unit that nothing reads may be another graph's: nothing stays gathered beside it."""
    torch.compiler.reset()
    model, mesh = _Unused(owner), fake_group(2)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)
    options = {"hardware": CARD, "bucket": "auto", "memory_budget": "1GB", "dump": tmp_path}
    compiled = torch.compile(model, backend="graphshard", options=options)
    model.set_requires_gradient_sync(False)
    compiled(torch.zeros(64, 8)).backward()
    assert [block.__dict__[UNIT].is_gathered for block in model.blocks[:2]] == [is_whole] * 2


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["root", "unit"])
def test_gradients_that_wait_count_whatever_is_not_read(fake_group, owner):
    """A budget that a step of one micro-batch keeps, and none whose gradients wait, is refused before the first."""
    torch.compiler.reset()
    model, mesh = _Unused(owner, num_read=3), fake_group(2)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)
    options = {"hardware": CARD, "bucket": "auto", "memory_budget": 160_000}
    compiled = torch.compile(model, backend="graphshard", options=options)
    model.set_requires_gradient_sync(False)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no schedule keeps a memory budget"):
        compiled(torch.zeros(64, 8))
    torch.compiler.reset()
    model.set_requires_gradient_sync(True)
    torch.compile(model, backend="graphshard", options=options)(torch.zeros(64, 8)).backward()


@pytest.mark.parametrize("budget", [400_000, None])
def test_halves_are_planned_beside_what_waits(fake_group, tmp_path, monkeypatch, budget):
    """The first micro-batch holds nothing, those behind it the gradients of all before, and the last takes them.

    The halves that have the same collectives do not take each other's plans.
    """
    keys, decide = [], planning.decide_together

    def remember(stores, key, run, **named):
        keys.append(key)
        return decide(stores, key, run, **named)

    monkeypatch.setattr(planning, "decide_together", remember)
    torch.compiler.reset()
    model = graphshard.fully_shard(WithHead(), mesh=fake_group(2), reshard_after_forward=True)
    options = {"hardware": CARD, "bucket": "auto", "memory_budget": budget, "dump": tmp_path}
    compiled = torch.compile(model, backend="graphshard", options=options)
    for syncs in (False, False, True, False):
        model.set_requires_gradient_sync(syncs)
        compiled(torch.zeros(64, 8)).backward()
    waiting = 4 * sum(param.numel() for param in WithHead().parameters())
    budgets = {}
    for path in sorted(tmp_path.glob("graph0.*.plan.txt")):
        found = re.search(r"^peak .*?(\d+) bytes\)?, budget .*?(\d+) bytes", path.read_text(), re.MULTILINE)
        budgets[path.name.split(".")[1]] = int(found[2]) if found else None
        assert budget is None or int(found[1]) <= int(found[2])
    assert len(set(keys)) == len(keys) >= 3
    if budget is None:
        assert budgets.keys() == {"forward", "backward", "backward-2"}
    else:
        unread = budget - budgets["backward"]  # what lives through the step and no backward reads
        assert 0 < unread < waiting // 2 + 4 * 64 * 8
        assert budgets == {
            "forward": budget,
            "forward-2": budget - waiting,
            "backward": budget - unread,
            "backward-2": budget - waiting - unread,
            "backward-3": budget - unread,
        }


def test_a_second_model_that_runs_the_same_graph_keeps_the_same_units(fake_group):
    mesh, gathered = fake_group(2), []
    for _ in range(2):
        model = graphshard.fully_shard(WithHead(num_blocks=1), mesh=mesh)
        options = {"hardware": CARD, "bucket": "auto", "memory_budget": "1GB"}
        model.set_requires_gradient_sync(False)
        torch.compile(model, backend="graphshard", options=options)(torch.zeros(64, 8)).backward()
        gathered.append(model.__dict__[UNIT].is_gathered)
    assert gathered == [True, True]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"hardware": CARD, "bucket": "auto", "memory_budget": "1GB"}],
    ids=["", "planned"],
)
def test_a_compiled_graph_does_not_keep_its_model_alive(fake_group, options):
    """Another model of the class may share it."""
    torch.compiler.reset()
    model = graphshard.fully_shard(WithHead(num_blocks=1), mesh=fake_group(2))
    model.set_requires_gradient_sync(False)
    torch.compile(model, backend="graphshard", options=options)(torch.zeros(64, 8)).backward()
    unit = weakref.ref(model.__dict__[UNIT])
    del model
    gc.collect()
    assert unit() is None


def test_of_several_models_in_one_graph_none_stays_gathered(fake_group):
    """Their units have the same labels."""
    mesh = fake_group(2)
    models = [graphshard.fully_shard(WithHead(num_blocks=1), mesh=mesh) for _ in range(2)]
    for model in models:
        model.set_requires_gradient_sync(False)

    def step(x):
        return sum(model(x) for model in models)

    options = {"hardware": CARD, "bucket": "auto", "memory_budget": "1GB"}
    torch.compile(step, backend="graphshard", options=options)(torch.zeros(64, 8)).backward()
    assert not any(model.__dict__[UNIT].is_gathered for model in models)
