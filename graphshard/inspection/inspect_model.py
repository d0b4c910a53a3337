"""``graphshard.inspect``: predicts a training step on N devices, without a device or a process group.

The model is captured on fake tensors, sharded and scheduled by the passes of training, and priced with a hardware card.
Each half is priced by itself. A step is all micro-batches of both halves, then the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._compat import lazy_graph_modules
from ..capture import capture_step, no_garbage_collection
from ..cost import CollectiveTables, HardwareCard, warn_of
from ..errors import BudgetError
from ..ir import remembered_results
from ..pipeline import Pass
from ..progress import Stages
from ..report import Report
from ..setting_checks import AUTO_PLACEMENTS
from .placement_choice import PlacementChoice, PlacementChooser
from .settings import (
    count_tokens,
    plain_inputs,
    read_settings,
    refuse_sharded,
    refuse_what_is_known,
    settings_of,
)
from .step_choice import choose_inspected
from .step_inspection import Inspection


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
    passes: Sequence[Pass] | Mapping[str, Sequence[Pass]] = (),
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
        passes: your own passes, as in the backend's option of this name. Placements are chosen without them.
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
        passes=passes,
    )
    settings = replace(settings, runs_kernels=True)
    stages = Stages(progress)
    choice = None
    if settings.rules.placements == AUTO_PLACEMENTS:
        stages.begin("placements")
        chooser = PlacementChooser(module=module, args=args, kwargs=kwargs, loss=loss)
        choice = chooser.choose(replace(settings, passes={}))
        settings = replace(settings, rules=replace(settings.rules, placements=choice.placements))
    stages.begin("capture")
    with lazy_graph_modules(), no_garbage_collection(), remembered_results():
        captured = capture_step(
            module, args, kwargs, rules=settings.rules, loss=loss, checkpoint=settings.checkpoint, needs_loss=True,
            device_type=settings.card.device_type, choose=partial(choose_inspected, settings, module),
            pipeline=settings.pipelines().joint,
        )  # fmt: skip
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
    choice = PlacementChooser(module=module, args=args, kwargs=kwargs, loss=loss).choose(settings)
    budget, needed = settings.budget_bytes, choice.candidates[0].peak_bytes
    if settings.plan == "unit" and budget is not None and needed is not None and needed > budget:
        raise BudgetError(budget, needed, f"the leanest of the placements ({choice.candidates[0].name})")
    return choice
