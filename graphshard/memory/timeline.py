"""Live bytes over the nodes of a graph, as the memory model returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
    """One value in memory.

    Attributes:
        node: the node that made it.
        part: the item of a tuple (``[1]``), " (copy)" of a collective or " (scratch)" of a kernel; else "".
        num_bytes: its size.
    """

    node: fx.Node
    part: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Live bytes over one order of a graph's nodes.

    Attributes:
        nodes: the order.
        live_bytes: for each node the bytes live while it runs, inputs and results included, without ``kept_bytes``.
        kept_bytes: bytes of the inputs that the caller keeps throughout, and of the module's own tensors.
        live_at_peak: the values live at the first node of the peak, largest first.
    """

    nodes: tuple[fx.Node, ...]
    live_bytes: tuple[int, ...]
    kept_bytes: int
    live_at_peak: tuple[LiveValue, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest of ``live_bytes``; 0 for a graph without nodes."""
        return max(self.live_bytes, default=0)

    @property
    def peak_node(self) -> fx.Node:
        """The first node at which the peak is reached."""
        return self.nodes[self.live_bytes.index(self.peak_bytes)]

    def text(self, names: Mapping[fx.Node, str]) -> str:
        """A text with the peak, the values live there, and the bytes at each node.

        Args:
            names: names of nodes (``graph_text.node_names``); other nodes keep their own.
        """

        def name(node: fx.Node) -> str:
            return names.get(node, node.name)

        lines = [f"peak {self.peak_bytes} bytes at {name(self.peak_node)}, where these are live:"]
        lines += [f"{value.num_bytes:>14}  {name(value.node)}{value.part}" for value in self.live_at_peak]
        lines += [
            f"beside {self.kept_bytes} bytes of inputs that the caller keeps",
            "live while each node runs:",
        ]
        lines += [
            f"{num_bytes:>14}  {name(node)}"
            for node, num_bytes in zip(self.nodes, self.live_bytes, strict=True)
        ]
        return "\n".join(lines) + "\n"
