"""Trials of choices for a small model, as they are made while its step is captured."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.virtualized import V

from graphshard.backend.inductor.inductor_config import config_patches
from graphshard.backend.step_trials import JointTrials
from graphshard.capture.capture_step import capture_step
from graphshard.capture.rules import ShardingRules
from graphshard.cost import CostModel, load_card
from graphshard.ir.rewrite import copy_graph
from graphshard.passes import LowerShards, PlanCollectives
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.pipeline import Pipeline
from support.small_graphs import text_of
from support.small_models import WithHead

CARD = load_card("cpu-ethernet-1g")


@functools.cache
def _joint_of_a_step(
    batch: int, reshard: bool | None, num_blocks: int
) -> tuple[fx.GraphModule, PassContext, Pipeline]:
    """What a function that chooses is called with, captured once."""
    found = []

    def remember(gm: fx.GraphModule, context: PassContext, tag: Pipeline) -> None:
        found.append((copy_graph(gm), context, tag))

    rules = ShardingRules(mesh={"shard": 2}, units=("blocks.*",), reshard_after_forward=reshard)
    capture_step(WithHead(num_blocks), [torch.zeros(batch, 8)], rules=rules, choose=remember)
    (joint,) = found
    return joint


def in_capture(
    ask: Callable[[JointTrials], Any], batch: int = 64, reshard: bool | None = None, num_blocks: int = 3
) -> Any:
    """What ``ask`` says of trials on the joint graph of a step, under the settings of a capture."""
    joint, context, tag = _joint_of_a_step(batch, reshard, num_blocks)
    gm = copy_graph(joint)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with inductor_config.patch(config_patches({})), V.set_fake_mode(detect_fake_mode(values)):
        before = text_of(gm, context)
        trials = JointTrials(
            gm=gm,
            context=context,
            tag=tag,
            lower=Pipeline(LowerShards(), given=tag.facts_at_end),
            place=PlanCollectives(),
            prices=lambda _: CostModel.of_mesh(CARD, context.mesh),
        )
        answer = ask(trials)
        assert text_of(gm, context) == before
    return answer
