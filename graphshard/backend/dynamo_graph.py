"""What a graph of Dynamo says before it is compiled: its models, their process groups and units, and the options.

Handles of units are among the graph's inputs; everything here is read from them once. Nothing here holds a model.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .._compat import graph_break_after, group_by_name, uses_gloo
from .._compat_composable import is_sharded_by_torch
from ..coordination import count_in_group, is_fake_group, refusing
from ..cost import HardwareCard, load_card, missing_peaks
from ..fsdp import place_of_forward_in_python, runs_compiled_block
from ..fsdp.state import ROOT, Tree, inner_tensors, unit_of
from ..hardware import STAND_INS, OwnCard, need_of_graph, own_card
from ..ir import UNSHARD, group_name, is_collective
from ..memory import KernelMeasurements, table_beside
from ..pipeline import PassContext
from ..progress import LOGGER, PlanningTime
from ..shown_progress import ShownProgress
from .inductor import config_patches
from .observer import next_index
from .options import AUTO, BackendOptions

#: Options that ask something of a plan; without effect where nothing is planned.
_OF_A_PLAN = (
    "memory_budget",
    "limit_all_gathers",
    "backward_prefetch",
    "forward_prefetch",
    "planning_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoGraph:
    """One graph that Dynamo hands over.

    Attributes:
        options: the user's, and what FSDP1's wrappers of the models ask for.
        given: the user's alone.
        index: number of the graph, for errors, log lines and dumps.
        inductor: Inductor's settings for its compilation.
        has_own_card: the card is that of ``hardware="auto"``; the user has named none.
        models: by process group, a label of the models that the graph is a part of; see :func:`label_models`.
        groups: process groups of the models, whose ranks are told if this rank stops with an error; none where ranks
            do not compare what they do (``verify="off"``).
        parameters: names of the models' sharded parameters, and the labels of their units.
        is_broken: Dynamo has cut a forward of these models into several graphs.
        waiting: labels of the units whose gradients wait for a later micro-batch; none of several models.
        kernels: what kernels allocate for themselves on this machine; kept beside the file of a user's card.
        are_shards_pinned: shards lie in pinned memory of the CPU, so gradients may as well.
        planning: how long its planning may take.
        progress: shows, on rank 0, what takes long.
        is_ahead: it is compiled for a later run, and never computes.
        stands_for_gloo: its fake process groups stand for groups of gloo in that run.
    """

    options: BackendOptions
    given: BackendOptions
    index: int = 0
    inductor: Mapping[str, Any] = field(default_factory=dict)
    has_own_card: bool = False
    models: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_broken: bool = False
    waiting: frozenset[str] = frozenset()
    kernels: KernelMeasurements = field(default_factory=KernelMeasurements)
    are_shards_pinned: bool = False
    planning: PlanningTime = field(default_factory=PlanningTime)
    progress: ShownProgress = field(default_factory=lambda: ShownProgress(is_on=False))
    is_ahead: bool = False
    stands_for_gloo: bool = False

    @property
    def are_ranks_compared(self) -> bool:
        """Whether the ranks agree on collectives and plans before they run."""
        return self.options.verify != "off"

    def is_on_gloo(self, name: str) -> bool:
        """Whether gloo communicates the CPU tensors of a process group, here or in the run that it stands for."""
        return uses_gloo(group_by_name(name)) or (self.stands_for_gloo and is_fake_group(name))

    def priced(self, gm: fx.GraphModule) -> DynamoGraph:
        """The same with rules in place of a card of ``hardware="auto"`` that cannot price a product of ``gm``.

        Dtypes are known only when AOTAutograd has traced what Dynamo captured: tensor subclasses hide them. All ranks
        have the same products and the same card, so all decide alike.

        Raises:
            OptionError: an option needs the card.
        """
        card = self.options.card
        missing = missing_peaks(gm, card) if self.has_own_card and card is not None else []
        if not missing or card is None:
            return self
        reason = f"card {card.name!r} has no peak_flops for {', '.join(missing)}"
        LOGGER.warning("graph %d: collectives are placed by rules, without a plan: %s", self.index, reason)
        return replace(self, options=self.given.with_card(None, reason), has_own_card=False, models={})

    def refusing(self, half: str, gm: fx.GraphModule, verb: str = "compile") -> AbstractContextManager[None]:
        """A context whose errors reach all ranks that communicate with this one in the models, or in ``gm``."""
        own = map(group_name, filter(is_collective, gm.graph.nodes)) if self.groups else ()
        return refusing(dict.fromkeys([*self.groups, *own]), f"{verb} graph {self.index}{half}")

    def is_whole_step(self, context: PassContext) -> bool:
        """Whether no part of the models' step is in another graph, as far as can be told.

        A parameter that this graph does not read may be unused, or read by another graph. It counts as unused if
        Dynamo has not cut the forward, and its unit has parameters in this graph or is the root. A user who compiles
        blocks one by one leaves out whole units.
        """
        read = {binding.name for binding in context.parameters}
        units = {binding.unit for binding in context.parameters}
        missing = {unit for name, unit in self.parameters.items() if name not in read}
        if not missing:
            return True
        return not self.is_broken and bool(units - {ROOT}) and missing <= units | {ROOT}


def groups_of(example_inputs: Sequence[Any]) -> tuple[str, ...]:
    """The process groups of the models that a graph with these inputs is a part of."""
    return tuple(dict.fromkeys(name for tree in _trees_of(example_inputs) for name in tree.groups()))


def _trees_of(example_inputs: Sequence[Any]) -> list[Tree]:
    return list({id(unit.tree): unit.tree for unit in filter(None, map(unit_of, example_inputs))}.values())


def read_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions, *, is_ahead: bool = False
) -> DynamoGraph:
    """Reads what a graph and its inputs say; tells their models if a graph break follows.

    Args:
        gm: what Dynamo captured.
        example_inputs: its inputs.
        options: the user's.
        is_ahead: see :class:`DynamoGraph`.

    Warns:
        UserWarning: no parameter is sharded, a graph break follows, or the hardware card is of another kind of device.

    Raises:
        OptionError: an Inductor option that cannot be set, or a folder that cannot be made.
    """
    _warn_if_never_sharded(gm, example_inputs)
    _warn_of_options_of_a_block(gm, options)
    trees = _trees_of(example_inputs)
    is_shared = options.verify != "off"
    groups = groups_of(example_inputs) if is_shared else ()
    is_own = options.hardware == AUTO
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    progress = ShownProgress(is_on=options.progress and is_first)
    with refusing(groups, "begin to compile a graph"):
        inductor = config_patches(options.inductor, has_budget=options.memory_budget is not None)
        index = next_index(options.dump)
    with (
        refusing(groups, f"compile graph {index}"),
        progress.stage("finding the hardware card of this machine"),
    ):
        options = _with_own_card(
            options, gm, example_inputs, trees, what=f"graph {index}", report=progress.tell
        )
        kernels = _measurements_beside(options.card, is_cached=is_own)
    given = options
    for settings in [tree.units()[0].settings for tree in trees]:
        options = options.with_orders(settings.forward_order, settings.backward_order)
    _warn_of_another_device(options.card, trees, example_inputs)
    for tree in trees:
        _tell_of_break(tree, gm)
        _tell_of_python(tree)
    return DynamoGraph(
        options=options,
        given=given,
        index=index,
        inductor=inductor,
        has_own_card=is_own,
        models=label_models(trees) if is_shared and options.card is not None else {},
        groups=groups,
        parameters={slot.name: unit.label for tree in trees for unit in tree.units() for slot in unit.slots},
        is_broken=any(tree.graph_breaks for tree in trees),
        waiting=_waiting_units(example_inputs),
        kernels=kernels,
        are_shards_pinned=any(
            _is_pinned(slot.param) for tree in trees for unit in tree.units() for slot in unit.slots
        ),
        planning=PlanningTime(seconds=options.planning_seconds),
        progress=progress,
        is_ahead=is_ahead,
        stands_for_gloo=is_ahead and all(map(_is_on_cpu, example_inputs)),
    )


def _with_own_card(
    options: BackendOptions,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    trees: Sequence[Tree],
    *,
    what: str,
    report: Callable[[str], None],
) -> BackendOptions:
    """The options with the card of this machine in place of "auto"; without one, with rules and a line that says why.

    Raises:
        OptionError: there is no card, and an option needs one.
        AgreementError, RefusedError: see :func:`graphshard.hardware.own_card`.
    """
    if options.hardware != AUTO:
        return options
    found = need_of_graph(gm, example_inputs, trees)
    if not trees or not (found.groups or options.memory_budget):
        # Nothing to place or to keep. A budget still needs a card, and any will do: the same on all ranks.
        return options.with_card(load_card(STAND_INS[found.device.type]) if options.needs_card else None, "")
    if options.verify == "off":
        own = OwnCard(reason='verify="off" lets the ranks share neither a card nor a plan')
    else:
        own = own_card(found.need, found.groups, found.device, what=what, report=report)
    if own.card is None:
        LOGGER.warning("%s: collectives are placed by rules, without a plan: %s", what, own.reason)
    return options.with_card(own.card, own.reason)


def label_models(trees: Sequence[Tree]) -> dict[str, str]:
    """A label of some models for each of their process groups; equal on all ranks of the group.

    Models with equal parameters may differ in their compute, or run with other sizes, so each has plans of its own. The
    ranks of a group run their models for the first time in the same order, so they count them alike.
    """
    labels: dict[str, list[str]] = {}
    for tree in trees:
        for name in tree.groups():
            if is_fake_group(name):
                continue
            if name not in tree.numbers:
                tree.numbers[name] = count_in_group(name, "models")
            labels.setdefault(name, []).append(str(tree.numbers[name]))
    return {name: "+".join(numbers) for name, numbers in labels.items()}


def _is_on_cpu(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def _is_pinned(parameter: torch.nn.Parameter) -> bool:
    local = parameter._local_tensor if isinstance(parameter, dist.tensor.DTensor) else parameter
    held = [local] if type(local) is torch.Tensor else inner_tensors(local).values()
    return any(value.device.type == "cpu" and value.is_pinned() for value in held)


def _measurements_beside(card: HardwareCard | None, *, is_cached: bool) -> KernelMeasurements:
    file = table_beside(card.file) if card is not None and card.file is not None else None
    return KernelMeasurements(file, is_cached=is_cached)


def _waiting_units(inputs: Sequence[Any]) -> frozenset[str]:
    units = [unit for unit in map(unit_of, inputs) if unit is not None]
    is_one_model = len({id(unit.tree) for unit in units}) == 1
    return frozenset(unit.label for unit in units if is_one_model and not unit.reduce_grads)


def _tell_of_break(tree: Tree, gm: fx.GraphModule) -> None:
    """Warns, once for each place, that the plan of a model ends at a graph break."""
    place = graph_break_after(gm)
    if place is None or place in tree.graph_breaks:
        return
    tree.graph_breaks.add(place)
    _warn_of_break(f"in two at {place}")


def _tell_of_python(tree: Tree) -> None:
    """Warns, once, that Python runs a forward of a compiled model, as around a loop that has a graph break."""
    place = place_of_forward_in_python() if tree.in_forward and not tree.graph_breaks else None
    if place is not None:
        tree.graph_breaks.add(place)
        _warn_of_break(
            f"in pieces at {place}: Python runs the code around it, since Dynamo cannot go on behind a graph break in "
            "a loop, a try or a with"
        )


def _warn_of_break(how: str) -> None:
    warnings.warn(
        f"graphshard: a graph break cuts the model {how}. Each part is planned alone: nothing is "
        "prefetched or overlapped across the break, a parameter that both parts read is gathered twice, and a memory "
        "budget counts what both parts hold. torch.compile(fullgraph=True) finds all breaks",
        stacklevel=5,
    )


def _torch_module_that_runs() -> str | None:
    """The class of a module that torch.distributed.fsdp has sharded and that is being called; None if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, torch.nn.Module) and is_sharded_by_torch(module):
            return type(module).__name__
        frame = frame.f_back
    return None


