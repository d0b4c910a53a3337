"""Decisions by cost while a model compiles, made by one rank and followed by all.

Where collectives stand is decided for each half (``plan_collectives``); which units keep gathered
parameters for the backward (``keep_gathered``), and how many activations are saved, for both halves at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import fx

from .. import passes
from .._compat import group_by_name, group_store, group_timeout_seconds
from ..coordination import PlanStore, Refusals, agree_on_group, decide_together
from ..cost import CostModel, HardwareCard
from ..ir import UNSHARD, UnshardCall, group_name, is_collective, text_fingerprint
from ..memory import parse_bytes, step_bytes
from ..pipeline import KnownPlan, PassContext, PassRecord, Pipeline
from ..planner import PlannedGraph, topologies
from .accumulation import accumulation_cost, choose_kept_between
from .inductor_config import saved_share
from .step_trials import JointTrials, StepChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """The planner of one captured graph.

    Attributes:
        card: the hardware.
        halves: the passes on each half; the last one plans.
        is_shared: ranks follow one plan; if not, each makes its own.
        what: names the graph in errors.
        models: by process group, what tells the models that the graph is a part of from others.
        chosen: what was chosen for both halves, as all ranks have it; plans of halves are for that.
    """

    card: HardwareCard
    halves: Pipeline
    is_shared: bool
    what: str
    models: Mapping[str, str] = field(default_factory=dict)
    chosen: str = ""

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
            assert isinstance(planned, PlannedGraph)
            return planned.known.to_dict()

        groups = dict.fromkeys(map(group_name, filter(is_collective, gm.graph.nodes)))
        held = [f"{context.held_bytes} bytes held"] if context.held_bytes else []
        decide_together(
            self._stores(groups),
            self._key(half, unplanned, self.chosen, *held),
            run,
            what=f"{self.what} ({half})",
        )
        return records

    def choose(
        self,
        gm: fx.GraphModule,
        context: PassContext,
        tag: Pipeline,
        memory_budget: int | str | None,
        waiting: Collection[str] = (),
        *,
        keeps_between: bool = True,
    ) -> tuple[list[PassRecord], StepChoice | None]:
        """Chooses which units keep gathered parameters for the backward, where the user left it open, and tags them.

        With a budget also which activations are saved, where all ranks do the same: what is computed again decides
        which parameters the backward gathers. The caller tags these (``StepChoice.extended``).

        Args:
            gm: a joint graph at level 1, edited in place.
            context: what passes on it know.
            tag: the joint passes that follow.
            memory_budget: the user's; None for what the default choice takes.
            waiting: units whose gradients wait for a later micro-batch; with a budget the choice keeps it beside such
                gradients, and those are chosen that keep their parameters until then, for the caller to see to.
                Without one no unit beside the default ones is kept: where the peak lies beside such gradients is not
                known. Who decides first decides for all, in whatever state a rank compiles later.
            keeps_between: units may keep their parameters until then; not where other graphs run beside them, of
                which nothing is known.

        Returns:
            What was done, and the choice, if there was one. Its ``peak_bytes`` are None where they are not known.
        """
        lower, placing = self.halves.split(-1)
        (place,) = placing.passes
        assert isinstance(place, passes.PlanCollectives)
        trials = JointTrials(
            gm=gm,
            context=replace(context, resident_bytes=0 if memory_budget is None else step_bytes(gm)),
            tag=tag,
            lower=lower,
            place=place,
            prices=self._prices,
            recomputes=self.is_shared,
        )
        calls = [UnshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)]
        if not calls or (memory_budget is None and not trials.open_units()):
            return [], None
        groups = dict.fromkeys(
            name for call in calls for name in (call.group_name, call.replicate_group) if name
        )
        of_group = {
            name: [
                f"{call.name} of {call.unit}: {call.shape}, {call.reshard} of {call.group_size}"
                for call in calls
                if name in (call.group_name, call.replicate_group)
            ]
            for name in groups
        }
        texts = [text for of_one in of_group.values() for text in of_one]
        if self.is_shared:
            for name, of_one in of_group.items():
                # Of a model that is new, all ranks are here; one that compiles alone later has the same model.
                of_model = [f"{text} of model {self.models.get(name, '')}" for text in of_one]
                agree_on_group(name, of_model, what=f"{self.what} (joint)")
        records: list[PassRecord] = []
        chosen: list[StepChoice] = []

        def decide() -> StepChoice:
            if memory_budget is None:
                return trials.choose(None, extends=not waiting)
            if not waiting:
                return trials.choose(lambda *_: memory_budget)
            budget = parse_bytes(memory_budget)
            choice = trials.choose_by(lambda choice: accumulation_cost(trials, choice, waiting, budget))
            if not keeps_between:
                return choice
            return replace(choice, kept_between=choose_kept_between(trials, choice, waiting, budget))

        def run(plan: Mapping[str, Any] | None) -> Mapping[str, Any]:
            chosen.append(decide() if plan is None else StepChoice.from_dict(plan))
            step = passes.KeepGathered(units=chosen[-1].kept)
            records.extend(Pipeline(step, given=tag.given).run(gm, context))
            return chosen[-1].to_dict()

        key = self._key("joint", f"{saved_share():g}", *texts)
        decide_together(self._stores(groups), key, run, what=f"{self.what} (joint)")
        choice = chosen[-1]
        if choice.input_bytes != trials.input_bytes():  # a choice is made once; this step has other sizes
            choice = replace(choice, peak_bytes=None)
        return records, choice

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
                store = dist.PrefixStore(
                    f"graphshard/{name}/plans/{self.models.get(name, '')}", group_store(group)
                )
                seconds = group_timeout_seconds(group)
                stores.append(
                    PlanStore(
                        store=store,
                        rank=group.rank(),
                        timeout_seconds=seconds,
                        refusals=Refusals.of_group(name),
                    )
                )
        return stores
