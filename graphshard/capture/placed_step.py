"""A captured step of a plain model with placements on a further axis of the mesh, as one rank runs it.

Values between modules are marked while Dynamo traces. In the joint graph the placed parameters become pieces behind
reshards, as ``parallelize`` gives them to a forward. The passes of training do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn
from torch.distributed.tensor import Shard

from ..backend import RESHARDING
from ..ir import (
    REPLICATE,
    RESHARD,
    MeshAxis,
    PlacedParameter,
    ReshardCall,
    group_name,
    is_collective,
    local_shape,
    placement_text,
)
from ..parallel import Stated, hold_values, state_placements
from ..passes import InsertReshards
from ..pipeline import PassContext, Pipeline
from .rules import ShardingRules

#: Runs a pipeline on the joint graph with a context.
Run = Callable[[Pipeline, PassContext], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """Where the parameters of a model lie on one axis.

    Attributes:
        axis: the axis; its group has the name of its label.
        stated: placements by name of a parameter or a module.
    """

    axis: MeshAxis
    stated: Stated

    @staticmethod
    def of(model: nn.Module, rules: ShardingRules) -> PlacedStep | None:
        """The placements of ``rules`` for a model; None without any, or on an axis of one rank.

        Raises:
            ShardingError: the placements do not fit the model.
        """
        if rules.placements is None:
            return None
        stated = state_placements(model, rules.placements)
        axis = rules.placed_axis
        return PlacedStep(axis=axis, stated=stated) if axis is not None else None

    def hold(self, model: nn.Module) -> None:
        """Marks values between modules of the model that Dynamo is to trace."""
        axis = self.axis
        hold_values(model, self.stated, (axis.label, axis.size, axis.group_name, 0))

    def shape_of(self, name: str, shape: Sequence[int]) -> list[int]:
        """Shape of the largest piece of a parameter."""
        placement = self.stated.parameters.get(name)
        text = REPLICATE if placement is None else self._text(placement, len(shape))
        return local_shape(shape, text, self.axis.size, 0)

    def parameters(self, shapes: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[PlacedParameter, ...]:
        """The cut parameters of a joint graph.

        Args:
            shapes: input and whole shape of each parameter, by its name.
        """
        axis, found = self.axis, []
        for name, (placeholder, shape) in shapes.items():
            placement = self.stated.parameters.get(name)
            if isinstance(placement, Shard):
                call = ReshardCall(
                    None, self._text(placement, len(shape)), REPLICATE, list(shape), axis.label, axis.size,
                    axis.group_name, 0,
                )  # fmt: skip
                found.append(PlacedParameter(placeholder=placeholder, name=name, call=call))
        return tuple(found)

    @staticmethod
    def _text(placement: object, ndim: int) -> str:
        is_cut = isinstance(placement, Shard)
        return placement_text(Shard(placement.dim % ndim)) if is_cut else REPLICATE  # type: ignore[attr-defined]


def run_reshard_passes(
    gm: fx.GraphModule, placed: Sequence[PlacedParameter], context: PassContext, run: Run
) -> dict[tuple[str, str], str]:
    """Makes a joint graph that of one rank of the axis.

    Args:
        gm: the joint graph on whole tensors; edited in place.
        placed: its cut parameters.
        context: what the passes know besides.
        run: runs them.

    Returns:
        For each collective, by the names of its group and its node, what it does: ``Partial(sum) -> Replicate``, say.
    """
    run(Pipeline(InsertReshards()), replace(context, placed=tuple(placed)))
    propagate, lower = RESHARDING.split(-1)
    run(propagate, context)
    before = {node.name for node in gm.graph.nodes if is_collective(node)}
    calls = [ReshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
    run(lower, context)
    groups = {call.group_name for call in calls}
    starts = [
        node for node in gm.graph.nodes
        if is_collective(node) and node.name not in before and group_name(node) in groups
    ]  # fmt: skip
    moves = [f"{call.src} -> {call.dst}" for call in calls if _communicates(call)]
    return {(group_name(node), node.name): text for node, text in zip(starts, moves, strict=True)}


def _communicates(call: ReshardCall) -> bool:
    is_local = call.src == REPLICATE or (
        call.dst.startswith("Partial") and not call.src.startswith("Partial")
    )
    return call.src != call.dst and not is_local
