"""merge_waits: one wait for each result of a collective.

A tensor of tensor parallelism that is read in several places may be traced with a wait for each of them (torch 2.14
does so). This pass keeps the first wait only. Later passes move a collective together with its one wait.

Before::

    %reduce_scatter_0: f32[4, 8] = reduce_scatter_tensor(%mm_0, 'sum', 2, 'tp')
    %wait_0: f32[4, 8] = wait_tensor(%reduce_scatter_0)
    %mm_1: f32[4, 8] = mm(%wait_0, %primals_2)
    %wait_1: f32[4, 8] = wait_tensor(%reduce_scatter_0)
    %mm_2: f32[4, 8] = mm(%wait_1, %primals_3)

After::

    %reduce_scatter_0: f32[4, 8] = reduce_scatter_tensor(%mm_0, 'sum', 2, 'tp')
    %wait_0: f32[4, 8] = wait_tensor(%reduce_scatter_0)
    %mm_1: f32[4, 8] = mm(%wait_0, %primals_2)
    %mm_2: f32[4, 8] = mm(%wait_0, %primals_3)

A model may call a collective as an op with a derivative of its own (``_c10d_functional_autograd``). It becomes the
plain op here: the joint graph already holds its gradient.

Numerics: bitwise the same.

Does not handle:

- waits for memory that a collective writes to in place: they stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.ir import drop_derivatives, merge_waits
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class MergeWaits:
    """See the module docstring; no options."""

    name: ClassVar[str] = "merge_waits"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "waits merged" and "derivatives dropped"."""
        dropped = drop_derivatives(gm.graph)
        merged = merge_waits(gm.graph)
        counts = {"waits merged": merged, "derivatives dropped": dropped}
        return PassReport(changed=any(counts.values()), counts=counts)
