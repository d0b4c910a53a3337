"""The ``torch.compile`` backend: joint passes, partition, passes on each half, agreement, Inductor.

Dynamo hands over one graph per piece of the model. Inductor's own decompositions, partitioner and
caches stay in use: the joint passes hang on its ``joint_custom_pre_pass``, and the passes on the
forward and the backward run in front of its inner compiler, before its cache is looked up, so a
cached artefact is one of exactly the planned graph (docs/decisions/0001).
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .. import passes
from .._compat import breaks_off, group_by_name, uses_gloo
from ..coordination import agree_on_group, refusing
from ..cost import HardwareCard
from ..errors import OptionError, ScheduleOrderError
from ..fsdp import ROOT, Tree, unit_of
from ..ir import (
    REDUCE_GRAD,
    REDUCE_SCATTER,
    UNSHARD,
    collective_text,
    copy_graph,
    graph_text,
    group_labels,
    group_name,
    is_collective,
    node_names,
    output_values,
    text_fingerprint,
)
from ..memory import kept_inputs, memory_timeline, outputs_with_parameters, step_bytes, take_back_donations
from ..pipeline import (
    PassContext,
    PassRecord,
    Pipeline,
    context_from_shard_ops,
    pieces_of,
    read_shards_as_they_are,
    reduced_parameters,
    shards_behind,
)
from ..planner import PlannedGraph, check_budget
from ..progress import told
from .dtensor_boundary import cross_boundary
from .dynamic_sizes import RunningSizes, has_symbolic_sizes
from .emitted_order import emitted_order, order_difference, planned_order
from .half import Half, Variant
from .inductor_config import (
    CustomGraphPass,
    compile_fx,
    compile_fx_inner,
    compile_later,
    config_patches,
    functorch_patch,
    memory_patch,
    pinning_patch,
    type_rng_states,
)
from .model_labels import label_models
from .options import BackendOptions
from .step_planner import Planning

JOINT_PIPELINE = Pipeline(
    passes.MergeWaits(), passes.MergeUnshards(), passes.SpreadParameters(), passes.TagRecompute()
)

#: What each half goes through before its collectives are merged and placed.
LOWERING = Pipeline(
    passes.LowerShards(), passes.MergeSums(), passes.JoinPointwise(), given=JOINT_PIPELINE.facts_at_end
)


def half_pipeline(options: BackendOptions) -> Pipeline:
    """The passes that run on the forward and on the backward; the last one places the collectives."""
    steps: list[Any] = []
    if options.bucket == "unit":
        steps.append(passes.BucketCollectives())
    if options.hardware is not None:
        is_free = options.bucket == "auto"
        budget = "default" if options.memory_budget is None else options.memory_budget
        place = passes.PlanCollectives(
            merge=is_free,
            memory_budget=budget,
            max_gathers=options.limit_all_gathers,
            backward_prefetch=options.backward_prefetch or "",
            move_compute=options.move_compute,
        )
        steps.append(place)
    elif options.overlap is False:
        steps.append(passes.ScheduleCollectives(prefetch=0, reductions_in_flight=1))
    else:
        steps.append(passes.ScheduleCollectives(memory="any" if options.overlap == "always" else "free"))
    return Pipeline(*LOWERING.passes, *steps, given=LOWERING.given)


def graphshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="graphshard", options={...})``.

    torch.compile raises a ``BackendCompilerFailed`` of its own for these errors, with them as ``inner_exception``.

    Args:
        gm: what Dynamo captured.
        example_inputs: its inputs.
        options: see :class:`graphshard.backend.options.BackendOptions`.
        mode: refused: the modes of ``torch.compile`` are Inductor's.

    Raises:
        OptionError: an unknown option or value, or a mode.
        AgreementError: the ranks would issue different collectives.
        RefusedError: another rank has stopped with an error.
        InfeasibleBudgetError: no plan keeps the user's memory budget.
    """
    if mode is not None:
        raise OptionError(
            f"graphshard backend: mode={mode!r} is for Inductor alone; give the settings that it stands for "
            f"(torch._inductor.list_mode_options({mode!r})) in options={{'inductor': {{...}}}}"
        )
    parsed = BackendOptions.parse(options)
    patches = config_patches(parsed.inductor, has_budget=parsed.memory_budget is not None)
    _warn_if_never_sharded(gm, example_inputs)
    trees = _trees_of(example_inputs)
    _warn_of_another_device(parsed.hardware, trees, example_inputs)
    is_shared = parsed.verify != "off"
    for tree in trees:
        tree.is_broken |= breaks_off(gm)
    compilation = _Compilation(
        options=parsed,
        models=label_models(trees) if is_shared and parsed.hardware is not None else {},
        groups=tuple(dict.fromkeys(name for tree in trees for name in tree.groups())) if is_shared else (),
        index=_next_index(parsed.dump),
        patches=patches,
        parameters=_parameters_of(trees),
        is_broken=any(tree.is_broken for tree in trees),
        waiting=_waiting_units(example_inputs),
    )
    patches["joint_custom_pre_pass"] = _JointPasses(compilation)

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        with functorch_patch():
            return compile_fx(graph, inputs, inner_compile=compilation.compile_half, config_patches=patches)

    with compilation.refusing("", gm):
        return cross_boundary(gm, example_inputs, compile_graph, compilation.regathered)


