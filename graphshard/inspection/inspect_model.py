"""``graphshard.inspect``: predicts a training step on N devices, without a device or a process group.

The model is captured on fake tensors, sharded and scheduled by the passes of training, and priced with a hardware card.
Each half is priced by itself. A step is all micro-batches of both halves, then the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._compat import lazy_graph_modules
from ..backend import LOWERING, BackendOptions, half_pipeline
from ..capture import CapturedStep, capture_step, no_garbage_collection
from ..cost import CollectiveTables, CostModel, HardwareCard, warn_of
from ..errors import BudgetError, InfeasibleBudgetError
from ..ir import apply_order, graph_text, output_values, remembered_results
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
from .placement_choice import PlacementChoice, choose
from .placement_search import PlacementSearch
from .settings import (
    AUTO_PLACEMENTS,
    Settings,
    count_tokens,
    plain_inputs,
    read_settings,
    refuse_sharded,
    refuse_what_is_known,
    settings_of,
)
from .step_choice import choose_inspected
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


def inspect(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    hardware: str | Path | HardwareCard = "h100-sxm",
    tables: str | Path | CollectiveTables | None = None,
    units: Sequence[str] = (),
    loss: Callable[[Any], torch.Tensor] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    optimizer: str = "adamw",
    micro_batches: int = 1,
    memory_budget: int | str | None = None,
    plan: str = "unit",
    checkpoint: str | Sequence[str] = (),
    placements: Mapping[str, Any] | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Predicts one training step of a model on the ranks of a mesh.

    Args:
        model: a module, on the meta device or any other (it is neither run nor changed); a module given to
            ``fully_shard``, from which mesh, units and policies are read; or an exported program.
        args, kwargs: inputs of one rank and micro-batch; only shape and dtype of tensors count. None takes the example
            inputs of an exported program.
        mesh: sizes of the axes, outermost first: {"shard": 64}, {"replicate": 4, "shard": 16}; with placements a
            further axis: {"shard": 8, "tp": 8}.
        hardware: a card, its name or its file.
        tables: measured times of collectives (CSV), used where they have rows.
        units: patterns of module paths ("layers.*"). Each module that matches is a unit, as if ``fully_shard`` were
            called on it. All other parameters belong to the root.
        loss: turns the model's output into a scalar. None if the model returns one, or an output that holds one: as
            ``.loss`` or ``["loss"]``, or as its only scalar of floats.
        mp_policy, reshard_after_forward: as in ``fully_shard``.
        optimizer: one of :data:`graphshard.inspection.optimizers.OPTIMIZERS`; its state counts.
        micro_batches: runs of forward and backward before the optimizer. Each backward reduces its gradients and adds
            them to those of earlier micro-batches.
        memory_budget: the most a rank may hold, everything included: bytes, or a text like "60GiB".
        plan: "unit" for the default schedule of training (one bucket a unit), "auto" for buckets and an order chosen by
            cost.
        checkpoint: patterns of modules whose activations are recomputed in the backward, besides those that the model
            itself checkpoints; "units" for every unit.
        placements: how the model lies on the further axis of the mesh, as in ``parallelize``: placements or styles by
            name, or a ready plan ("llama"), or "auto" for the cheapest. The ranks of that axis share the inputs.
        progress: takes the name of each stage as it begins.

    Raises:
        CaptureError: the model is not one graph, its shapes depend on data, the inputs do not fit, or its result is no
            loss.
        ShardingError: the mesh is impossible, does not fill the nodes of the card, or lacks an axis for the placements;
            patterns match no module; placements do not fit the model.
        UnsupportedShardingError: a sharded model that cannot be followed; says why.
        CardError, TableError, OptionError, OptionTypeError: an input cannot be read.
        BudgetError: the step needs more than ``memory_budget``.
    """
    name, module, args, kwargs, found = plain_inputs(model, args, kwargs)
    if found is not None:
        refuse_what_is_known(
            mesh=mesh, units=units or None, mp_policy=mp_policy, reshard=reshard_after_forward,
            placements=placements,
        )  # fmt: skip
        mesh = found.mesh
    settings = read_settings(
        rules=found,
        mesh={"shard": 64} if mesh is None else mesh,
        hardware=hardware,
        tables=tables,
        units=units,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        optimizer=optimizer,
        micro_batches=micro_batches,
        memory_budget=memory_budget,
        plan=plan,
        checkpoint=checkpoint,
        placements=placements,
    )
    settings = replace(settings, runs_kernels=True)
    stages = Stages(progress)
    choice = None
    if settings.rules.placements == AUTO_PLACEMENTS:
        stages.begin("placements")
        choice = _choose(settings, module, args, kwargs, loss)
        settings = replace(settings, rules=replace(settings.rules, placements=choice.placements))
    stages.begin("capture")
    with lazy_graph_modules(), no_garbage_collection(), remembered_results():
        captured = _captured(settings, module, args, kwargs, loss)
        inspection = Inspection(settings=settings, captured=captured, stages=stages)
        report = inspection.report(name, module, count_tokens(args, kwargs))
    warn_of(settings.told, stacklevel=2)
    if choice is not None:
        report = replace(report, candidates=choice.candidates, notes=(*report.notes, choice.note))
    return report


