"""A joint graph, planned with one choice of kept units after the other."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
import torch._functorch.config as functorch_config
from support.small_graphs import GraphBuilder, aten
from support.small_models import WithHead
from support.trials import CARD, in_capture
from torch import nn
from torch._inductor.fx_passes import joint_graph

import graphshard
import graphshard.backend.step_planner as planning
import graphshard.backend.step_trials as joint_trials
from graphshard.backend.inductor import partition
from graphshard.backend.pipelines import JOINT_PIPELINE
from graphshard.backend.step_choice import StepChoice
from graphshard.backend.step_trials import JointTrials, draws_random_numbers
from graphshard.capture.capture_step import capture_step
from graphshard.capture.rules import ShardingRules
from graphshard.errors import InfeasibleBudgetError
from graphshard.ir.rewrite import copy_graph
from graphshard.memory import ScratchTable, resident_bytes, step_bytes
from graphshard.passes import LowerShards, PlanCollectives
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.pipeline import Pipeline
from graphshard.planner import default_peak
from graphshard.planner.search import solve
from graphshard.planner.search.solve import EXACT_STATES
from graphshard.progress import TimeLimit

pytestmark = pytest.mark.usefixtures("brief_plans", "interpreted")


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(1, 1, *x.shape)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)[0, 0]


def test_units_are_in_the_order_of_their_last_use():
    units, default = in_capture(lambda trials: (trials.open_units(), trials.default()))
    assert units == ["blocks.0", "blocks.1", "blocks.2", "root"]
    assert default == ["root"]


def test_units_whose_user_decided_are_not_open():
    assert in_capture(JointTrials.open_units, reshard=True) == []


def test_without_a_budget_the_choice_takes_no_more_than_the_default_schedule():
    def ask(trials):
        step = trials.choose(None)
        peaks = [default_peak(half, ctx) - resident_bytes(half) for half, ctx in trials._halves(None)]

        def within(half, ctx):
            return step.peak_bytes + resident_bytes(half)

        costs = {}
        for kept in (("root",), step.kept):
            with contextlib.suppress(InfeasibleBudgetError):
                costs[kept] = trials._cost(StepChoice(kept=kept), within)
        return step, peaks, costs

    step, peaks, costs = in_capture(ask)
    assert step.peak_bytes == max(peaks)
    assert len(step.kept) > 1 and step.kept[-1] == "root"
    assert costs[step.kept].seconds < costs["root",].seconds
    assert StepChoice.from_dict(json.loads(json.dumps(step.to_dict()))) == step


def test_the_plans_of_the_choice_come_with_it():
    """They are for the rank that tried; the others get the choice alone."""

    def ask(trials):
        step = trials.choose(None)
        halves = list(trials._halves(step))
        peak = step.peak_bytes

        def again(place, start):
            half, ctx = halves[place]
            context = replace(ctx, start=start)
            return trials.plan(copy_graph(half), context, peak + resident_bytes(half)).known

        return step, [again(place, start) for place, start in enumerate(step.plans)]

    step, again = in_capture(ask)
    assert len(step.kept) > 1 and len(step.plans) == 2 and list(step.plans) == again
    assert not StepChoice.from_dict(json.loads(json.dumps(step.to_dict()))).plans
    assert "plan" not in str(step)


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_the_halves_start_from_the_plans_of_the_choice(fake_group, monkeypatch, tmp_path, budget):
    monkeypatch.setenv("GRAPHSHARD_CACHE", str(tmp_path))
    planned, real = [], PlanCollectives.run

    def run(self, gm, ctx):
        report = real(self, gm, ctx)
        planned.append((self.polishes, ctx.start, report.planned.known))
        return report

    monkeypatch.setattr(PlanCollectives, "run", run)
    options = {"hardware": CARD, "planning_seconds": 1000.0, "memory_budget": budget}
    model, mesh = WithHead(), fake_group(2)
    for unit in (*model.blocks, model):
        graphshard.fully_shard(unit, mesh=mesh)
    torch.compile(model, backend="graphshard", options=options)(torch.zeros(64, 8)).backward()
    tried = [known for polishes, _, known in planned if not polishes]
    starts = [start for polishes, start, _ in planned if polishes]
    assert len(starts) == 2 and all(start in tried for start in starts)


def test_of_later_trials_only_the_backward_is_searched(monkeypatch):
    searched, real = [], solve._searched

    def remember(problem, *args, **options):
        searched.append([one.limit for one in problem.collectives])
        return real(problem, *args, **options)

    monkeypatch.setattr(solve, "_searched", remember)
    in_capture(lambda trials: trials.choose(None))
    forwards = [limits for limits in searched if "reduction" not in limits]
    assert len(forwards) == 1 < len(searched) - 1


@pytest.mark.slow
def test_a_users_budget_decides_between_none_and_all():
    budgets = {}

    def ask(trials):
        with pytest.raises(InfeasibleBudgetError) as refused:
            trials.choose(lambda *_: 100)
        for budget in (refused.value.smallest_bytes, 2**40):
            budgets[budget] = trials.choose(lambda *_: budget)  # noqa: B023 - asked at once
        return trials.open_units()

    units = in_capture(ask)
    lean, wide = (step for _, step in sorted(budgets.items()))
    assert len(lean.kept) < len(wide.kept) == len(units)
    assert lean.peak_bytes is None


#: A step whose activations weigh more than its parameters; of few units, because many choices are tried.
WIDE = {"batch": 1024, "num_blocks": 2}


@pytest.fixture(scope="module")
def lean_step():
    """The least memory of a step whose activations weigh more than its parameters, and what is chosen for it."""

    def least(trials):
        with pytest.raises(InfeasibleBudgetError) as refused:
            trials.choose(lambda *_: 100)
        return refused.value.smallest_bytes

    def ask(trials):
        whole, lean = least(replace(trials, recomputes=False)), least(trials)
        with functorch_config.patch(activation_memory_budget=0.99):
            users = least(trials)
        return whole, users, lean, trials.choose(lambda *_: lean)

    return in_capture(ask, **WIDE)


def test_with_too_little_memory_activations_are_computed_again(lean_step):
    whole, users, least, choice = lean_step
    assert least < 0.9 * users <= 0.9 * whole, "where the user has chosen a share, no other is tried"
    assert 0 < choice.saved_share < 1 and choice.recomputed and choice.saved and choice.input_bytes > 0
    assert f"{len(choice.recomputed)} ops of the forward are computed again" in str(choice)
    assert StepChoice.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice


def test_with_enough_memory_nothing_is_computed_again():
    wide = in_capture(lambda trials: trials.choose(lambda *_: 2**40), **WIDE)
    assert wide.saved_share is None and not wide.notes() and len(wide.kept) == 3


def test_a_choice_is_the_same_partition_for_other_sizes(lean_step):
    """Ranks with small batches follow: what is computed again decides which parameters are gathered again."""
    *_, choice = lean_step

    def backwards(trials):
        return [
            [
                node.target
                for node in list(trials._halves(each))[1][0].graph.nodes
                if node.op == "call_function"
            ]
            for each in (choice, None)
        ]

    large, small = (in_capture(backwards, **(WIDE | {"batch": batch})) for batch in (1024, 16))
    assert large == small and len(large[0]) > len(large[1])


def test_of_results_only_what_the_backward_reads_is_saved():
    def ask(trials):
        _, backward = trials._partitioned(copy_graph(trials.gm), trials.tag, 0.5)
        return trials._saving(0.5).saved, [node.name for node in backward.graph.find_nodes(op="placeholder")]

    saved, read = in_capture(ask)
    assert saved and set(saved) <= set(read)


@pytest.mark.parametrize(
    ("layer", "draws"),
    [(nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (Attention(0.1), True), (Attention(0.0), False)],
    ids=["dropout", "no dropout", "attention with dropout", "attention"],
)
def test_nothing_is_computed_again_where_random_numbers_would_be_drawn_again(layer, draws):
    found = []

    def remember(gm, context, tag):
        found.append(draws_random_numbers(gm.graph))

    model = nn.Sequential(nn.Linear(8, 16), layer, nn.Linear(16, 8))
    rules = ShardingRules(mesh={"shard": 2})
    capture_step(model, [torch.zeros(4, 8)], rules=rules, choose=remember, loss=lambda result: result.sum())
    assert found == [draws]


def test_where_random_numbers_would_be_drawn_again_less_memory_is_refused(lean_step, monkeypatch):
    _, _, lean, _ = lean_step
    monkeypatch.setattr(joint_trials, "draws_random_numbers", lambda graph: True)

    def ask(trials):
        with pytest.raises(InfeasibleBudgetError):
            trials.choose(lambda *_: lean)

    in_capture(ask, **WIDE)


def test_where_no_plan_keeps_the_default_peak_the_default_stays(monkeypatch):
    def refuse(self, halves, budget_of, starts=()):
        raise InfeasibleBudgetError(1, 2, is_smallest=False)

    monkeypatch.setattr(JointTrials, "_cost_of", refuse)
    step = in_capture(lambda trials: trials.choose(None))
    assert step.kept == ("root",) and step.peak_bytes > 0


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_inputs_that_live_through_the_step_are_part_of_a_users_budget_alone(monkeypatch, budget):
    """Without one the limit of a half is beside those of them that it reads."""
    counted, real = set(), JointTrials.plan

    def plan(self, half, ctx, memory_budget):
        counted.add(ctx.resident_bytes)
        return real(self, half, ctx, memory_budget)

    monkeypatch.setattr(JointTrials, "plan", plan)

    def ask(trials):
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")
        planner.choose(copy_graph(trials.gm), trials.context, trials.tag, budget)
        return step_bytes(trials.gm)

    inputs = in_capture(ask)
    assert counted == ({0} if budget is None else {inputs}) and inputs > 0


def test_patterns_are_made_before_the_time_begins(monkeypatch):
    """For the device that the cut asks for: it then finds them."""
    asked = []

    def ask(where, real):
        def recorded(*arguments):
            asked.append((where, arguments))
            return real(*arguments)

        return recorded

    monkeypatch.setattr(partition, "lazy_init", ask("planner", partition.lazy_init))
    monkeypatch.setattr(joint_graph, "lazy_init", ask("cut", joint_graph.lazy_init))
    limit = planning.StepPlanner._limit
    monkeypatch.setattr(
        planning.StepPlanner, "_limit", lambda *given: asked.append(("limit", ())) or limit(*given)
    )

    def choose(trials):
        asked.clear()  # the capture has cut the graph
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")
        planner.choose(copy_graph(trials.gm), trials.context, trials.tag, None)
        return list(asked)

    asked = in_capture(choose)
    steps = [where for where, _ in asked]
    assert steps[:3] == ["planner", "limit", "cut"]
    assert len({arguments for where, arguments in asked if where != "limit"}) == 1


class CuttingTakes(TimeLimit):
    """A limit of 4 seconds, of which each question spends some."""

    seconds_a_question = 0.0

    def spent(self):
        self.asked = getattr(self, "asked", -1) + 1
        return self.asked * self.seconds_a_question


@pytest.mark.parametrize(("cutting", "plans"), [(0.0, True), (0.5, True), (1.9, False), (3.0, False)])
def test_the_default_is_planned_only_if_another_choice_can_be_compared_with_it(monkeypatch, cutting, plans):
    planned, real = [], JointTrials.plan

    def plan(self, *arguments):
        planned.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(JointTrials, "plan", plan)
    limit = CuttingTakes(seconds=4.0)
    limit.seconds_a_question = cutting
    step = in_capture(
        lambda trials: replace(trials, context=replace(trials.context, limit=limit)).choose(None)
    )
    assert bool(planned) is plans and limit.was_reached is (cutting > 0)
    assert step.peak_bytes > 0 and "root" in step.kept


def test_trials_search_exactly_for_a_moment_only(monkeypatch):
    searched, real = [], PlanCollectives.run

    def run(self, gm, ctx):
        searched.append(self.exact_states)
        return real(self, gm, ctx)

    monkeypatch.setattr(PlanCollectives, "run", run)
    in_capture(lambda trials: trials.choose(lambda *_: 2**30))
    assert set(searched) == {EXACT_STATES} and PlanCollectives().exact_states > EXACT_STATES


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's, at the break
@pytest.mark.parametrize(
    ("breaks", "budget", "verify", "chooses"),
    [
        (False, None, "cheap", True),
        (False, None, "off", False),
        (True, None, "cheap", False),
        (True, "1MB", "cheap", True),
    ],
)
def test_without_a_budget_nothing_is_chosen_for_a_part_of_the_step_or_ranks_that_do_not_meet(
    fake_group, tmp_path, breaks, budget, verify, chooses
):
    """Nobody knows what the other graphs hold while it runs."""
    model, mesh = WithHead(breaks=breaks), fake_group(2)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)
    options = {
        "hardware": CARD,
        "bucket": "auto",
        "memory_budget": budget,
        "dump": str(tmp_path),
        "verify": verify,
    }
    torch.compile(model, backend="graphshard", options=options)(torch.zeros(64, 8)).backward()
    is_chosen = any("keep_gathered" in file.name for file in tmp_path.iterdir())
    assert is_chosen == chooses


@pytest.mark.parametrize("is_other", [False, True])
def test_a_choice_for_other_sizes_does_not_say_what_the_halves_may_take(monkeypatch, is_other):
    def ask(trials):
        size = trials.input_bytes() + is_other
        decided = StepChoice(kept=("blocks.2", "root"), peak_bytes=123, input_bytes=size).to_dict()
        stored = {"decided": decided, "scratch": ScratchTable().as_data()}
        monkeypatch.setattr(planning, "decide_together", lambda _, __, run, **named: run(stored).result)
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")
        kept = planner.choose(copy_graph(trials.gm), trials.context, trials.tag, None)
        return [record.name for record in kept.records], kept.choice.peak_bytes

    assert in_capture(ask) == (["keep_gathered"], None if is_other else 123)


def test_ranks_that_do_not_meet_compute_nothing_again(lean_step):
    """Each would choose alone, and gather other parameters again."""
    *_, least, choice = lean_step
    assert choice.recomputed

    def ask(trials):
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")
        with pytest.raises(InfeasibleBudgetError):
            planner.choose(copy_graph(trials.gm), trials.context, trials.tag, least)
        return True

    assert in_capture(ask, batch=1024)


def test_a_stored_choice_is_for_one_setting_of_the_user(monkeypatch):
    """Of ``activation_memory_budget``: what was chosen without does not hold with it."""
    keys = []

    def ask(trials):
        decided = StepChoice(kept=("root",), input_bytes=trials.input_bytes()).to_dict()
        stored = {"decided": decided, "scratch": ScratchTable().as_data()}
        follow = lambda _, key, run, **named: keys.append(key) or run(stored).result  # noqa: E731
        monkeypatch.setattr(planning, "decide_together", follow)
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=False, what="graph")
        for share in (1.0, 1.0, 0.5):
            with functorch_config.patch(activation_memory_budget=share):
                planner.choose(copy_graph(trials.gm), trials.context, trials.tag, None)

    in_capture(ask)
    assert keys[0] == keys[1] != keys[2]


def test_a_graph_without_sharded_parameters_is_left_alone():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2, 2)))
    halves = Pipeline(LowerShards(), PlanCollectives(), given=JOINT_PIPELINE.facts_at_end)
    planner = planning.StepPlanner(card=CARD, halves=halves, is_shared=True, what="graph")
    _, tag = JOINT_PIPELINE.split(-1)
    assert planner.choose(gm, PassContext(), tag, 1) is None
