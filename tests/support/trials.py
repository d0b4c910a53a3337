"""Trials of choices for a small model, as they are made while its step is captured."""

from collections.abc import Callable
from typing import Any

import torch

from graphshard.backend.step_trials import JointTrials
from graphshard.capture.capture_step import capture_step
from graphshard.capture.rules import ShardingRules
from graphshard.cost import CostModel, load_card
from graphshard.passes import LowerShards, PlanCollectives
from graphshard.pipeline.pipeline import Pipeline
from support.small_graphs import text_of
from support.small_models import WithHead

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
            place=PlanCollectives(),
            prices=lambda _: CostModel.of_mesh(CARD, context.mesh),
        )
        answers.append(ask(trials))
        assert text_of(gm, context) == before

    rules = ShardingRules(mesh={"shard": 2}, units=("blocks.*",), reshard_after_forward=reshard)
    capture_step(WithHead(), [torch.zeros(batch, 8)], rules=rules, choose=remember)
    (answer,) = answers
    return answer
