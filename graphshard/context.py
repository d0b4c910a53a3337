"""What a pass may know besides the graph: a frozen context, made once per captured graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from .mesh import MeshAxis, MeshLayout
from .ops import UNSHARD
from .params import ParameterBinding
from .rewrite import output_values


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """Mesh, parameters and checking mode of one graph.

    Attributes:
        mesh: axes whose process groups appear in the graph.
        parameters: the sharded parameters among the graph's inputs.
        first_gradient: index of the output that is the gradient of input 0; None when the graph
            has no gradient outputs (a forward or an inference graph).
        full_checks: recompute every fake value when TYPED is checked.
    """

    mesh: MeshLayout = field(default_factory=MeshLayout)
    parameters: tuple[ParameterBinding, ...] = ()
    first_gradient: int | None = None
    full_checks: bool = False

    def binding(self, placeholder: str) -> ParameterBinding | None:
        """The parameter whose shard enters through the placeholder of this name."""
        return next((binding for binding in self.parameters if binding.placeholder == placeholder), None)

    def for_forward(self) -> PassContext:
        """The context of the forward (or inference) half."""
        return replace(self, first_gradient=None)

    def for_backward(self) -> PassContext:
        """The context of the backward half: its outputs are the gradients of the inputs, in order."""
        return replace(self, first_gradient=0)


def context_from_shard_ops(gm: fx.GraphModule, *, full_checks: bool = False) -> PassContext:
    """Reads mesh and parameters off the ``unshard`` nodes of a joint or an inference graph.

    Nothing is looked up anywhere else: the nodes carry what there is to know. In a joint graph
    (recognised by its ``tangents`` inputs) the last outputs are one gradient per forward input.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    primals = [node for node in placeholders if not node.name.startswith("tangents_")]
    position = {node: index for index, node in enumerate(primals)}
    axes: list[MeshAxis] = []
    bindings: dict[fx.Node, ParameterBinding] = {}
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        shard, name, unit, shape, dim, axis, group_size, group_name, reshard, _, _ = node.args
        axes.append(MeshAxis(label=axis, size=group_size, group_name=group_name))
        if shard in position and shard not in bindings:
            bindings[shard] = ParameterBinding(
                placeholder=shard.name,
                position=position[shard],
                name=name,
                unit=unit,
                shape=tuple(shape),
                dim=dim,
                axis=axis,
                group_size=group_size,
                reshard=reshard,
            )
    is_joint = len(primals) < len(placeholders)
    return PassContext(
        mesh=MeshLayout.of_axes(axes),
        parameters=tuple(sorted(bindings.values(), key=lambda binding: binding.position)),
        first_gradient=len(output_values(gm.graph)) - len(primals) if is_joint else None,
        full_checks=full_checks,
    )