def _warn_if_never_sharded(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    # What unshard() shows is no leaf: it is the result of a gather.
    trained = (value for value in example_inputs if type(value) is torch.nn.Parameter and value.requires_grad)
    plain = [value for value in trained if value.is_leaf]
    sharded = any(isinstance(value, dist.tensor.DTensor) for value in example_inputs)
    if plain and not sharded and not gm.graph.find_nodes(op="call_function", target=UNSHARD):
        torch_module = _torch_module_that_runs()
        if torch_module is not None:
            warnings.warn(
                f"graphshard: {torch_module} was sharded by torch.distributed.fsdp, whose gathers and reductions run "
                "outside of compiled graphs, so its graphs are compiled by Inductor alone and nothing is planned; "
                "shard the model with graphshard.fully_shard",
                stacklevel=3,
            )
            return
        warnings.warn(
            f"graphshard: none of the {len(plain)} parameters of this graph is sharded, so it is compiled "
            "by Inductor alone; call graphshard.fully_shard on the model before torch.compile",
            stacklevel=3,
        )


def _warn_of_options_of_a_block(gm: fx.GraphModule, options: BackendOptions) -> None:
    if not runs_compiled_block() or gm.graph.find_nodes(op="call_function", target=UNSHARD):
        return
    usual = BackendOptions()
    given = [name for name in _OF_A_PLAN if getattr(options, name) != getattr(usual, name)]
    if given:
        warnings.warn(
            f"graphshard: {', '.join(given)} without effect: this block is compiled by itself, so its unit is gathered "
            "around the graph, and nothing is planned; compile the whole model for a plan",
            stacklevel=3,
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
            stacklevel=3,
        )
