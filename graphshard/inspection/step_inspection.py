"""One inspection of a captured step: the passes of training on its halves, their memory, and a report of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from ..capture import CapturedStep
from ..cost import CostModel
from ..errors import BudgetError, InfeasibleBudgetError
from ..ir import apply_order, graph_text, output_values
from ..passes import PlanCollectives
from ..pipeline import Fact, PassContext, PassRecord, Pipeline, prepared_nodes
from ..planner import PlannedGraph, problem_of_graph
from ..planner.search import Bounds, lower_bounds
from ..progress import Stages
from ..report import CATEGORIES, HalfReport, PassStep, Report, World
from .half_report import ScheduledHalf, brief_half_report, half_report
from .memory_categories import (
    CategorizedMemory,
    SavedMemory,
    categorized_memory,
    kept_bytes_by_category,
    saved_memory,
)
from .optimizers import step_seconds
from .other_meshes import worlds_of
from .persistent_bytes import always_bytes, persistent_bytes
from .placed_report import placed_parameters, reshard_counts
from .settings import Settings
from .step_report import (
    MODELLED,
    flops_by_dtype,
    model_summary,
    optimizer_half,
    pass_step,
    report_of_halves,
    throughput,
    with_accumulation,
)


def _name(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One inspection of one model on one machine.

    Attributes:
        settings: the settings.
        captured: the step; its halves are edited in place.
        stages: takes each stage.
        is_brief: compute only the numbers of the step and its halves, without texts, events, bounds and checks of the
            passes, which takes a fraction of the time.
        orders: for brief inspections, the names of a half's nodes in an order that replaces the schedule.
        passes, notes: parts of the report, collected during the inspection.
    """

    settings: Settings
    captured: CapturedStep
    stages: Stages
    is_brief: bool = False
    orders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    passes: list[PassStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, name: str, module: nn.Module, tokens: int | None) -> Report:
        """The report of the step.

        Args:
            name: name of the model.
            module: the captured module.
            tokens: tokens of one rank and micro-batch.

        Raises:
            BudgetError: the step needs more than the memory budget.
        """
        captured, settings = self.captured, self.settings
        persistent = persistent_bytes(module, captured, settings.optimizer)
        joint_flops = flops_by_dtype(captured.joint)
        self._record("joint", captured.records, captured.text, captured.context)
        always = always_bytes(persistent, settings.micro_batches)
        accumulated = always["gradients"]
        describe = brief_half_report if self.is_brief else half_report
        halves = [describe(*half) for half in self.scheduled_halves(always)]
        if accumulated:
            halves[-1] = with_accumulation(halves[-1], accumulated, settings.card)
        halves.append(self._optimizer(persistent))
        self.stages.begin("report")
        report = report_of_halves(
            halves,
            model=model_summary(name, module, captured),
            mesh=dict(settings.rules.mesh),
            card=settings.card,
            settings=settings.as_dict(),
            persistent=_row(always),
            budget_bytes=settings.budget_bytes,
            passes=self.passes,
            notes=[*MODELLED, *self._said(), *self.notes],
        )
        self._refuse_what_does_not_fit(report)
        self.stages.end()
        return replace(
            report,
            throughput=throughput(report, joint_flops, tokens, settings.card),
            worlds=self._worlds(halves),
            placements=placed_parameters(module, captured),
            reshards=reshard_counts(halves),
            stage_seconds=dict(self.stages.seconds),
        )

    def _worlds(self, halves: Sequence[HalfReport]) -> tuple[World, ...]:
        layout = self.captured.context.mesh
        return worlds_of(halves, self.settings.prices(layout), self.settings.rules.mesh, layout)

    def scheduled_halves(
        self, always: Mapping[str, int]
    ) -> list[tuple[ScheduledHalf, CategorizedMemory, list[int]]]:
        """Forward and backward with placed collectives, their memory, and the bytes that are live outside of them.

        Args:
            always: bytes by category that live throughout; see :func:`always_bytes`.
        """
        captured = self.captured
        saved_names = [_name(value) for value in output_values(captured.forward.graph)]
        context = captured.context.for_forward()
        forward = self._half("forward", captured.forward, context, always, num_results=captured.num_results)
        behind = saved_memory(saved_names, forward[1])
        saved = dict(zip(saved_names, forward[1].outputs, strict=True))
        context = captured.context.for_backward()
        backward = self._half("backward", captured.backward, context, always, saved=saved, behind=behind)
        return [forward, backward]

    def _said(self) -> list[str]:
        said = []
        if self.settings.micro_batches > 1:
            said.append(
                f"{self.settings.micro_batches} micro-batches: each backward reduces its gradients and adds them to "
                "those before (two reads and a write); memory is that of a micro-batch that is not the first."
            )
        if self.captured.choice is not None:
            said += self.captured.choice.notes()
        if self.settings.optimizer.name == "none":
            said.append("No optimizer: neither its state nor its step is counted.")
        return said

    def _record(
        self, graph: str, records: Sequence[PassRecord], before: str, ctx: PassContext, name: str = "captured"
    ) -> None:
        first = PassStep(
            graph=graph, name=name, seconds=0.0, num_nodes=before.count("\n"), num_collectives=0,
            collective_bytes=0, counts={}, skipped=(), text=before,
        )  # fmt: skip
        self.passes.append(first)
        self.passes.extend(pass_step(graph, record) for record in records)

    def _half(
        self,
        name: str,
        gm: fx.GraphModule,
        ctx: PassContext,
        always: Mapping[str, int],
        *,
        num_results: int | None = None,
        saved: Mapping[str, str] | None = None,
        behind: Sequence[SavedMemory] = (),
    ) -> tuple[ScheduledHalf, CategorizedMemory, list[int]]:
        """Runs the passes on one half; returns the half, its memory, and the bytes that are live outside of it."""
        settings, prices = self.settings, self.settings.prices(ctx.mesh)
        ctx = replace(ctx, device_type=settings.card.device_type, scratch=settings.scratch(gm))
        self.stages.begin(f"{name}: passes")
        before = "" if self.is_brief else graph_text(gm, mesh=ctx.mesh, parameters=ctx.parameters)
        pipelines = settings.pipelines()
        records = self._run(pipelines.lowering, gm, ctx, before)
        kept = kept_bytes_by_category(gm, ctx)
        outside = [total - inside for total, inside in zip(_row(always), kept, strict=True)]
        bounds: Bounds | None
        notes: Sequence[str] = ()
        if settings.plan == "unit" and self.is_brief:
            bounds, solver = None, "none"
            self._run(pipelines.merging if name in self.orders else pipelines.behind_lowering, gm, ctx, "")
            if name in self.orders:
                by_name = {node.name: node for node in gm.graph.nodes}
                apply_order(gm.graph, [by_name[node] for node in self.orders[name]])
        elif settings.plan == "unit":
            self.stages.begin(f"{name}: bound")
            device, free = settings.card.device_type, prepared_nodes(gm, ctx)
            found = problem_of_graph(gm, prices, prepared=free, device_type=device, scratch=ctx.scratch)
            bounds, solver = lower_bounds(found.problem), "none"
            notes = found.notes
            self.stages.begin(f"{name}: schedule")
            records += pipelines.behind_lowering.run(gm, ctx, before=records[-1].text)
        else:
            self.stages.begin(f"{name}: plan")
            given = pipelines.placing.given
            bounds, solver, record = self._planned(name, gm, ctx, prices, sum(outside), given)
            records += [record, *self._run(pipelines.after, gm, ctx, record.text)]
        self._record(name, records, before, ctx, "partitioned")
        self.notes.extend(f"{name}: {note}" for note in notes)
        self.stages.begin(f"{name}: cost")
        memory = categorized_memory(
            gm,
            ctx,
            device_type=settings.card.device_type,
            saved=saved,
            num_results=num_results,
            saved_memory=behind,
        )
        skipped = [sentence for record in records for sentence in record.report.skipped]
        half = ScheduledHalf(
            name=name, gm=gm, ctx=ctx, prices=prices, bounds=bounds, solver=solver, skipped=skipped,
            reshards=self.captured.reshards,
            repeats=settings.micro_batches, made_by="passes" if settings.plan == "unit" else "plan",
        )  # fmt: skip
        return half, memory, outside

    def _run(self, pipeline: Pipeline, gm: fx.GraphModule, ctx: PassContext, before: str) -> list[PassRecord]:
        if not self.is_brief:
            return pipeline.run(gm, ctx, before=before)
        pipeline.run_unchecked(gm, ctx)
        return []

    def _planned(
        self,
        half: str,
        gm: fx.GraphModule,
        ctx: PassContext,
        prices: CostModel,
        outside_bytes: int,
        given: frozenset[Fact],
    ) -> tuple[Bounds, str, PassRecord]:
        """Merges and orders the collectives of a half by cost, within the rest of the budget."""
        budget = self.settings.budget_bytes
        left: int | str = "default" if budget is None else max(budget - outside_bytes, 1)
        ctx = replace(ctx, prices=prices)
        try:
            (record,) = Pipeline(PlanCollectives(memory_budget=left), given=given).run(gm, ctx)
        except InfeasibleBudgetError as error:
            assert budget is not None
            needed = error.smallest_bytes + outside_bytes
            raise BudgetError(budget, needed, f"the {half} of the leanest plan that was found") from error
        assert isinstance(record.report.planned, PlannedGraph)
        plan = record.report.planned.plan
        return plan.bounds, plan.solver, record

    def _optimizer(self, persistent: Mapping[str, int]) -> HalfReport:
        kind, card = self.settings.optimizer, self.settings.card
        seconds = step_seconds(kind, persistent["trained"], persistent["elements"], card)
        live = _row({name: persistent[name] for name in ("parameters", "optimizer", "gradients", "inputs")})
        return optimizer_half(kind.name, seconds, live, kind.flops_per_element * persistent["elements"])

    def _refuse_what_does_not_fit(self, report: Report) -> None:
        budget = self.settings.budget_bytes
        if budget is not None and report.memory.peak_bytes > budget:
            which = "the schedule of the passes" if self.settings.plan == "unit" else "the plan"
            raise BudgetError(budget, report.memory.peak_bytes, which)


def _row(values: Mapping[str, int]) -> list[int]:
    return [values.get(name, 0) for name in CATEGORIES]
