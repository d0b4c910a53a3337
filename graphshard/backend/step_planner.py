"""Decisions by cost while a model compiles: one rank makes them, all ranks follow.

Where collectives stand is decided for each half (pass ``plan_collectives``). Which units keep gathered parameters for
the backward (pass ``keep_gathered``), and how many activations are saved, is decided once for both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import fx

from .. import passes
from ..budget_text import parse_bytes
from ..coordination import (
    Decision,
    PlanStore,
    agree_on_group,
    can_wait_in_compilation,
    decide_together,
    keep_plan,
    read_plan,
)
from ..cost import CostModel, HardwareCard
from ..errors import PlanError
from ..ir import (
    UNSHARD,
    UnshardCall,
    graph_text,
    group_labels,
    group_name,
    is_collective,
    remembered_results,
    size_hint,
    tensors_of,
    text_fingerprint,
)
from ..machine import Machine
from ..memory import DONATED, UNMEASURED, KernelMeasurements, ScratchTable, step_bytes
from ..pipeline import KnownPlan, PassContext, PassRecord, Pipeline
from ..planner import PlannedGraph, topologies
from ..progress import LOGGER, PlanningTime, TimeLimit, say_nothing
from .accumulation import accumulation_cost, choose_kept_between
from .dynamo_graph import DynamoGraph
from .inductor import partitioner_settings, prepare_patterns, saved_share
from .pipelines import half_pipelines
from .step_choice import StepChoice
from .step_trials import JointTrials

Result = TypeVar("Result")

#: Follows a plan, or makes one of None.
Follow = Callable[[Mapping[str, Any] | None], Decision[Result]]

#: Shares of the planning time that is left, for the choice for both halves and then for each half. Later variants of a
#: half get what remains. The choice brings more than longer searches for the halves, whose first two always run.
_SHARES = {"joint": 0.9, "forward": 0.5, "inference": 1.0, "backward": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptUnits:
    """The choice for both halves, made or followed.

    Attributes:
        choice: what was chosen.
        records: what ``keep_gathered`` did.
    """

    choice: StepChoice
    records: tuple[PassRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlanner:
    """The planner of one captured graph.

    Attributes:
        card: the hardware.
        halves: the passes on each half; the last one plans.
        is_shared: all ranks follow one plan; if not, each makes its own.
        what: names the graph in errors.
        models: by process group, what tells the models that the graph is a part of from others.
        groups: the process groups of these models.
        time: how long the searches may still take.
        planning_seconds: how long the user lets them take; None for the default.
        tell: takes lines of progress.
        kernels: what kernels allocate for themselves. The rank that plans measures, and its numbers go to the others
            with its plan. A rank measures itself what it has in other sizes, or on another processor.
    """

    card: HardwareCard
    halves: Pipeline
    is_shared: bool
    what: str
    models: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    kernels: KernelMeasurements = field(default_factory=KernelMeasurements)
    time: PlanningTime = field(default_factory=PlanningTime)
    planning_seconds: float | None = None
    tell: Callable[[str], None] = say_nothing

    @staticmethod
    def of(graph: DynamoGraph) -> StepPlanner:
        """That of a graph of Dynamo, whose user gave a hardware card."""
        assert graph.options.card is not None
        return StepPlanner(
            card=graph.options.card,
            halves=half_pipelines(graph.options).planned,
            is_shared=graph.are_ranks_compared,
            what=f"graph {graph.index}",
            models=graph.models,
            groups=graph.groups,
            kernels=graph.kernels,
            time=graph.planning,
            planning_seconds=graph.options.planning_seconds,
            tell=graph.progress.tell,
        )

    def place(
        self,
        pipeline: Pipeline,
        gm: fx.GraphModule,
        context: PassContext,
        unplanned: str,
        half: str,
        *,
        chosen: str = "",
    ) -> list[PassRecord]:
        """Runs the planning pass on one half, in place.

        Args:
            pipeline: the planning pass.
            gm: a half at level 2.
            context: what passes on it know.
            unplanned: fingerprint of its collectives, equal on all ranks.
            half: "forward", "backward" or "inference".
            chosen: what was chosen for both halves, as all ranks have it; the plan is for that choice.
        """
        prices = self._prices(gm)
        context = replace(context, prices=prices)
        groups = dict.fromkeys(map(group_name, filter(is_collective, gm.graph.nodes)))
        held = [f"{context.held_bytes} bytes held"] if context.held_bytes else []
        key = self._key(half, unplanned, chosen, *held)
        kept = self._kept_key(key, gm, context)

        def follow(plan: Mapping[str, Any] | None) -> Decision[list[PassRecord]]:
            known = None if plan is None else KnownPlan.from_dict(self._adopt(plan))
            scratch = self.kernels.of(gm, context.device_type)
            measured = self.kernels.rows_of(gm, context.device_type)
            with self._limit(_SHARES[half]) as limit:
                records = pipeline.run(gm, replace(context, known_plan=known, scratch=scratch, limit=limit))
            planned = records[-1].report.planned
            assert isinstance(planned, PlannedGraph)
            decided = plan if plan is not None else _with_scratch(planned.known.to_dict(), measured)
            return Decision(plan=decided, result=records)

        decide = partial(self._decide, kept, follow)
        what = f"{self.what} ({half})"
        return decide_together(self._stores(groups), key, decide, what=what, groups=tuple(groups))

    def choose(
        self,
        gm: fx.GraphModule,
        context: PassContext,
        tag: Pipeline,
        memory_budget: int | str | None,
        waiting: Collection[str] = (),
        *,
        keeps_between: bool = True,
    ) -> KeptUnits | None:
        """Chooses which units keep gathered parameters for the backward, where the user left it open, and tags them.

        With a budget it also chooses which activations are saved, if all ranks follow one choice: what is recomputed
        decides which parameters the backward gathers. The caller tags the activations (``StepChoice.extended``).

        The first rank's decision binds all ranks, including those that recompile later with other gradients waiting.

        Args:
            gm: a joint graph at level 1, edited in place.
            context: what passes on it know.
            tag: the joint passes that follow.
            memory_budget: the user's; None for the peak of the default choice.
            waiting: units whose gradients wait for a later micro-batch. A budget then also counts these gradients, and
                units that keep their parameters until the gradients are reduced are chosen (``kept_between``; the
                caller sees to them). Without a budget only default units are kept: where the peak lies beside waiting
                gradients is not known.
            keeps_between: units may keep their parameters between micro-batches; not if other graphs, of which nothing
                is known, run in between.

        Returns:
            The choice; its ``peak_bytes`` are None if they are not known. None if there is nothing to choose.

        Raises:
            AgreementError: the ranks would choose for different parameters.
            InfeasibleBudgetError: no choice keeps the budget.
        """
        trials = self._trials(gm, context, tag, resident_bytes=0 if memory_budget is None else step_bytes(gm))
        calls = [UnshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)]
        if not calls or (memory_budget is None and not trials.open_units()):
            return None
        of_group = _texts_by_group(calls)
        if self.is_shared:
            self._agree_on_parameters(of_group)

        # Without shapes: ranks of one axis may hold pieces of several sizes. The store tells models apart.
        parameters = [f"{call.name} of {call.unit}: {call.reshard} of {call.group_size}" for call in calls]
        key = self._key("joint", f"{saved_share():g}", *parameters)
        settings = f"{memory_budget} {sorted(waiting)} {keeps_between} {tag} {partitioner_settings()}"
        kept_key = self._kept_key(f"{key} {settings}", gm, context)

        def follow(plan: Mapping[str, Any] | None) -> Decision[KeptUnits]:
            if plan is None:
                scratch = self.kernels.of(gm, context.device_type)
                prepare_patterns(gm)
                # Trials never reach Inductor, which tells values apart by their fake tensors.
                with self._limit(_SHARES["joint"]) as limit, remembered_results():
                    limited = replace(trials.context, scratch=scratch, limit=limit)
                    measured = replace(trials, context=limited)
                    choice = _choose(measured, memory_budget, waiting, keeps_between=keeps_between)
            else:
                choice = StepChoice.from_dict(self._adopt(plan))
            rows = self.kernels.rows_of(gm, context.device_type)
            step = passes.KeepGathered(units=choice.kept)
            records = Pipeline(step, given=tag.given).run(gm, context)
            result = KeptUnits(choice=choice, records=tuple(records))
            decided = plan if plan is not None else _with_scratch(choice.to_dict(), rows)
            return Decision(plan=decided, result=result)

        groups = tuple(dict.fromkeys([*of_group, *self.groups]))
        decide = partial(self._decide, kept_key, follow)
        kept = decide_together(self._stores(groups), key, decide, what=f"{self.what} (joint)", groups=groups)
        if kept.choice.input_bytes != trials.input_bytes():  # made for a step of other sizes
            kept = replace(kept, choice=replace(kept.choice, peak_bytes=None))
        return kept

    @contextmanager
    def _limit(self, share: float) -> Iterator[TimeLimit]:
        """The time limit of one search, which the log names if it ended the search.

        Ranks that each make a plan must make the same one, so they have no limit.
        """
        if not self.is_shared:
            yield TimeLimit()
            return
        with self.time.part(share) as limit:
            yield limit
        if limit.was_reached:
            LOGGER.info(
                "%s: the search ended at its limit of %.1f s, with the best so far", self.what, limit.seconds
            )

    def _trials(
        self, gm: fx.GraphModule, context: PassContext, tag: Pipeline, *, resident_bytes: int
    ) -> JointTrials:
        lower, placing = self.halves.split(-1)
        (place,) = placing.passes
        assert isinstance(place, passes.PlanCollectives)
        return JointTrials(
            gm=gm,
            context=replace(context, resident_bytes=resident_bytes),
            tag=tag,
            lower=lower,
            place=place,
            prices=self._prices,
            recomputes=self.is_shared,
            tell=self.tell,
        )

    def _agree_on_parameters(self, of_group: Mapping[str, Sequence[str]]) -> None:
        """All ranks take part if the model is new; a rank that compiles alone later has the same model."""
        for name, texts in of_group.items():
            agree_on_group(name, texts, what=f"{self.what} (joint)", models=self.models.get(name, ""))

    def _adopt(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """The plan of another rank, whose measurements are taken over."""
        self.kernels.adopt(ScratchTable.from_data(plan["scratch"]))
        decided: Mapping[str, Any] = plan["decided"]
        return decided

    def _prices(self, gm: fx.GraphModule) -> CostModel:
        return CostModel(card=self.card, groups=topologies(gm, self.card, {}))

    def _key(self, *parts: str) -> str:
        return text_fingerprint("\n".join([str(self.halves), repr(self.card), *parts]))

    def _decide(self, key: str, follow: Follow[Result], plan: Mapping[str, Any] | None) -> Decision[Result]:
        """Follows a plan that is given, or that of an earlier process, or makes one and keeps it.

        Ranks that each make a plan take none of an earlier process, since another may have none. One that cannot be
        followed (its file is damaged) is replaced: no file of the cache stops a run.
        """
        if plan is not None or not self.is_shared or not key:
            return follow(plan)
        if (found := read_plan(key)) is not None:
            try:
                return follow(found)
            except (PlanError, LookupError, TypeError, ValueError) as error:
                LOGGER.info("%s: the plan of an earlier run cannot be followed (%r)", self.what, error)
        decision = follow(None)
        keep_plan(key, decision.plan)
        return decision

    def _kept_key(self, key: str, gm: fx.GraphModule, context: PassContext) -> str:
        """All that a plan depends on: what ``key`` says, the graph, what passes know, the machine, torch and source.

        "" if the source of a pass is not known: then nothing may be kept.
        """
        if not (source := self.halves.uuid()):
            return ""
        labels = group_labels(gm, context.mesh)
        groups = sorted(
            (labels.get(name, name), repr(group)) for name, group in self._prices(gm).groups.items()
        )
        known = replace(context.without_group_names(), prices=None, known_plan=None, scratch=UNMEASURED)
        parts = [
            key,
            source,
            graph_text(gm, mesh=context.mesh, parameters=context.parameters),
            repr(known),
            repr([_seen(node) for node in gm.graph.find_nodes(op="placeholder")]),
            repr(groups),
            repr(Machine.here()),
            repr(self.planning_seconds),
        ]
        return text_fingerprint("\n".join(parts))

    def _stores(self, groups: Iterable[str]) -> list[PlanStore]:
        """The stores where the ranks of each group find a plan."""
        shared = [name for name in groups if self.is_shared and can_wait_in_compilation(name)]
        return [PlanStore.of_group(name, self.models.get(name, "")) for name in shared]


def _seen(node: fx.Node) -> tuple[Any, ...]:
    """What a plan takes from an input beside its text: symbolic sizes as they are now, and whether it is given away."""
    sizes = [size_hint(size) for value in tensors_of(node.meta.get("val")) for size in value.shape]
    return (*sizes, bool(node.meta.get(DONATED)))


def _with_scratch(decided: Mapping[str, Any], measured: ScratchTable) -> dict[str, Any]:
    """A decision, and what the rank that made it has measured of its kernels, as JSON can hold them."""
    return {"decided": dict(decided), "scratch": measured.as_data()}


def _choose(
    trials: JointTrials, memory_budget: int | str | None, waiting: Collection[str], *, keeps_between: bool
) -> StepChoice:
    if memory_budget is None:
        return trials.choose(None, extends=not waiting)
    if not waiting:
        return trials.choose(lambda *_: memory_budget)
    budget = parse_bytes(memory_budget)
    choice = trials.choose_by(lambda choice: accumulation_cost(trials, choice, waiting, budget))
    if not keeps_between:
        return choice
    return replace(choice, kept_between=choose_kept_between(trials, choice, waiting, budget))


def _texts_by_group(calls: Sequence[UnshardCall]) -> dict[str, list[str]]:
    """By process group, a text of each parameter that it gathers or sums."""
    names = dict.fromkeys(name for call in calls for name in (call.group_name, call.replicate_group) if name)
    return {
        name: [
            f"{call.name} of {call.unit}: {call.shape}, {call.reshard} of {call.group_size}"
            for call in calls
            if name in (call.group_name, call.replicate_group)
        ]
        for name in names
    }