def choose_placements(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> PlacementChoice:
    """What ``inspect(placements="auto")`` chooses; ``options`` are those of :func:`inspect` by name.

    Raises:
        GraphShardError: as :func:`inspect`; a BudgetError only with ``plan="unit"``.
    """
    _, module, args, kwargs, found = plain_inputs(model, args, kwargs)
    refuse_sharded(found)
    settings = settings_of("choose_placements", {**options, "placements": AUTO_PLACEMENTS}, mesh)
    choice = _choose(settings, module, args, kwargs, loss)
    budget, needed = settings.budget_bytes, choice.candidates[0].peak_bytes
    if settings.plan == "unit" and budget is not None and needed is not None and needed > budget:
        raise BudgetError(budget, needed, f"the leanest of the placements ({choice.candidates[0].name})")
    return choice


def _choose(
    settings: Settings,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> PlacementChoice:
    search = PlacementSearch(settings=settings, module=module, args=args, kwargs=kwargs, loss=loss)
    return choose(settings, module, partial(_predict, args=args, kwargs=kwargs, loss=loss), search.best)


def _captured(
    settings: Settings,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    is_brief: bool = False,
) -> CapturedStep:
    return capture_step(
        module, args, kwargs, rules=settings.rules, loss=loss, checkpoint=settings.checkpoint, needs_loss=True,
        device_type=settings.card.device_type, choose=partial(choose_inspected, settings, module), is_brief=is_brief,
    )  # fmt: skip


def _predict(
    settings: Settings,
    module: nn.Module,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> Report:
    """A report with the numbers of the step alone."""
    with lazy_graph_modules(), no_garbage_collection(), remembered_results():
        captured = _captured(settings, module, args, kwargs, loss, is_brief=True)
        inspection = Inspection(settings=settings, captured=captured, stages=Stages(None), is_brief=True)
        return inspection.report(type(module).__name__, module, None)


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
        steps = half_pipeline(BackendOptions(hardware=None, bucket="unit")).passes[len(LOWERING.passes) :]
        records = self._run(LOWERING, gm, ctx, before)
        kept = kept_bytes_by_category(gm, ctx)
        outside = [total - inside for total, inside in zip(_row(always), kept, strict=True)]
        bounds: Bounds | None
        notes: Sequence[str] = ()
        if settings.plan == "unit" and self.is_brief:
            bounds, solver = None, "none"
            rest = steps[:-1] if name in self.orders else steps
            self._run(Pipeline(*rest, given=LOWERING.facts_at_end), gm, ctx, "")
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
            rest_of_passes = Pipeline(*steps, given=LOWERING.facts_at_end)
            records += rest_of_passes.run(gm, ctx, before=records[-1].text)
        else:
            self.stages.begin(f"{name}: plan")
            bounds, solver, record = self._planned(name, gm, ctx, prices, sum(outside), LOWERING.facts_at_end)
            records.append(record)
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
