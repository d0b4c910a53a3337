"""What a pass may know beside the graph: a frozen context, made once per captured graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..cost import GraphPrices
from ..ir import (
    KEEP_PIECE,
    RESHARD,
    TANGENT_INPUT,
    UNSHARD,
    ExtendedInputs,
    MeshAxis,
    MeshLayout,
    ParameterBinding,
    PlacedParameter,
    PlainParameter,
    ReshardCall,
    UnshardCall,
    parameter_of,
    type_key,
)
from ..memory import UNMEASURED, KernelScratch
from ..progress import TimeLimit
from .joint_outputs import joint_outputs
from .known_plan import KnownPlan

#: Pairs of a unit and the units whose gathers start once its own are copied out.
PrefetchOrder = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """Mesh, parameters and checking mode of one graph.

    Attributes:
        mesh: axes whose process groups appear in the graph.
        parameters: the sharded parameters among the graph's inputs.
        first_gradient: index of the first output of the backward; None if the graph has no gradient outputs (a forward
            or an inference graph).
        full_checks: every fake value is recomputed when TYPED is checked.
        pieces: parameters of which a backward half takes a piece kept from the forward.
        unreduced: outputs of the backward, gradients of parameters, that leave this graph unreduced on purpose.
        plain: full parameters among the inputs of a graph captured without ``fully_shard``.
        placed: whole parameters among the inputs of a graph captured without ``parallelize``.
        extended: the inputs that stand for parameters with gather extensions.
        forward_prefetch, backward_prefetch: the prefetches that the user asked for, in either half.
        max_reductions: reductions that may be open at a time; 0 for the schedule's default.
        prices: the cost model; None if nothing is planned by cost.
        known_plan: the plan of another rank to follow; None to make one.
        start: a plan of a like graph to start from; None to search from scratch.
        held_bytes: counted in the user's memory budget: what is held outside of the graph while it runs (gradients
            that wait for a later micro-batch and gathered parameters that are not inputs of it).
        resident_bytes: counted in the user's memory budget: the inputs that live through the whole step (shards,
            buffers, inputs of the model). What a half does not take of them is held beside it. 0 if the budget does not
            count them.
        default_peak_bytes: without a user's budget, the most that plans may take: the peak of the halves with one unit
            gathered ahead, without the inputs that live through the whole step; None if it is not known.
        device_type: the type of the device that the graph will run on; None for that of its values. A capture on fake
            tensors of the CPU may be for another device.
        scratch: what kernels of libraries allocate for themselves where the graph will run.
        limit: when the search for a plan ends with the best one so far.
    """

    mesh: MeshLayout = field(default_factory=MeshLayout)
    parameters: tuple[ParameterBinding, ...] = ()
    first_gradient: int | None = None
    full_checks: bool = False
    unreduced: frozenset[int] = frozenset()
    pieces: tuple[ParameterBinding, ...] = ()
    forward_prefetch: PrefetchOrder = ()
    backward_prefetch: PrefetchOrder = ()
    max_reductions: int = 0
    plain: tuple[PlainParameter, ...] = ()
    placed: tuple[PlacedParameter, ...] = ()
    extended: tuple[ExtendedInputs, ...] = ()
    prices: GraphPrices | None = None
    known_plan: KnownPlan | None = None
    held_bytes: int = 0
    resident_bytes: int = 0
    default_peak_bytes: int | None = None
    device_type: str | None = None
    scratch: KernelScratch = UNMEASURED
    limit: TimeLimit = field(default_factory=TimeLimit, repr=False, compare=False)
    start: KnownPlan | None = field(default=None, repr=False, compare=False)

    def binding(self, placeholder: str) -> ParameterBinding | None:
        """The parameter whose shard or kept piece enters through the placeholder of this name."""
        known = (*self.parameters, *self.pieces)
        return next((binding for binding in known if binding.placeholder == placeholder), None)

    @property
    def held(self) -> frozenset[str]:
        """The inputs that stand for parameters with gather extensions: tensors of their shards, and carriers."""
        return frozenset(name for each in self.extended for name in (each.carrier, *each.inner))

    def holders(self) -> dict[str, ParameterBinding]:
        """For each input that belongs to the shard of a parameter with a gather extension, that parameter."""
        return {name: binding for binding in self.parameters for name in binding.held}

    def prefetched_after(self, unit: str) -> tuple[str, ...]:
        """The units to gather once this one is copied out; empty if the user asked for none."""
        order = self.forward_prefetch if self.first_gradient is None else self.backward_prefetch
        return next((units for name, units in order if name == unit), ())

    def without_group_names(self) -> PassContext:
        """The same on every rank and in every process: axes by their labels, without names of process groups."""
        labels = {axis.group_name: axis.label for axis in self.mesh.axes}

        def unnamed(binding: ParameterBinding) -> ParameterBinding:
            return replace(binding, group_names=tuple(labels.get(name, "") for name in binding.group_names))

        return replace(
            self,
            mesh=MeshLayout(axes=tuple(replace(axis, group_name="") for axis in self.mesh.axes)),
            parameters=tuple(map(unnamed, self.parameters)),
            pieces=tuple(map(unnamed, self.pieces)),
        )

    def for_forward(self) -> PassContext:
        """The context of the forward (or inference) half."""
        return replace(self, first_gradient=None)

    def for_backward(self, unreduced: frozenset[int] = frozenset()) -> PassContext:
        """The context of the backward half: its outputs are the gradients of the inputs, in order."""
        return replace(self, first_gradient=0, unreduced=unreduced)

    def gradient_of(self, binding: ParameterBinding, outputs: Sequence[Any]) -> fx.Node | None:
        """The output of this graph that is the gradient of a parameter; None if there is none."""
        if self.first_gradient is None or binding.gradient < 0:
            return None
        gradient = outputs[self.first_gradient + binding.gradient]
        return gradient if isinstance(gradient, fx.Node) else None

    def reduced_bindings(self) -> list[ParameterBinding]:
        """The parameters whose gradients, where they are outputs of this graph, are reduced."""
        return [
            binding
            for binding in self.parameters
            if binding.num_ranks > 1 and binding.gradient not in self.unreduced
        ]


def read_shards_as_they_are(gm: fx.GraphModule) -> None:
    """Makes ``unshard`` nodes read inputs in place of views that change nothing; edits in place.

    Captures of DTensors hold such views.
    """
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        view = node.args[0]
        if view.target is not torch.ops.aten.view.default or view.args[0].op != "placeholder":
            continue
        if type_key(view.args[0].meta["val"]) == type_key(view.meta["val"]):
            node.update_arg(0, view.args[0])
            if not view.users:
                gm.graph.erase_node(view)


def context_from_shard_ops(
    gm: fx.GraphModule, *, full_checks: bool = False, extended: Sequence[ExtendedInputs] = ()
) -> PassContext:
    """Reads mesh and parameters off the shard ops of a joint or an inference graph, and from nowhere else.

    A joint graph is recognised by its ``tangents`` inputs.

    Args:
        gm: the graph.
        full_checks: as in :class:`PassContext`.
        extended: what its shard ops do not say of parameters with gather extensions. Each has one binding, whatever it
            gathers.
    """
    primals = [
        node for node in gm.graph.find_nodes(op="placeholder") if not node.name.startswith(TANGENT_INPUT)
    ]
    position = {node: index for index, node in enumerate(primals)}
    outputs = joint_outputs(gm.graph)
    gradients: dict[fx.Node, int] = {}
    if outputs is not None:
        gradients = {node: index - outputs.num_results for node, index in outputs.gradients.items()}
    axes: list[MeshAxis] = []
    bindings: dict[fx.Node, ParameterBinding] = {}
    prefetch: dict[str, tuple[str, str]] = {}
    max_reductions = 0
    calls = [UnshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)]
    for call in calls:
        if call.replicate_size > 1:  # the outer axis of a mesh
            label, size, name = call.replicate_axis, call.replicate_size, call.replicate_group
            axes.append(MeshAxis(label=label, size=size, group_name=name))
        axes.append(MeshAxis(label=call.axis, size=call.group_size, group_name=call.group_name))
        if call.reshard_group:
            label = f"{call.axis}/{call.reshard}"
            name = call.reshard_group
            axes.append(MeshAxis(label=label, size=call.reshard, group_name=name, part_of=call.axis))
        if call.reduce_group:
            label, name = f"{call.axis}/reduce", call.reduce_group
            axes.append(MeshAxis(label=label, size=call.group_size, group_name=name, part_of=call.axis))
        prefetch.setdefault(call.unit, (call.forward_prefetch, call.backward_prefetch))
        max_reductions = max(max_reductions, call.max_reductions)
        if call.shard in position and call.shard not in bindings:
            bindings[call.shard] = binding_of(call, position[call.shard], gradients.get(call.shard, -1))
    for param in extended:
        parts = [call for call in calls if parameter_of(call.name) == param.name]
        inputs = {node.name: node for node in position}
        for name in param.inner:
            bindings.pop(inputs.get(name), None)
        if parts and (carrier := inputs.get(param.carrier)) is not None:
            whole = parts[0]._replace(name=param.name, shape=param.shape, shard=carrier)
            binding = binding_of(whole, position[carrier], gradients.get(carrier, -1))
            sent = [call.shard.name for call in parts]
            bindings[carrier] = replace(binding, held=tuple(dict.fromkeys([*param.inner, *sent])))
    return PassContext(
        mesh=MeshLayout.of_axes([*axes, *_further_axes(gm)]),
        parameters=tuple(sorted(bindings.values(), key=lambda binding: binding.position)),
        first_gradient=outputs.num_results if outputs is not None else None,
        full_checks=full_checks,
        forward_prefetch=_prefetch_of(prefetch, 0),
        backward_prefetch=_prefetch_of(prefetch, 1),
        max_reductions=max_reductions,
        extended=tuple(extended),
    )


def _further_axes(gm: fx.GraphModule) -> list[MeshAxis]:
    """The axes of reshards. They lie inside those of data parallelism: ranks beside each other communicate most."""
    calls = [ReshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
    return [MeshAxis(label=call.axis, size=call.group_size, group_name=call.group_name) for call in calls]


def _prefetch_of(prefetch: dict[str, tuple[str, str]], half: int) -> PrefetchOrder:
    return tuple((unit, tuple(both[half].split(","))) for unit, both in prefetch.items() if both[half])


def pieces_of(gm: fx.GraphModule) -> tuple[ParameterBinding, ...]:
    """The pieces that a joint graph keeps for its backward; the backward's input has the name of the node here."""
    calls = [UnshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)]
    return tuple(binding_of(call, -1, -1) for call in calls if _is_piece(call.shard))


def _is_piece(value: fx.Node) -> bool:
    return value.target is operator.getitem and value.all_input_nodes[0].target is KEEP_PIECE


def binding_of(call: UnshardCall, position: int, gradient: int) -> ParameterBinding:
    """The parameter whose shard enters as ``call.shard``.

    Args:
        call: its gather.
        position: of the input among those of the forward.
        gradient: index of its gradient among the outputs of the backward; -1 without one.
    """
    return ParameterBinding(
        placeholder=call.shard.name,
        position=position,
        gradient=gradient,
        name=call.name,
        unit=call.unit,
        shape=tuple(call.shape),
        dim=call.dim,
        axis=call.axis,
        group_size=call.group_size,
        reshard=call.reshard,
        replicate_axis=call.replicate_axis,
        replicate_size=call.replicate_size,
        group_names=tuple(
            filter(None, (call.group_name, call.reshard_group, call.replicate_group, call.reduce_group))
        ),
        row_offset=call.row_offset,
        handle=getattr(call.handle, "name", ""),
    )
