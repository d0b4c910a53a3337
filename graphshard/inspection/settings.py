"""Reads and checks the settings of an inspection, and its model with inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._compat import tree_leaves, tree_map
from ..backend import BackendOptions, half_pipelines, joint_pipeline
from ..budget_text import parse_bytes
from ..capture import ShardingRules, can_reshard, is_sharded, plain_copy, plain_module
from ..cost import CollectiveTables, CostModel, HardwareCard, card_of, tables_of
from ..errors import CaptureError, OptionError, UnsupportedShardingError
from ..ir import MeshLayout
from ..memory import KernelScratch, scratch_of_card
from ..parallel import Stated
from ..passes import BucketCollectives, InsertShards
from ..pipeline import Pass, Pipeline
from ..setting_checks import check_nodes, check_step
from .optimizers import OPTIMIZERS, OptimizerKind

#: Model, positional and keyword inputs for a batch size.
Inputs = tuple[nn.Module | torch.export.ExportedProgram, Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of an inspection, checked.

    ``runs_kernels``: kernels of the CPU are run to measure what they allocate, if the card is that of this machine.
    ``passes`` are the user's, by the name of the pass that they follow. ``told`` collects what the tables lack, for one
    warning at the end.
    """

    card: HardwareCard
    tables: CollectiveTables | None
    rules: ShardingRules
    optimizer: OptimizerKind
    micro_batches: int
    budget_bytes: int | None
    plan: str
    checkpoint: tuple[str, ...]
    runs_kernels: bool = False
    passes: Mapping[str, tuple[Pass, ...]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list, compare=False, repr=False)

    def pipelines(self) -> StepPipelines:
        """The passes on the step.

        Raises:
            OptionError: a pass of the user names no pass that it could follow.
            PipelineError: a pass of the user requires what does not hold there, or breaks what a later pass requires.
        """
        if self.plan == "unit":
            options = BackendOptions(hardware=None, bucket="unit", passes=self.passes)
        else:
            options = BackendOptions(hardware=self.card, bucket="auto", passes=self.passes)
        halves = half_pipelines(options)
        names = [step.name for step in halves.before.passes]
        is_merged = BucketCollectives.name in names
        lowering, merging = halves.before.split(
            names.index(BucketCollectives.name) if is_merged else len(names)
        )
        joint = joint_pipeline(options).passes
        return StepPipelines(
            joint=Pipeline(InsertShards(), *joint), lowering=lowering, merging=merging, placing=halves.placing,
            after=halves.after,
        )  # fmt: skip

    @property
    def limit_bytes(self) -> int:
        """The most that a rank may hold: the budget, or the capacity of the card."""
        return int(self.card.memory_bytes) if self.budget_bytes is None else self.budget_bytes

    def prices(self, layout: MeshLayout) -> CostModel:
        """The cost model of this machine and mesh."""
        return CostModel.of_mesh(self.card, layout, tables=self.tables, told=self.told)

    def scratch(self, gm: fx.GraphModule) -> KernelScratch:
        """What the kernels of a graph allocate for themselves on the machine of the card."""
        card = self.card
        return scratch_of_card(card.machine, card.file, gm if self.runs_kernels else None, card.device_type)

    def as_dict(self) -> dict[str, Any]:
        """The settings as texts and numbers, for the report."""
        policy = self.rules.mp_policy
        return {
            "units": list(self.rules.units),
            "placements": _placements_text(self.rules.placements),
            "reshard_after_forward": self.rules.reshard_after_forward,
            "param_dtype": _dtype_name(policy.param_dtype),
            "reduce_dtype": _dtype_name(policy.reduce_dtype),
            "optimizer": self.optimizer.name,
            "micro_batches": self.micro_batches,
            "memory_budget": self.budget_bytes,
            "plan": self.plan,
            "checkpoint": list(self.checkpoint),
            "tables": None if self.tables is None else self.tables.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPipelines:
    """The passes on a step, in parts; the user's are among them.

    Attributes:
        joint: those on the joint graph.
        lowering: those on a half before collectives are merged.
        merging: those that merge collectives, by unit.
        placing: the one that places collectives.
        after: those behind it.
    """

    joint: Pipeline
    lowering: Pipeline
    merging: Pipeline
    placing: Pipeline
    after: Pipeline

    @property
    def behind_lowering(self) -> Pipeline:
        """All passes on a half behind ``lowering``."""
        steps = (*self.merging.passes, *self.placing.passes, *self.after.passes)
        return Pipeline(*steps, given=self.lowering.facts_at_end)


def refuse_sharded(found: ShardingRules | None) -> None:
    """Refuses a sharded model, for functions that look at several meshes.

    Raises:
        UnsupportedShardingError: the model was given to ``fully_shard``, which fixed its mesh.
    """
    if found is not None:
        raise UnsupportedShardingError(
            "the model has been through fully_shard, which fixed its mesh: give it as it was before, and say with "
            "units=[...], mp_policy=... and reshard_after_forward=... what fully_shard was told"
        )


def refuse_what_is_known(**given: Any) -> None:
    """Refuses options that a sharded model already has; ``given`` holds options, None if not given.

    Raises:
        OptionError: an option is given.
    """
    named = {"reshard": "reshard_after_forward"}
    if double := [named.get(name, name) for name, value in given.items() if value is not None]:
        raise OptionError(
            f"{', '.join(double)}: the model has been through fully_shard, which was told already; leave it out"
        )


def read_settings(
    *,
    rules: ShardingRules | None,
    mesh: Mapping[str, int],
    hardware: str | Path | HardwareCard,
    tables: str | Path | CollectiveTables | None,
    units: Sequence[str],
    mp_policy: MixedPrecisionPolicy | None,
    reshard_after_forward: bool | None,
    optimizer: str,
    micro_batches: int,
    memory_budget: int | str | None,
    plan: str,
    checkpoint: str | Sequence[str],
    placements: Mapping[str, Any] | str | None = None,
    passes: Sequence[Pass] | Mapping[str, Sequence[Pass]] = (),
) -> Settings:
    """Checks the arguments of :func:`graphshard.inspect`; ``rules`` of a sharded model replace its own."""
    card = card_of(hardware)
    units = (units,) if isinstance(units, str) else tuple(units)
    rules = rules or ShardingRules(
        mesh=mesh,
        units=units,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        reshard_after_forward=reshard_after_forward,
        placements=placements,
    )
    check_nodes(mesh, int(card.ranks_per_node), card.name)
    check_step(micro_batches=micro_batches, plan=plan, optimizer=optimizer)
    patterns = (checkpoint,) if isinstance(checkpoint, str) else tuple(checkpoint)
    units = tuple(rules.units)
    if "units" in patterns and not units:
        raise OptionError('checkpoint="units" needs units: give their patterns, units=["layers.*"]')
    patterns = tuple(
        dict.fromkeys(each for one in patterns for each in (units if one == "units" else (one,)))
    )
    settings = Settings(
        card=card,
        tables=tables_of(tables),
        rules=rules,
        optimizer=OPTIMIZERS[optimizer],
        micro_batches=micro_batches,
        budget_bytes=None if memory_budget is None else parse_bytes(memory_budget),
        plan=plan,
        checkpoint=patterns,
        passes=BackendOptions.parse({"hardware": None, "passes": passes}).passes,
    )
    settings.pipelines()  # passes that do not fit are refused before anything runs
    return settings


def settings_of(who: str, options: Mapping[str, Any], mesh: Mapping[str, int]) -> Settings:
    """Checks options of :func:`graphshard.inspect` by name; those that are missing are as there.

    Args:
        who: the function that takes them, for messages.
        options: without mesh, loss and progress.
        mesh: the mesh.

    Raises:
        OptionError: there is no such option, or its value is wrong.
    """
    known: dict[str, Any] = {
        "hardware": "h100-sxm", "tables": None, "units": (), "mp_policy": None, "reshard_after_forward": None,
        "optimizer": "adamw", "micro_batches": 1, "memory_budget": None, "plan": "unit", "checkpoint": (),
        "placements": None,
    }  # fmt: skip
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(f"{who} has no option {', '.join(unknown)}; known: {', '.join(known)}")
    return read_settings(rules=None, mesh=mesh, **{**known, **options})


def plain_inputs(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> tuple[str, nn.Module, Sequence[Any], Mapping[str, Any], ShardingRules | None]:
    """Name, module and inputs of the model to inspect, and its rules if it is sharded."""
    if isinstance(model, torch.export.ExportedProgram):
        example_args, example_kwargs = model.example_inputs or ((), {})
        is_given = args is not None or kwargs is not None
        args = (args or ()) if is_given else example_args
        kwargs = (kwargs or {}) if is_given else example_kwargs
        return "exported program", plain_module(model), args, kwargs, None
    if is_sharded(model):
        plain, rules = plain_copy(model)
        return type(plain).__name__, plain, args or (), kwargs or {}, rules
    return type(model).__name__, model, args or (), kwargs or {}, None


def _placements_text(placements: Mapping[str, Any] | str | Stated | None) -> str | list[str] | None:
    if placements is None or isinstance(placements, str):
        return placements
    if isinstance(placements, Stated):
        return placements.texts()
    return [f"{name}: {each!r}" for name, each in placements.items()]


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Later:
    """A loss that is found in the process that captures.

    Attributes:
        load: returns the loss. It must pickle; the loss need not.
    """

    load: Callable[[], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class resized:  # noqa: N801 - used as a function, and must pickle
    """A ``make`` for :func:`sweep` that resizes dim 0 of every tensor among example inputs.

    Attributes:
        example: a function that returns model, positional and keyword inputs.
    """

    example: Callable[[], Inputs]

    def __call__(self, batch: int) -> Inputs:
        """The example with another batch size.

        Raises:
            CaptureError: the tensors differ in the size of dim 0, or there are none.
        """
        model, args, kwargs = self.example()
        named = [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]
        leaves = [(name, leaf) for name, value in named for leaf in tree_leaves(value)]
        tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
        sizes = {tuple(value.shape[:1]) for _, value in tensors}
        if len(sizes) != 1 or sizes == {()}:
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors)
            raise CaptureError(
                f"the batch cannot be resized: dim 0 of the inputs ({shapes or 'no tensors'}) is not one size; "
                "give a factory that takes the batch size: def factory(batch)"
            )

        def fitted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            shape = (batch, *value.shape[1:])
            return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)

        args, kwargs = tree_map(fitted, (tuple(args), dict(kwargs)))
        return model, args, kwargs


def count_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Elements of the first integer input, inside of containers too; None without one."""
    for value in tree_leaves((tuple(args), dict(kwargs))):
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim():
            return value.numel()
    return None


def classes_of_meshes(settings: Sequence[Settings], is_extended: bool) -> list[list[int]]:
    """Indices of the meshes that share a capture; their placements are equal.

    With plans none do, since units may keep parameters on some. With gather extensions none do, since what they compute
    has the sizes of shards.
    """
    classes: list[list[int]] = []
    for index, one in enumerate(settings):
        for known in classes:
            first, is_alone = settings[known[0]].rules, is_extended or one.plan != "unit"
            is_alike = first.placements == one.rules.placements and can_reshard(first.mesh, one.rules.mesh)
            if is_alike and not is_alone:
                known.append(index)
                break
        else:
            classes.append([index])
    return classes
