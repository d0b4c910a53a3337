"""A joint graph, planned with one choice of kept units after the other."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_graphs import text_of
from small_models import WithHead

import graphshard
import graphshard.planning as planning
from graphshard.capture import ShardingRules, capture_step
from graphshard.cost import CostModel, load_card
from graphshard.joint_trials import JointTrials, StepChoice
from graphshard.passes import LowerShards, PlanCollectives
from graphshard.passes.plan_collectives import default_peak, resident_bytes
from graphshard.pipeline import Pipeline
from graphshard.planner.plan import InfeasibleBudgetError
from graphshard.rewrite import copy_graph

CARD = load_card("cpu-ethernet-1g")


def in_capture(ask: Callable[[JointTrials], Any], batch: int = 64, reshard: bool | None = None) -> Any:
    """What ``ask`` says of trials on the joint graph of a step, while it is captured."""
    answers = []

    def remember(gm, context, tag):
        before = text_of(gm, context)
        trials = JointTrials(
            gm=gm,
            context=context,
            tag=tag,
            lower=Pipeline(LowerShards(), given=tag.facts_at_end),
            merge=True,
            prices=lambda _: CostModel.of_mesh(CARD, context.mesh),
        )
        answers.append(ask(trials))
        assert text_of(gm, context) == before

    rules = ShardingRules(mesh={"shard": 2}, units=("blocks.*",), reshard_after_forward=reshard)
    capture_step(WithHead(), [torch.zeros(batch, 8)], rules=rules, choose=remember)
    (answer,) = answers
    return answer


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
                costs[kept] = trials._cost(kept, within)
        return step, peaks, costs

    step, peaks, costs = in_capture(ask)
    assert step.peak_bytes == max(peaks)
    assert len(step.kept) > 1 and step.kept[-1] == "root"
    assert costs[step.kept].seconds < costs["root",].seconds
    assert StepChoice.from_dict(json.loads(json.dumps(step.to_dict()))) == step


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


def test_where_no_plan_keeps_the_default_peak_the_default_stays(monkeypatch):
    def refuse(self, kept, budget_of):
        raise InfeasibleBudgetError(1, 2, is_smallest=False)

    monkeypatch.setattr(JointTrials, "_cost", refuse)
    step = in_capture(lambda trials: trials.choose(None))
    assert step.kept == ("root",) and step.peak_bytes > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, at the break
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
    options = {"hardware": CARD, "bucket": "auto", "memory_budget": budget, "dump": str(tmp_path), "verify": verify}
    torch.compile(model, backend="graphshard", options=options)(torch.zeros(64, 8)).backward()
    is_chosen = any("keep_gathered" in file.name for file in tmp_path.iterdir())
    assert is_chosen == chooses


@pytest.mark.parametrize("is_other", [False, True])
def test_a_choice_for_other_sizes_does_not_say_what_the_halves_may_take(monkeypatch, is_other):
    def ask(trials):
        size = trials.input_bytes() + is_other
        stored = StepChoice(kept=("blocks.2", "root"), peak_bytes=123, input_bytes=size).to_dict()
        monkeypatch.setattr(planning, "decide_together", lambda _, __, run, what: run(stored))
        halves = Pipeline(LowerShards(), PlanCollectives(), given=trials.tag.facts_at_end)
        planner = planning.Planning(card=CARD, halves=halves, merge=True, is_shared=False, what="graph")
        records, peak = planner.keep(copy_graph(trials.gm), trials.context, trials.tag, None)
        return [record.name for record in records], peak

    assert in_capture(ask) == (["keep_gathered"], None if is_other else 123)
