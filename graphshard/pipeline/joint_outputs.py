"""Which outputs of a joint graph are results of the forward, and which is the gradient of which input.

AOTAutograd describes each input and each output. Positions do not tell: an input that is a tensor subclass becomes
several inputs but has one gradient or none, and an effect token is an input without a gradient. A graph without
descriptions (written by hand) has one gradient for each input of the forward, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from .._compat import gradient_described, is_described_result, is_described_user_result
from ..ir import TANGENT_INPUT, output_values


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOutputs:
    """The outputs of a joint graph.

    Attributes:
        primals: the inputs of the forward.
        num_results: number of outputs of the forward; the outputs behind them are the backward's.
        gradients: for each input, the index of its gradient among all outputs; an input without one is left out. The
            output may be None.
        own_results: indices of the outputs that the traced function returns. The other outputs of the forward are new
            values of inputs that it writes to, effect tokens, and bases of views.
    """

    primals: tuple[fx.Node, ...]
    num_results: int
    gradients: Mapping[fx.Node, int]
    own_results: tuple[int, ...]


def joint_outputs(graph: fx.Graph) -> JointOutputs | None:
    """The outputs of a joint graph; None for a graph without tangents, which is no joint graph."""
    inputs = graph.find_nodes(op="placeholder")
    primals = tuple(node for node in inputs if not node.name.startswith(TANGENT_INPUT))
    if len(primals) == len(inputs):
        return None
    described = graph.output_node().meta.get("desc")
    if described is None:
        return _by_position(primals, len(output_values(graph)))
    is_result = [is_described_result(one) for one in described]
    num_results = is_result.index(False) if False in is_result else len(is_result)
    by_description = {node.meta["desc"]: node for node in primals if "desc" in node.meta}
    found = {gradient_described(one): index for index, one in enumerate(described)}
    return JointOutputs(
        primals=primals,
        num_results=num_results,
        gradients={node: found[one] for one, node in by_description.items() if one in found},
        own_results=tuple(
            index for index in range(num_results) if is_described_user_result(described[index])
        ),
    )


def _by_position(primals: tuple[fx.Node, ...], num_outputs: int) -> JointOutputs:
    num_results = num_outputs - len(primals)
    return JointOutputs(
        primals=primals,
        num_results=num_results,
        gradients={node: num_results + index for index, node in enumerate(primals)},
        own_results=tuple(range(num_results)),
    )
