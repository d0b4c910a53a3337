"""Decisions by cost while a model compiles, made by one rank and followed by all.

Where collectives stand is decided for each half (``plan_collectives``); which units keep gathered
parameters for the backward, for both halves at once (``keep_gathered``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import fx

from . import passes
from ._compat import group_by_name, group_store, group_timeout_seconds
from .agreement import agree_on_group
from .collectives import group_name, is_collective
from .context import KnownPlan, PassContext, context_from_shard_ops, pieces_of
from .cost import CostModel, HardwareCard
from .graph_text import text_fingerprint
from .inductor import drop_rng_states, partition_as_inductor
from .keeping import KeepingCost, choose_kept
from .ops import UNSHARD
from .params import UnshardCall
from .pipeline import PassRecord, Pipeline
from .rewrite import copy_graph
from .schedule import topologies
from .shared_plan import PlanStore, decide_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """The planner of one captured graph.

    Attributes:
        card: the hardware.
        halves: the passes on each half; the last one plans.
        is_shared: ranks follow one plan; if not, each makes its own.
        what: names the graph in errors.
    """

    card: HardwareCard
    halves: Pipeline
    is_shared: bool
    what: str

    def place(
        self, pipeline: Pipeline, gm: fx.GraphModule, context: PassContext, unplanned: str, half: str
    ) -> list[PassRecord]:
        """Runs the planning pass on one half.

        Args:
            pipeline: the planning pass.
            gm: a half at level 2.
            context: what passes on it know.
            unplanned: fingerprint of its collectives, on which the ranks have agreed.
            half: "forward", "backward" or "inference".
        """
        context = replace(context, prices=self._prices(gm))
        records: list[PassRecord] = []

        def run(plan: Mapping[str, Any] | None) -> Mapping[str, Any]:
            known = None if plan is None else KnownPlan.from_dict(plan)
            records.extend(pipeline.run(gm, replace(context, known_plan=known)))
            planned = records[-1].report.planned
            assert planned is not None
            return planned.known.to_dict()

        groups = dict.fromkeys(map(group_name, filter(is_collective, gm.graph.nodes)))
        decide_together(self._stores(groups), self._key(half, unplanned), run, what=f"{self.what} ({half})")
        return records

    def keep(self, gm: fx.GraphModule, context: PassContext, tag: Pipeline) -> list[PassRecord]:
        """Chooses which units keep gathered parameters for the backward, where the user left it open.

        Args:
            gm: a joint graph at level 1, edited in place.
            context: what passes on it know.
            tag: the joint passes that follow.
        """
        calls = [UnshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)]
        is_open = [not call.reshard_fixed and call.group_size > 1 for call in calls]
        units = list(dict.fromkeys(call.unit for call, each in zip(calls, is_open, strict=True) if each))
        if not units:
            return []
        default = [call.unit for call in calls if call.reshard == 1]
        groups = dict.fromkeys(
            name for call in calls for name in (call.group_name, call.replicate_group) if name
        )
        texts = [
            f"{call.name} of {call.unit}: {call.shape}, {call.reshard} of {call.group_size}" for call in calls
        ]
        if self.is_shared:
            for name in groups:
                agree_on_group(name, texts, what=f"{self.what} (joint)")
        records: list[PassRecord] = []

        def run(plan: Mapping[str, Any] | None) -> Mapping[str, Any]:
            if plan is None:
                choice = choose_kept(units, default, lambda kept: self._cost(gm, context, kept, tag))
                plan = {"kept": choice.units}
            step = passes.KeepGathered(units=tuple(plan["kept"]))
            records.extend(Pipeline(step, given=tag.given).run(gm, context))
            return plan

        decide_together(self._stores(groups), self._key("joint", *texts), run, what=f"{self.what} (joint)")
        return records

    def _cost(
        self, gm: fx.GraphModule, context: PassContext, kept: tuple[str, ...], tag: Pipeline
    ) -> KeepingCost:
        """Both halves, planned with these units kept."""
        trial = copy_graph(gm)
        Pipeline(passes.KeepGathered(units=kept), given=tag.given).run(trial, context)
        context = context_from_shard_ops(trial)
        tag.run(trial, context)
        context = replace(context, pieces=pieces_of(trial))
        assert context.first_gradient is not None
        parameters = [binding.position for binding in context.parameters]
        forward, backward = partition_as_inductor(trial, context.first_gradient, parameters, lambda _: None)
        drop_rng_states(forward, backward)
        lower, place = self.halves.split(-1)
        seconds, peak = 0.0, 0
        for half, ctx in ((forward, context.for_forward()), (backward, context.for_backward())):
            lower.run(half, ctx)
            planned = place.run(half, replace(ctx, prices=self._prices(half)))[-1].report.planned
            assert planned is not None
            seconds, peak = seconds + planned.plan.seconds, max(peak, planned.plan.peak_bytes)
        return KeepingCost(seconds=seconds, peak_bytes=peak)

    def _prices(self, gm: fx.GraphModule) -> CostModel:
        return CostModel(card=self.card, groups=topologies(gm, self.card, {}))

    def _key(self, *parts: str) -> str:
        return text_fingerprint("\n".join([str(self.halves), repr(self.card), *parts]))

    def _stores(self, groups: Iterable[str]) -> list[PlanStore]:
        """Where ranks find a plan: in the store of each group."""
        stores = []
        for name in groups if self.is_shared else ():
            group = group_by_name(name)
            if dist.get_backend(group) != "fake":
                store = dist.PrefixStore(f"graphshard/{name}/plans", group_store(group))
                seconds = group_timeout_seconds(group)
                stores.append(PlanStore(store=store, rank=group.rank(), timeout_seconds=seconds))
        return stores