def _warn_if_never_sharded(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    plain = [value for value in example_inputs if type(value) is torch.nn.Parameter and value.requires_grad]
    sharded = any(isinstance(value, dist.tensor.DTensor) for value in example_inputs)
    if plain and not sharded and not gm.graph.find_nodes(op="call_function", target=UNSHARD):
        warnings.warn(
            f"graphshard: none of the {len(plain)} parameters of this graph is sharded, so it is compiled "
            "by Inductor alone; call graphshard.fully_shard on the model before torch.compile",
            stacklevel=2,
        )


def _warn_of_another_device(
    card: HardwareCard | None, trees: Sequence[Tree], example_inputs: Sequence[Any]
) -> None:
    if card is None:
        return
    units = [unit for tree in trees for unit in tree.units() if unit.slots]
    devices = {(unit.compute_device or unit.slots[0].param.device).type for unit in units}
    if not trees:  # one rank: of its inputs, parameters may be offloaded and the others not
        devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
        devices = set() if card.device_type in devices else devices
    if others := sorted(devices - {card.device_type}):
        warnings.warn(
            f"graphshard: option hardware={card.name!r} is the card of a {card.device_type} device, but the model "
            f"computes on {', '.join(others)}: times and memory of its plans are not those of this machine; take one "
            "of its cards (`graphshard cards` lists them, `graphshard calibrate` makes one)",
            stacklevel=2,
        )


def _trees_of(inputs: Sequence[Any]) -> list[Tree]:
    """The models that handles among the inputs belong to, in the order of the inputs."""
    return list({id(unit.tree): unit.tree for unit in filter(None, map(unit_of, inputs))}.values())


def _parameters_of(trees: Sequence[Tree]) -> dict[str, str]:
    """The sharded parameters of models by name, and the labels of their units."""
    return {slot.name: unit.label for tree in trees for unit in tree.units() for slot in unit.slots}


def _waiting_units(inputs: Sequence[Any]) -> frozenset[str]:
    """Labels of the units whose gradients wait for a later micro-batch; none of several models."""
    units = [unit for unit in map(unit_of, inputs) if unit is not None]
    is_one_model = len({id(unit.tree) for unit in units}) == 1
    return frozenset(unit.label for unit in units if is_one_model and not unit.reduce_grads)


def _next_index(folder: Path | None) -> int:
    """Number of the first graph not yet dumped into ``folder``."""
    if folder is None:
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"graphshard backend: option dump={str(folder)!r} cannot be made ({error.strerror}); "
            "give the path of a folder, or of one that may be made"
        ) from error
    return next(index for index in itertools.count() if not any(folder.glob(f"graph{index}.*")))


