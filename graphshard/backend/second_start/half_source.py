"""What the variants of a half are compiled from, as bytes.

Torch's pickler of graphs writes fake values as shapes, and reads them as fake values of the process that reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..._compat import tree_map
from ..._compat_kept import pickled, unpickled
from ...ir import copy_graph
from ...memory import DONATED

#: What the steps of a compilation read of nodes. The rest may hold classes and functions, which cannot be written.
_WRITTEN = frozenset(
    {
        "val", "tensor_meta", "unbacked_bindings", "desc", "partitioner_tag", "recompute", "ac_graph_id", "seq_nr",
        "custom", "stack_trace", "output_stack_traces", "original_aten", "mutation_region_id", "autograd_backward",
        "is_gradient_acc", "user_visible_output_idxs", DONATED,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfSource:
    """A half at level 1 and what its compilation needs.

    Attributes:
        gm: the half.
        example_inputs: its fake inputs.
        joint: the result of the joint passes.
        arguments: keyword arguments of Inductor's inner compiler.
    """

    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    joint: Any
    arguments: Mapping[str, Any]

    def as_bytes(self) -> bytes:
        """It, and what AOTAutograd knows of the half now."""
        inputs = tuple(map(_without_base, self.example_inputs))
        return pickled((_without_bases(self.gm), inputs, self.joint, dict(self.arguments)), _WRITTEN)

    @staticmethod
    def from_bytes(data: bytes) -> HalfSource:
        """Reads :meth:`as_bytes`; what AOTAutograd knew of the half goes to the context of the caller."""
        gm, inputs, joint, arguments = unpickled(data)
        gm.recompile()
        return HalfSource(gm=gm, example_inputs=inputs, joint=joint, arguments=arguments)


def _without_bases(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose fake values are no views of others: torch's pickler cannot write a base (checked: 2.13)."""
    gm = copy_graph(gm)
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(_without_base, node.meta["val"])
    return gm


def _without_base(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value._is_view() else value