@dataclass
class _Compilation:
    """One graph of Dynamo on its way through the joint passes and the two halves."""

    options: BackendOptions
    index: int
    patches: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    """By process group, what tells the models that the graph is a part of from others."""
    groups: tuple[str, ...] = ()
    """Process groups of the models, whose ranks are told what stops this one; none where ranks do not meet."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The sharded parameters of the models that the graph is a part of, and the units that they are of."""
    is_broken: bool = False
    """Dynamo has cut a forward of these models into several graphs."""
    waiting: frozenset[str] = frozenset()
    """Labels of the model's units whose gradients wait for a later micro-batch."""
    context: PassContext = field(default_factory=PassContext)
    regathered: set[str] = field(default_factory=set)
    """Names of the parameters whose shards the forward keeps for the backward."""
    resident: list[Any] = field(default_factory=list)
    """Values of the inputs that live through the whole step."""
    saved_parameters: frozenset[str] = frozenset()
    """Outputs of the forward, inputs of the backward, in the memory of full parameters."""
    kept_between: frozenset[str] = frozenset()
    """Units that keep their parameters between micro-batches."""
    chosen: str = ""
    """What was chosen for both halves, as all ranks have it."""
    variants: Counter[str] = field(default_factory=Counter)
    """How often each half was compiled: once for each state its units were in."""

    @property
    def planning(self) -> Planning:
        """Decisions by cost, for all ranks."""
        card = self.options.hardware
        assert card is not None
        is_checked = self.options.verify != "off"
        return Planning(
            card=card,
            halves=half_pipeline(self.options),
            is_shared=is_checked,
            what=f"graph {self.index}",
            models=self.models,
            chosen=self.chosen,
        )

    def refusing(self, half: str, gm: fx.GraphModule, verb: str = "compile") -> AbstractContextManager[None]:
        """What stops this rank in here reaches those that communicate with it in the model, or in ``gm``."""
        own = map(group_name, filter(is_collective, gm.graph.nodes)) if self.groups else ()
        return refusing(dict.fromkeys([*self.groups, *own]), f"{verb} graph {self.index}{half}")

    def run_joint(self, gm: fx.GraphModule) -> None:
        """The joint passes; remembers mesh and parameters for the halves."""
        with (
            self.refusing(" (joint)", gm),
            told(f"graph {self.index} (joint): {len(gm.graph.nodes)} nodes, passes"),
        ):
            self._run_joint(gm)

    def _run_joint(self, gm: fx.GraphModule) -> None:
        read_shards_as_they_are(gm)
        self.context = context_from_shard_ops(gm, full_checks=self.options.verify == "full")
        self._dump("joint", "0-captured", self._text(gm, self.context))
        first, tag = JOINT_PIPELINE.split(-1)
        records = first.run(gm, self.context)
        choice = None
        # Of a part of a model's step nobody knows what the rest holds; ranks that do not meet must not differ.
        meets = self.options.verify != "off"
        budget, is_whole = self.options.memory_budget, meets and self._is_whole_step()
        is_chosen = budget is not None or is_whole
        if self.options.hardware is not None and self.context.first_gradient is not None and is_chosen:
            waiting = self.waiting if meets else frozenset()
            kept, choice = self.planning.choose(
                gm, self.context, tag, budget, waiting, keeps_between=is_whole
            )
            records += kept
            tag = choice.extended(tag) if choice is not None else tag
            self.context = context_from_shard_ops(gm, full_checks=self.context.full_checks)
        self._dump_records("joint", records + tag.run(gm, self.context))
        self.kept_between = frozenset(choice.kept_between if choice is not None else ())
        inputs = gm.graph.find_nodes(op="placeholder")
        self.resident = [node.meta.get("val") for node in inputs if node.name.startswith("primals_")]
        peak = choice.peak_bytes if choice is not None else None
        self.context = replace(
            self.context, pieces=pieces_of(gm), default_peak_bytes=peak, resident_bytes=step_bytes(gm)
        )
        if choice is not None:
            self.chosen = f"{choice} {choice.input_bytes}"
            self._dump("joint", "choice", f"{choice}\n")

    def _is_whole_step(self) -> bool:
        """Whether nothing of the model's step is in another graph, as far as can be told.

        Parameters that this graph does not read may be unused, or another graph's. They are unused where Dynamo has
        not cut the forward, and units of the graph have them, or the root: who compiles blocks one by one leaves out
        whole units.
        """
        read = {binding.name for binding in self.context.parameters}
        units = {binding.unit for binding in self.context.parameters}
        missing = {unit for name, unit in self.parameters.items() if name not in read}
        if not missing:
            return True
        return not self.is_broken and bool(units - {ROOT}) and missing <= units | {ROOT}

    def compile_half(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Inductor's inner compiler; a half with shard ops becomes a :class:`Half`.

        The forward is compiled now, since the backward is traced with the strides of its results; a
        backward when it first runs, when the state of its units is known.
        """
        type_rng_states(gm)
        is_backward = bool(kwargs.get("is_backward"))
        half = "backward" if is_backward else "inference" if kwargs.get("is_inference") else "forward"
        if is_backward:
            take_back_donations(gm, self.saved_parameters)
        else:
            self.saved_parameters = outputs_with_parameters(gm)
        if not any(node.target in (UNSHARD, REDUCE_GRAD) for node in gm.graph.nodes):
            with self.refusing(f" ({half})", gm):
                return self._compile(
                    Variant(gm, list(example_inputs)), half, kwargs, is_sharded=_communicates(gm)
                )
        later = compile_later(self.patches)
        result = Half(
            gm=gm,
            example_inputs=list(example_inputs),
            is_backward=is_backward,
            pieces=frozenset(piece.placeholder for piece in self.context.pieces),
            kept_between=self.kept_between if half == "forward" else None,
            counts_held=self.options.hardware is not None and self.options.memory_budget is not None,
            compile_variant=lambda variant: self._compile_variant(variant, half, kwargs, later),
            what=f"graph {self.index} ({half})",
        )
        if not is_backward:
            result.compile()
        return result

    def _compile_variant(
        self, variant: Variant, half: str, kwargs: dict[str, Any], later: Callable[[], Any]
    ) -> Any:
        with later(), self.refusing(f" ({half})", variant.gm):
            return self._compile(variant, half, dict(kwargs), is_sharded=True)

    def _compile(self, variant: Variant, half: str, kwargs: dict[str, Any], *, is_sharded: bool) -> Any:
        """The passes on one half, the agreement of the ranks, Inductor, the check of the order."""
        gm, unreduced = variant.gm, variant.unreduced_outputs
        context = self.context.for_backward(unreduced) if half == "backward" else self.context.for_forward()
        context = replace(context, held_bytes=variant.held_bytes)
        dumped_as = self._variant_name(half)
        records: list[PassRecord] = []
        if is_sharded:
            self._dump(dumped_as, "0-partitioned", self._text(gm, context))
            lower, place = half_pipeline(self.options).split(-1)
            with told(f"graph {self.index} ({dumped_as}): {len(gm.graph.nodes)} nodes, passes"):
                records = lower.run(gm, context)
                records += self._place(place, gm, context, half)
            variant.check = self._check_of(gm, context, half)
            self._dump_records(dumped_as, records)
            self._dump_memory(gm, dumped_as)
            self._dump_plan(records[-1], dumped_as, group_labels(gm, context.mesh))
            if self.options.verify != "off":
                variant.collectives = self._agree(gm, context, half)
            if groups := _gloo_groups(gm):
                hand_over = Pipeline(passes.ExchangeReductions(groups=groups), given=place.facts_at_end)
                self._dump_records(dumped_as, hand_over.run(gm, context), first=len(records) + 1)
        elif self.options.memory_budget is not None:
            check_budget(gm, context, self.options.memory_budget)
        if half == "forward":
            kept = [value for value in output_values(gm.graph) if isinstance(value, fx.Node)]
            bindings = [context.binding(value.name) for value in kept if value.op == "placeholder"]
            self.regathered.update(binding.name for binding in bindings if binding is not None)
        planned = planned_order(gm)
        # A kernel fused of parts that only read the same values may hold results much longer than planned.
        has_budget = self.options.memory_budget is not None
        fusions = memory_patch(self.options.inductor) if has_budget else nullcontext()
        inductor = told(f"graph {self.index} ({dumped_as}): Inductor")
        with inductor, fusions, pinning_patch(releases=has_budget and _is_on_gloo(gm)):
            compiled = compile_fx_inner(gm, variant.example_inputs, **kwargs)
        if planned and self.options.verify != "off":
            self._check_order(planned, getattr(compiled, "source_code", None), half)
        return compiled

    def _place(
        self, pipeline: Pipeline, gm: fx.GraphModule, context: PassContext, half: str
    ) -> list[PassRecord]:
        """The last pass; with a cost model, one rank plans and the others follow."""
        if self.options.hardware is None:
            return pipeline.run(gm, context)
        unplanned = self._agree(gm, context, half) if self.options.verify != "off" else ""
        return self.planning.place(pipeline, gm, context, unplanned, half)

    def _check_of(
        self, gm: fx.GraphModule, context: PassContext, half: str
    ) -> Callable[[Sequence[Any]], None] | None:
        """What a planned half with symbolic sizes does in front of each run; None where nothing can be exceeded."""
        if self.options.memory_budget is None or not has_symbolic_sizes(gm):
            return None
        planned = copy_graph(gm)
        return RunningSizes(
            gm=planned,
            context=context,
            resident=self.resident,
            budget_bytes=self.options.memory_budget,
            what=f"graph {self.index} ({half})",
            refusing=lambda: self.refusing(f" ({half})", planned, "run"),
        ).check

    def _agree(self, gm: fx.GraphModule, context: PassContext, half: str) -> str:
        """Agrees on the collectives of each group; returns a fingerprint of all of them, "" for none."""
        labels = group_labels(gm, context.mesh)
        served = reduced_parameters(gm, context)
        sequences: dict[str, list[str]] = {}
        for node in filter(is_collective, gm.graph.nodes):
            names = sorted(binding.name for binding in served.get(node) or shards_behind(node, context))
            text = collective_text(node, labels) + (f" of {', '.join(names)}" if names else "")
            sequences.setdefault(group_name(node), []).append(text)
        for name, sequence in sequences.items():
            agree_on_group(name, sequence, what=f"graph {self.index} ({half})")
        if not sequences:
            return ""
        # In the order in which the groups are first used: their names differ between ranks.
        return text_fingerprint("\n".join(text for sequence in sequences.values() for text in sequence))

    def _check_order(self, planned: list[str], source: str | None, half: str) -> None:
        if source is None:
            message = f"graphshard: Inductor shows no source of the {half}: whether its collectives moved is not known"
        elif difference := order_difference(planned, emitted_order(source)):
            message = f"graphshard: Inductor left the planned order of the {half}: {difference}"
        else:
            return
        if self.options.verify == "full":
            raise ScheduleOrderError(message)
        warnings.warn(message, stacklevel=2)

    def _variant_name(self, half: str) -> str:
        """``backward`` for the first state it is compiled for, then ``backward-2``, ..."""
        self.variants[half] += 1
        return half if self.variants[half] == 1 else f"{half}-{self.variants[half]}"

    def _text(self, gm: fx.GraphModule, context: PassContext) -> str:
        if self.options.dump is None:
            return ""
        return graph_text(gm, mesh=context.mesh, parameters=context.parameters)

    def _dump_records(self, stage: str, records: list[PassRecord], first: int = 1) -> None:
        for step, record in enumerate(records, start=first):
            self._dump(stage, f"{step}-{record.name}", record.text)

    def _dump_memory(self, gm: fx.GraphModule, stage: str) -> None:
        if self.options.dump is not None:
            timeline = memory_timeline(gm, kept=kept_inputs(gm))
            self._dump(stage, "memory", timeline.text(node_names(gm)))

    def _dump_plan(self, record: PassRecord, stage: str, labels: Mapping[str, str]) -> None:
        if isinstance(record.report.planned, PlannedGraph):
            self._dump(stage, "plan", f"{record.report.planned.plan.with_labels(labels)}\n")

    def _dump(self, stage: str, step: str, text: str) -> None:
        if self.options.dump is not None:
            (self.options.dump / f"graph{self.index}.{stage}.{step}.txt").write_text(text)


def _gloo_groups(gm: fx.GraphModule) -> tuple[str, ...]:
    """Names of the process groups of the reduce-scatters that gloo runs."""
    reductions = gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    names = {group_name(node) for node in reductions if node.meta["val"].device.type == "cpu"}
    return tuple(sorted(name for name in names if uses_gloo(group_by_name(name))))


def _is_on_gloo(gm: fx.GraphModule) -> bool:
    """Whether gloo runs all collectives of a graph."""
    groups = {group_name(node) for node in gm.graph.nodes if is_collective(node)}
    return all(uses_gloo(group_by_name(name)) for name in groups)


def _communicates(gm: fx.GraphModule) -> bool:
    return any(map(is_collective, gm.graph.nodes))


class _JointPasses(CustomGraphPass):
    """Inductor's handle on the joint passes of one compilation."""

    def __init__(self, compilation: _Compilation) -> None:
        self._compilation = compilation

    def __call__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        self._compilation.run_joint(graph.owning_module)

    def uuid(self) -> str:
        return JOINT_PIPELINE.uuid()
